"""verify_plan: check that every choice is for a gap of the trace and can be carried out."""

from __future__ import annotations

from itertools import pairwise
from typing import NoReturn

from outcore.errors import VerifyError
from outcore.ir.hardware import Hardware, Tier
from outcore.ir.liveness import Liveness, dead_gaps, gaps, liveness
from outcore.ir.plan import Gap, Offload, Plan, Recompute, default_choice
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile
from outcore.ir.trace import Trace


def verify_plan(problem: Problem, plan: Plan) -> None:
    """Raise VerifyError if `plan` breaks a rule. Linear in ops and choices.

    Not checked here: whether everything that a recomputation has to run again can run again. That
    depends on the other choices, so `lower` checks it.
    """
    live = liveness(problem.trace)
    known = {*gaps(problem.trace), *dead_gaps(problem.trace)}
    last = Gap(-1, -1, -1)
    for gap, choice in plan.choices:
        if gap not in known:
            rule = "a choice is for a gap of the trace"
            _fail(problem.trace, gap, rule, "no idle stretch of a buffer that may leave")
        if gap <= last:
            rule = "gaps are sorted, each listed once"
            _fail(problem.trace, gap, rule, f"it comes after {_text(last)}")
        last = gap
        if isinstance(choice, Offload):
            _verify_offload(problem, gap, choice)
            _verify_hints(problem.trace, live, gap, choice)
        elif choice != default_choice(gap) and isinstance(choice, Recompute):
            _verify_recompute(problem.trace, live, gap)
    _verify_variants(problem.profile, plan)


def _verify_variants(profile: Profile, plan: Plan) -> None:
    last = -1
    for op, variant in plan.variants:
        known = len(profile.costs[op]) if 0 <= op < len(profile.costs) else 0
        if not 0 < variant < known:
            rule = "a variant is an alternative that the profile has"
            detail = f"there are {max(0, known - 1)} alternatives, and this is variant {variant}"
            raise VerifyError(noun="plan", rule=rule, where=f"op {op}", detail=detail)
        if op <= last:
            rule = "variants are sorted by op, each op listed once"
            detail = f"it comes after op {last}"
            raise VerifyError(noun="plan", rule=rule, where=f"op {op}", detail=detail)
        last = op


def _verify_offload(problem: Problem, gap: Gap, choice: Offload) -> None:
    trace, hardware, tier = problem.trace, problem.hardware, choice.tier
    if tier is Tier.DEVICE:
        _fail(trace, gap, "what is offloaded leaves the device", "its tier is the device")
    if not hardware.capacity(tier):
        rule = "what is offloaded goes where the machine has room"
        _fail(trace, gap, rule, f"{hardware.name} has no {tier.value} tier")
    for start, stop in ((Tier.DEVICE, tier), (tier, Tier.DEVICE)):
        if not _linked(hardware, start, stop):
            rule = "what is offloaded can be copied there and back"
            detail = f"{hardware.name} has no link from {start.value} to {stop.value}"
            _fail(trace, gap, rule, detail)


def _verify_hints(trace: Trace, live: Liveness, gap: Gap, choice: Offload) -> None:
    going = (("depart", choice.depart), ("release", choice.release))
    coming = (("depart", choice.depart), ("prefetch", choice.prefetch), ("arrive", choice.arrive))
    for word, op in (*going, *coming[1:]):
        if op is None or gap.after < op <= gap.before:
            continue
        if word != "depart" or op != gap.after:
            _fail(trace, gap, "hints name ops inside the gap, its end included", f"{word} {op}")
        if live.producer[gap.buffer] == op:
            rule = "what departs beside an op was there before it"
            _fail(trace, gap, rule, f"op {op} makes buffer {gap.buffer}")
    for order in (going, coming):
        given = [(word, op) for word, op in order if op is not None]
        for (word, op), (later_word, later) in pairwise(given):
            if later < op:
                rule = "a copy departs before its release and before it comes back, then it arrives"
                _fail(trace, gap, rule, f"{word} {op} and {later_word} {later}")


def _linked(hardware: Hardware, start: Tier, stop: Tier) -> bool:
    return any((a, b) == (start, stop) for a, b, _ in hardware.links)


def _verify_recompute(trace: Trace, live: Liveness, gap: Gap) -> None:
    producer = live.producer[gap.buffer]
    if producer is None:
        rule = "what is recomputed was made by an op"
        _fail(trace, gap, rule, "the caller passes it in")
    op = trace.ops[producer]
    if not op.repeatable:
        effects = ", ".join(sorted(e.value for e in op.effects))
        detail = f"op {op.id} {op.target} is {effects}"
        _fail(trace, gap, "what is recomputed was made by an op that may run again", detail)


def _fail(trace: Trace, gap: Gap, rule: str, detail: str) -> NoReturn:
    known = 0 <= gap.buffer < len(trace.buffers)
    name = trace.buffers[gap.buffer].name if known else ""
    where = _text(gap) + (f" ({name})" if name else "")
    raise VerifyError(noun="plan", rule=rule, where=where, detail=detail)


def _text(gap: Gap) -> str:
    """The gap as in the text form of a plan."""
    return f"gap {gap.buffer} after {gap.after} before {gap.before}" + " dead" * gap.dead
