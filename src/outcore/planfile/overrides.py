"""overrides: apply rules that hold for any plan, whatever a policy does with the rest.

The last rule that matches a storage decides. `keep` holds for every gap of a storage: it stays on
the device. `offload` and `recompute` hold for the gap across the boundary, in which the storage
waits for the backward pass; the policy chooses for its other gaps. If a plan already does what a
rule requires, it keeps its own way of doing it (tier, hints).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from outcore.errors import OptionValueError
from outcore.ir.liveness import Liveness, crossing_gaps, gaps, liveness
from outcore.ir.plan import KEEP, Choice, Gap, Keep, Recompute
from outcore.ir.problem import Problem
from outcore.ir.trace import Ref, Trace
from outcore.planfile.nouns import Action, Rule
from outcore.planfile.places import labels
from outcore.policies.candidates import away, recomputable

NEAR = 5
"""How many similar names are listed for a rule that matches nothing."""


def forced(problem: Problem, rules: Sequence[Rule]) -> dict[Gap, Choice]:
    """The choices that `rules` fix, by gap. Takes time linear in ops, and in buffers x rules.

    Raises OptionValueError for what is impossible: to offload without an outer tier, or to
    recompute the result of an op that may not run again.
    """
    trace = problem.trace
    deciding = _deciding(trace, rules)
    crossing = _crossing(trace)
    found: dict[Gap, Choice] = {}
    for gap in gaps(trace):
        rule = deciding.get(gap.buffer)
        if rule is None:
            continue
        if rule.action is Action.KEEP:
            found[gap] = KEEP
        elif crossing.get(gap.buffer) == gap:
            found[gap] = away(problem) if rule.action is Action.OFFLOAD else Recompute()
    _check_possible(problem, found, deciding)
    return found


def check_rules(rules: Sequence[Rule], traces: Sequence[Trace]) -> None:
    """Raise OptionValueError for a rule that has no effect on any of `traces`: usually a typo.

    Such a rule matches nothing, or only what cannot be moved.
    """
    for rule in rules:
        if has_effect(rule, traces):
            continue
        matched = ((trace, _matched(trace, rule)) for trace in traces)
        found = next((pair for pair in matched if pair[1]), None)
        if found is None:
            raise _wrong(rule, _near(rule.match, traces))
        trace, buffers = found
        raise _wrong(rule, _immovable(trace, buffers[0]))


def has_effect(rule: Rule, traces: Iterable[Trace]) -> bool:
    """Whether `rule` matches a storage of `traces` for which its action makes sense."""
    for trace in traces:
        matched = _matched(trace, rule)
        if matched and (rule.action is Action.KEEP or _crossing(trace).keys() & set(matched)):
            return True
    return False


def _deciding(trace: Trace, rules: Sequence[Rule]) -> dict[int, Rule]:
    """Map each buffer to the rule that holds for it."""
    return {buffer: rule for rule in rules for buffer in _matched(trace, rule)}


def _matched(trace: Trace, rule: Rule) -> list[int]:
    words = enumerate(labels(trace))
    return [b for b, said in words if any(fnmatchcase(word, rule.match) for word in said)]


def _crossing(trace: Trace) -> dict[int, Gap]:
    """Map each buffer that may leave the device to its gap between forward and backward."""
    return {gap.buffer: gap for gap in crossing_gaps(trace) if trace.buffers[gap.buffer].nbytes}


def _check_possible(
    problem: Problem, found: Mapping[Gap, Choice], deciding: Mapping[int, Rule]
) -> None:
    again = recomputable(problem, [g for g, choice in found.items() if choice == Recompute()])
    live = liveness(problem.trace)
    for gap, choice in found.items():
        rule = deciding[gap.buffer]
        if rule.action is Action.OFFLOAD and isinstance(choice, Keep):
            name = problem.hardware.name
            raise _wrong(rule, f"there is no room beyond the device: {name} has no outer tier")
        if rule.action is Action.RECOMPUTE and gap not in again:
            raise _wrong(rule, _not_again(problem.trace, live, gap))


def _not_again(trace: Trace, live: Liveness, gap: Gap) -> str:
    """Why the buffer of `gap` cannot be recomputed."""
    what, producer = _name(trace, gap.buffer), live.producer[gap.buffer]
    if producer is None:
        return f"{what} cannot be recomputed: it is passed in, and no op makes it"
    op = trace.ops[producer]
    if not op.repeatable:
        effects = ", ".join(sorted(effect.value for effect in op.effects))
        return f"{what} cannot be recomputed: op {op.id} {op.target}, which makes it, is {effects}"
    return (
        f"{what} cannot be recomputed: the inputs of op {op.id} {op.target} are freed by then and "
        "cannot be recomputed, or were changed in place"
    )


def _immovable(trace: Trace, buffer: int) -> str:
    """Why a matched buffer has no gap across the boundary."""
    what, live = _name(trace, buffer), liveness(trace)
    uses = live.uses[buffer]
    if live.held[buffer]:
        given = set(trace.value_buffers((trace.outputs, trace.gradients)))
        callers = trace.buffers[buffer].borrowed or buffer in given
        why = "it belongs to the caller" if callers else "an op changes it in place"
        return f"{what} always stays on the device: {why}"
    if not trace.buffers[buffer].nbytes:
        return f"{what} is empty, so there is nothing to move"
    if buffer in trace.value_buffers(tuple(map(Ref, trace.tangents))):
        return f"{what} is passed to the backward pass, so it is not kept for it"
    if uses and uses[0] >= trace.boundary:
        return f"{what} is made in the backward pass, so it is not kept for it"
    return f"{what} is not used in the backward pass, so it is not kept for it"


def _name(trace: Trace, buffer: int) -> str:
    name = trace.buffers[buffer].name
    return f"{name} (buffer {buffer})" if name else f"buffer {buffer}"


def _near(match: str, traces: Sequence[Trace]) -> str:
    """Why a rule that matches nothing is refused, with similar names."""
    words = sorted({word for trace in traces for said in labels(trace) for word in said})
    near = get_close_matches(match, words, n=NEAR, cutoff=0.4)
    listed = f"similar names are {', '.join(near)}; " if near else ""
    return (
        f"it matches no storage: {listed}`outcore plan show` lists names, module paths and source "
        "lines of what a plan moves"
    )


def _wrong(rule: Rule, reason: str) -> OptionValueError:
    return OptionValueError(option="overrides", value=f"{rule.match}: {rule.action}", reason=reason)
