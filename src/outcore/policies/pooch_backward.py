"""The backward pass in PoocH's model: what each break point fetches and runs again (`rebuild`).

From `Trainer.optimize_swap_targets` of PoocH's published code. Step 2 of its search asks again and
again what one more recomputation would change. That is little: the pass stays as it is up to the
fetch that goes away, and from where the same targets are there again. So `detour` works out only
what lies between; it gives what a `rebuild` of the whole pass would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outcore.ir.problem import Problem
from outcore.policies.pooch_chain import NOTHING, Chains, Need
from outcore.policies.pooch_log import KEEP, OFFLOAD, RECOMPUTE, Kind, Log


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward pass.

    Per segment: what it needs, its seconds of compute, and its peak bytes with its fetches issued
    at its own break point. Per segment and at the end: the bytes that are missing against a step
    with everything kept, as it is reached, and what of a copy's padding has been given back since
    the segment before. Per target: the segment that brings it back, -1 where it is kept.
    """

    needs: tuple[Need, ...]
    seconds: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    missing_bytes: tuple[int, ...]
    expired_bytes: tuple[int, ...]
    back: tuple[int, ...]

    @property
    def fetched(self) -> tuple[tuple[int, ...], ...]:
        """Per segment, the targets it fetches: its group."""
        return tuple(need.fetched for need in self.needs)


@dataclass(frozen=True, slots=True)
class Detour:
    """How a backward pass changes where one more target is recomputed.

    Segments `start` to `stop` - 1 take other `seconds`, and at most `peak_bytes`; all else stays.
    """

    start: int
    stop: int
    seconds: tuple[float, ...]
    peak_bytes: int

    def meets(self, other: Detour) -> bool:
        """Whether both change some segment. Where not, each is the same with the other taken."""
        return self.start < other.stop and other.start < self.stop

    def total_seconds(self, backward: Backward) -> float:
        """Seconds of compute in `backward` with this detour, added up in its order."""
        before, after = backward.seconds[: self.start], backward.seconds[self.stop :]
        return sum((*before, *self.seconds, *after))


@dataclass(slots=True)
class _Walk:
    """Where a pass has got to: KEEP for the targets that are there, else how they come back."""

    left: list[Kind]
    missing_bytes: int


class BackwardModel:
    """Backward passes of one log."""

    def __init__(self, problem: Problem, log: Log) -> None:
        self.targets, self.segments = log.targets, log.segments
        self.chains = Chains(problem, log)

    def rebuild(self, kinds: Sequence[Kind]) -> Backward:
        """The pass of `kinds`. Linear in segments and in the ops that are run again."""
        gone = (t.nbytes for t, kind in zip(self.targets, kinds, strict=True) if kind is not KEEP)
        walk = _Walk(list(kinds), sum(gone))
        expired = self._expired_bytes(kinds)
        needs, peaks, missing = [], [], [walk.missing_bytes]
        back = [-1] * len(kinds)
        for index in range(len(self.segments)):
            need, peak = self._visit(walk, index)
            for target in need.back:
                back[target] = index
            walk.missing_bytes += expired[index + 1]
            needs.append(need)
            peaks.append(peak)
            missing.append(walk.missing_bytes)
        seconds = (s.seconds + n.seconds for s, n in zip(self.segments, needs, strict=True))
        return Backward(
            tuple(needs), tuple(seconds), tuple(peaks), tuple(missing), tuple(expired), tuple(back)
        )

    def detour(self, kinds: Sequence[Kind], backward: Backward, target: int) -> Detour:
        """The change where `target`, offloaded in `kinds` and their pass, is recomputed instead."""
        start = stop = backward.back[target]
        left = [KEEP if b < start else k for k, b in zip(kinds, backward.back, strict=True)]
        left[target] = RECOMPUTE
        walk = _Walk(left, backward.missing_bytes[start])
        apart: set[int] = set()  # the targets that are there in one of the two passes only
        seconds, peaks = [], []
        while stop == start or apart or walk.missing_bytes != backward.missing_bytes[stop]:
            need, peak = self._visit(walk, stop)
            apart ^= {*need.back} ^ {*backward.needs[stop].back}
            seconds.append(self.segments[stop].seconds + need.seconds)
            peaks.append(peak)
            stop += 1
            walk.missing_bytes += backward.expired_bytes[stop]
            if stop == self.targets[target].last_segment + 1:
                walk.missing_bytes -= self.targets[target].padding_bytes
        return Detour(start, stop, tuple(seconds), max(peaks))

    def _visit(self, walk: _Walk, index: int) -> tuple[Need, int]:
        """What segment `index` needs, and its peak bytes; brings back what it needs."""
        segment, targets = self.segments[index], self.targets
        need = self.chains.need(segment, walk.left)
        if need is NOTHING:
            return need, segment.peak_bytes - walk.missing_bytes
        for target in need.fetched:
            walk.left[target] = KEEP
            walk.missing_bytes -= targets[target].fetched_bytes
        chain_peak = segment.start_bytes - walk.missing_bytes + need.growth_bytes
        for target in need.again:
            walk.left[target] = KEEP
            walk.missing_bytes -= targets[target].nbytes
        return need, max(chain_peak, segment.peak_bytes - walk.missing_bytes)

    def _expired_bytes(self, kinds: Sequence[Kind]) -> list[int]:
        """Per segment and at the end: padding of fetched targets whose last use has gone by."""
        expired = [0] * (len(self.segments) + 1)
        for target, kind in zip(self.targets, kinds, strict=True):
            if kind is OFFLOAD:
                expired[target.last_segment + 1] += target.padding_bytes
        return expired
