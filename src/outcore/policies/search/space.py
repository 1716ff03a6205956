"""space: the space that `search` walks: what each gap may be, and which gaps match."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from outcore.evaluate import KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_STAY, Evaluator
from outcore.ir.liveness import Liveness, liveness
from outcore.ir.plan import Gap, Keep, Offload, Plan, Recompute
from outcore.ir.problem import Problem
from outcore.policies.candidates import away, ops_again, recomputable

Kinds = NDArray[np.int8]
"""One of evaluate's kinds (KEEP, OFFLOAD and so on) per gap."""

COLD = 3e-5
"""The temperature at which walks end, as a fraction of the step's time. Smaller differences count
as none."""

WORTH = 2
"""A dead buffer is worth its memory only if at least this many times its bytes are made from it.
With less it is better to keep what is made."""


@dataclass(frozen=True, slots=True)
class Space:
    """The gaps that are worth a decision, the kinds that each may have, and groups of them."""

    gaps: tuple[Gap, ...]
    """All gaps of the trace; the indices below are places in it."""
    allowed: Mapping[int, tuple[int, ...]]
    """Gap -> the kinds that it may have, in order of the trace; only gaps worth a decision."""
    alike: tuple[tuple[int, ...], ...]
    """Groups of these gaps that stand for the same value of repeated layers, in order of the trace.
    Groups of one are left out."""
    default_kinds: Kinds
    """The kind of each gap if nothing is decided on it."""

    def kinds(self, plan: Plan) -> Kinds:
        """The kinds of a plan, without its hints. A gap that is not decided on gets its default."""
        found = self.default_kinds.copy()
        for index, allowed in self.allowed.items():
            kind = kind_of(plan, self.gaps[index])
            found[index] = kind if kind in allowed else found[index]
        return found

    def without(self, gaps: Collection[int]) -> Space:
        """The same space, in which these gaps are not decided on."""
        left = frozenset(gaps)
        allowed = {i: kinds for i, kinds in self.allowed.items() if i not in left}
        groups = (tuple(i for i in group if i in allowed) for group in self.alike)
        alike = tuple(group for group in groups if len(group) > 1)
        return replace(self, allowed=allowed, alike=alike)


def make_space(problem: Problem, evaluator: Evaluator, min_bytes: int) -> Space:
    """The space of all gaps of buffers of at least `min_bytes`.

    About linear in gaps, except for chains of dead ones.
    """
    gaps = evaluator.gaps
    sizes = [problem.trace.buffers[gap.buffer].nbytes for gap in gaps]
    pointless = _pointless(problem, gaps)
    wanted = [i for i, nbytes in enumerate(sizes) if nbytes >= min_bytes and i not in pointless]
    again = recomputable(problem, [gaps[i] for i in wanted])
    leaves = (OFFLOAD,) if isinstance(away(problem), Offload) else ()
    wanted.sort(key=lambda i: (gaps[i].after, i))

    def drops(gap: Gap) -> tuple[int, ...]:
        """The kinds of recomputation that a gap may have; a dead buffer can always be dropped."""
        return (RECOMPUTE, RECOMPUTE_STAY) if gap in again else (RECOMPUTE,) * gap.dead

    allowed = {i: (KEEP, *leaves, *drops(gaps[i])) for i in wanted}
    allowed = {i: kinds for i, kinds in allowed.items() if len(kinds) > 1}
    return Space(gaps, allowed, _alike(problem, gaps, allowed), evaluator.default_kinds)


def _pointless(problem: Problem, gaps: Sequence[Gap]) -> frozenset[int]:
    """Dead gaps not worth a decision.

    Little is made from such a buffer, or recomputing it for all its readers needs almost no time.
    """
    trace, live = problem.trace, liveness(problem.trace)
    made = _made_from(problem, gaps)
    least = COLD * sum(problem.profile.seconds)

    def serves_little(gap: Gap) -> bool:
        return made[gap.buffer] < WORTH * trace.buffers[gap.buffer].nbytes

    def again_in_no_time(gap: Gap) -> bool:
        return len(live.uses[gap.buffer]) * _again_seconds(problem, live, gap) < least

    dead = ((i, gap) for i, gap in enumerate(gaps) if gap.dead)
    return frozenset(i for i, gap in dead if serves_little(gap) or again_in_no_time(gap))


def _made_from(problem: Problem, gaps: Sequence[Gap]) -> Counter[int]:
    """Per dead buffer, the bytes that forward ops make from it and that are needed after it."""
    trace = problem.trace
    used = {gap.buffer: gap.after for gap in gaps if gap.dead}
    needed: dict[int, int] = {}
    for gap in gaps:
        needed[gap.buffer] = max(gap.before, needed.get(gap.buffer, 0))
    made: Counter[int] = Counter()
    for op in trace.ops[: trace.boundary]:
        for read in trace.reads[op.id] if op.repeatable else ():
            wanted = (b for b in trace.writes[op.id] if needed.get(b, 0) > used.get(read, inf))
            made[read] += sum(trace.buffers[b].nbytes for b in wanted)
    return made


def _again_seconds(problem: Problem, live: Liveness, gap: Gap) -> float:
    """Seconds to recompute a dead buffer for one of its readers; inf if that is impossible."""
    trace = problem.trace
    again = ops_again(trace, live, gap)
    if any(op is None or not trace.ops[op].repeatable for op in again):
        return inf
    return sum(problem.profile.seconds[op] for op in again if op is not None)


def kind_of(plan: Plan, gap: Gap) -> int:
    """The choice of `plan` for `gap`, as one of evaluate's kinds."""
    choice = plan.choice(gap)
    if isinstance(choice, Keep):
        return KEEP
    if isinstance(choice, Recompute):
        return RECOMPUTE_STAY if choice.stay else RECOMPUTE
    return OFFLOAD


def _alike(
    problem: Problem, gaps: Sequence[Gap], movable: Iterable[int]
) -> tuple[tuple[int, ...], ...]:
    """Groups of gaps of the same size, made, used before and used after by the same kinds of op."""
    trace, producer = problem.trace, liveness(problem.trace).producer
    groups: dict[tuple[object, ...], list[int]] = {}
    for index in movable:
        gap = gaps[index]
        made = producer[gap.buffer]
        key = (
            trace.buffers[gap.buffer].nbytes,
            None if made is None else trace.ops[made].target,
            trace.ops[gap.after].target,
            trace.ops[gap.before].target,
            gap.dead,
        )
        groups.setdefault(key, []).append(index)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)
