"""superneurons-cost-aware: SuperNeurons' own runtime, with its decisions made before the step.

- Liveness is the trace's own.
- What lies between checkpoints is dropped and replayed, segment by segment (section 3.4).
- Checkpoints are offloaded (3.3.1), or cached on the device until memory is short (3.3.2).
- Workspaces use the memory that is then free (3.5).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar

from outcore.errors import InfeasibleError
from outcore.ir.hardware import Tier
from outcore.ir.liveness import gaps, liveness
from outcore.ir.plan import Choice, Gap, Offload, Plan, Recompute, make_plan
from outcore.ir.problem import Problem
from outcore.policies.candidates import away, candidates, recomputable
from outcore.policies.policy import MIN_BYTES, check_min_bytes
from outcore.policies.settle import settle
from outcore.policies.superneurons.cache import Walked, walk
from outcore.policies.superneurons.layers import fetch_points, largest_backward_bytes, layers_of
from outcore.policies.superneurons.segments import Layer, bounded, segments
from outcore.policies.workspaces import Algorithms, settle_in_room, variants_of

TRIES = 4
"""How often the cache plans, each time with less capacity, before everything is evicted."""


class Recomputation(StrEnum):
    """How what lies between checkpoints comes back (section 3.4)."""

    NONE = "none"
    """It is not dropped at all."""
    SPEED = "speed-centric"
    """A segment is replayed once, and stays until it is used."""
    MEMORY = "memory-centric"
    """Each backward replays what it needs, and drops what it passes through."""
    COST_AWARE = "cost-aware"
    """Speed-centric if the segment fits together with the network's largest layer, else
    memory-centric."""


@dataclass(frozen=True, slots=True)
class SuperNeuronsCostAware:
    """Drop and replay what lies between checkpoints; move the rest when memory is short.

    Without `cache`, every checkpoint is offloaded after the forward pass used it, and fetched one
    compute-intensive layer ahead. With `workspaces`, each op that has variants then runs as the
    fastest one that there is room for; without, ops run with their default variant.
    """

    name: ClassVar[str] = "superneurons-cost-aware"
    summary: ClassVar[str] = "replay between checkpoints by segment, evict the least recently used"

    min_bytes: int = MIN_BYTES
    """Smaller buffers are kept."""
    replay: Recomputation = Recomputation.COST_AWARE
    """How what lies between checkpoints comes back."""
    cache: bool = True
    """Whether checkpoints stay on the device until memory is short."""
    workspaces: bool = True
    """Whether ops run as the fastest variants that there is room for."""

    def __post_init__(self) -> None:
        check_min_bytes(self, self.min_bytes)

    def plan(self, problem: Problem) -> Plan:
        """The plan of the runtime.

        Raises InfeasibleError if it does not fit; with `cache`, if it does not fit even with
        everything evicted. What is replayed does not depend on the budget. What is moved does not
        depend on the workspaces that are chosen.
        """
        layers = layers_of(problem)
        replayed = _replayed(problem, layers, self.min_bytes, self.replay)
        leave = away(problem)
        if not isinstance(leave, Offload):
            return self._settle(problem, replayed)
        if self.cache:
            return self._cached(problem, replayed, leave.tier)
        unified = _offloaded(problem, layers, replayed, self.min_bytes)
        walked = walk(problem, self._dropping(problem, replayed), unified)
        ahead = _OneLayerAhead(problem)
        pooled: dict[Gap, Choice] = {
            gap: Offload(leave.tier, prefetch=ahead.issue(gap, walked)) for gap in unified
        }
        return self._settle(problem, replayed | pooled)

    def _cached(self, problem: Problem, replayed: dict[Gap, Choice], tier: Tier) -> Plan:
        """The plan with the tensor cache: evict what the walk evicts.

        If that does not fit on the device, the walk has less capacity the next time. If it does not
        fit in an outer tier, more evictions do not help either.
        """
        movable = [gap for gap in _large(problem, self.min_bytes) if gap not in replayed]
        dropped, ahead = self._dropping(problem, replayed), _OneLayerAhead(problem)
        capacity_bytes = problem.budget_bytes
        outer: list[InfeasibleError] = []
        for _ in range(TRIES):
            walked = walk(problem, dropped, movable, capacity_bytes)
            evicted = {gap: _evict(gap, walked, ahead, tier) for gap in walked.evicted}
            try:
                return self._settle(problem, replayed | evicted)
            except InfeasibleError as error:
                if error.tier != Tier.DEVICE.value:
                    outer.append(error.with_traceback(None))  # it would keep callers' data
                    break
                capacity_bytes -= error.floor_bytes - problem.budget_bytes
        return self._leanest(problem, replayed, movable, Offload(tier), outer)

    def _leanest(
        self,
        problem: Problem,
        replayed: Mapping[Gap, Choice],
        movable: Collection[Gap],
        leave: Offload,
        outer: Sequence[InfeasibleError],
    ) -> Plan:
        """The first that fits of: evict everything, evict what crosses the boundary, evict nothing.

        Which of them needs the least depends on padding and donations. If none fits, raises the
        error of the one that needs the least of an outer tier, `outer` included: it fits the
        device. If none does, raises that of the one that needs the least device memory.
        """
        boundary = problem.trace.boundary
        crossing = [gap for gap in movable if gap.after < boundary <= gap.before]
        errors = list(outer)
        for evicted in (movable, crossing, ()):
            try:
                return self._settle(problem, {**replayed, **dict.fromkeys(evicted, leave)})
            except InfeasibleError as error:
                errors.append(error.with_traceback(None))
        beyond = [error for error in errors if error.tier != Tier.DEVICE.value]
        raise replace(min(beyond or errors, key=lambda error: error.floor_bytes))

    def _dropping(self, problem: Problem, replayed: Mapping[Gap, Choice]) -> Plan:
        """The plan that the cache walks: it drops what is replayed, and moves nothing.

        If workspaces are chosen, they are the smallest here.
        """
        lean = variants_of(problem.profile, Algorithms.MEMORY) if self.workspaces else {}
        return make_plan(dict(replayed), variants=lean)

    def _settle(self, problem: Problem, choices: Mapping[Gap, Choice]) -> Plan:
        """The plan of `choices`, and of workspaces in the memory that the choices leave free."""
        if self.workspaces:
            return settle_in_room(problem, choices, self)
        return settle(problem, choices, self)


def _large(problem: Problem, min_bytes: int) -> Iterator[Gap]:
    """Every gap of buffers of at least `min_bytes`."""
    trace = problem.trace
    every = gaps(trace)
    return (gap for gap in every if trace.buffers[gap.buffer].nbytes >= max(1, min_bytes))


def _replayed(
    problem: Problem, layers: tuple[Layer, ...], min_bytes: int, replay: Recomputation
) -> dict[Gap, Choice]:
    """What is dropped: candidates that no checkpoint made and that can be recomputed.

    A candidate that the op after its last use already needs again is not dropped: the gap is too
    short to gain memory.
    """
    if replay is Recomputation.NONE:
        return {}
    stays = _stays(problem, layers, replay)
    producer = liveness(problem.trace).producer
    idle = [gap for gap in candidates(problem, min_bytes) if gap.before - gap.after > 1]
    choices: dict[Gap, Choice] = {}
    for gap in sorted(recomputable(problem, idle)):
        maker = producer[gap.buffer]
        if maker is not None and not layers[maker].checkpoint:
            choices[gap] = Recompute(stay=stays[maker])
    return choices


def _stays(problem: Problem, layers: tuple[Layer, ...], replay: Recomputation) -> dict[int, bool]:
    """Layer -> whether its segment is replayed speed-centric."""
    most = largest_backward_bytes(problem.trace)
    return {
        layer: replay is Recomputation.SPEED
        or (replay is Recomputation.COST_AWARE and bounded(layers, segment, most))
        for segment in segments(layers)
        for layer in segment
    }


def _offloaded(
    problem: Problem, layers: tuple[Layer, ...], replayed: Collection[Gap], min_bytes: int
) -> list[Gap]:
    """Candidates that checkpoints made or the caller passed in, and what cannot be recomputed."""
    trace = problem.trace
    producer = liveness(trace).producer
    again = recomputable(problem, candidates(problem, min_bytes))

    def pooled(gap: Gap) -> bool:
        """Whether the gap's buffer belongs to the paper's tensor pool."""
        maker = producer[gap.buffer]
        return maker is None or layers[maker].checkpoint or gap not in again

    return [
        gap
        for gap in candidates(problem, min_bytes)
        if gap not in replayed and gap.before - gap.after > 1 and pooled(gap)
    ]


class _OneLayerAhead:
    """Issue each fetch at the last compute-intensive layer's backward before it is needed."""

    def __init__(self, problem: Problem) -> None:
        self.boundary, self.points = problem.trace.boundary, fetch_points(problem.trace)

    def issue(self, gap: Gap, walked: Walked) -> int:
        """The op before which the copy back of `gap` is issued, once the buffer has left."""
        needed = walked.touched.get(gap, gap.before)
        earlier = bisect_left(self.points, needed) - 1
        point = self.points[earlier] if earlier >= 0 else self.boundary
        return max(gap.after + 1, walked.evicted.get(gap, 0), min(point, needed))


def _evict(gap: Gap, walked: Walked, ahead: _OneLayerAhead, tier: Tier) -> Offload:
    """Copy out immediately when memory is short; without hints if that is right after the use."""
    short = walked.evicted[gap]
    at = short if short > gap.after else None
    return Offload(tier, depart=at, release=at, prefetch=ahead.issue(gap, walked))
