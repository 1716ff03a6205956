"""backward: the backward pass in PoocH's model: what break points fetch and run again.

From `Trainer.optimize_swap_targets` of PoocH's published code (`rebuild`). Step 2 of its search
asks again and again what one more recomputation would change. That is little: the pass stays the
same up to the fetch that is no longer needed, and again once the same targets are on the device. So
`detour` computes only the part in between. The result is the one that a `rebuild` of the whole pass
would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outcore.ir.problem import Problem
from outcore.policies.pooch.chain import NOTHING, Chains, Need
from outcore.policies.pooch.log import KEEP, OFFLOAD, RECOMPUTE, Kind, Log


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward pass, by segment and by target."""

    needs: tuple[Need, ...]
    """Per segment: what it fetches and runs again."""
    seconds: tuple[float, ...]
    """Per segment: its seconds of compute, including what it runs again."""
    peak_bytes: tuple[int, ...]
    """Per segment: its peak if its fetches are issued at its own break point."""
    missing_bytes: tuple[int, ...]
    """Per segment, and at the end: how many bytes less are held when it is reached than in a step
    with everything kept."""
    expired_bytes: tuple[int, ...]
    """Per segment, and at the end: padding of copies that was given back since the segment
    before."""
    back: tuple[int, ...]
    """Per target: the segment that brings it back; -1 if it is kept."""

    @property
    def fetched(self) -> tuple[tuple[int, ...], ...]:
        """Per segment: the targets that it fetches, called its group."""
        return tuple(need.fetched for need in self.needs)


@dataclass(frozen=True, slots=True)
class Detour:
    """How a backward pass changes if one more target is recomputed.

    Only the segments from `start` to `stop` - 1 change.
    """

    start: int
    stop: int
    seconds: tuple[float, ...]
    """Per changed segment: its new seconds of compute."""
    peak_bytes: int
    """The largest new peak of the changed segments."""

    def meets(self, other: Detour) -> bool:
        """Whether both change some segment. If not, each stays the same when the other is taken."""
        return self.start < other.stop and other.start < self.stop

    def total_seconds(self, backward: Backward) -> float:
        """Seconds of compute in `backward` with this detour, added up in its order."""
        before, after = backward.seconds[: self.start], backward.seconds[self.stop :]
        return sum((*before, *self.seconds, *after))


@dataclass(slots=True)
class _Walk:
    """The state of the pass at a segment."""

    left: list[Kind]
    """Per target: KEEP if it is on the device, else how it comes back."""
    missing_bytes: int
    """How many bytes less are held than in a step with everything kept."""


class BackwardModel:
    """Computes backward passes for one log."""

    def __init__(self, problem: Problem, log: Log) -> None:
        self.targets, self.segments = log.targets, log.segments
        self.chains = Chains(problem, log)

    def rebuild(self, kinds: Sequence[Kind]) -> Backward:
        """The backward pass of `kinds`. Linear in segments and in the ops that are run again."""
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
        """The change if `target`, which `kinds` and `backward` offload, is recomputed instead."""
        start = stop = backward.back[target]
        left = [KEEP if b < start else k for k, b in zip(kinds, backward.back, strict=True)]
        left[target] = RECOMPUTE
        walk = _Walk(left, backward.missing_bytes[start])
        apart: set[int] = set()  # targets that are on the device in only one of the two passes
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
        """What segment `index` needs, and its peak bytes; updates `walk` with what comes back."""
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
        """Per segment, and at the end: padding of fetched targets whose last use is over."""
        expired = [0] * (len(self.segments) + 1)
        for target, kind in zip(self.targets, kinds, strict=True):
            if kind is OFFLOAD:
                expired[target.last_segment + 1] += target.padding_bytes
        return expired
