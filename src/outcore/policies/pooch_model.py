"""PoocH's model of a step: memory (`pooch_clock.py` has the time).

From `Trainer.optimize_swap_targets` of PoocH's published code, with its names. `sync_swapout` walks
the forward pass and waits for copies out where memory is needed. `rebuild` finds what each break
point of the backward pass must fetch and run again. `compact` hoists the fetches, in order, as
early as memory allows. Lifetimes are those of the trace; no offsets, so no fragmentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outcore.ir.hardware import Tier
from outcore.ir.plan import Gap
from outcore.ir.problem import Problem
from outcore.policies.pooch_chain import Chains
from outcore.policies.pooch_log import KEEP, OFFLOAD, RECOMPUTE, Kind, record


@dataclass(frozen=True, slots=True)
class Forward:
    """The forward pass: targets copied out, in order; per op, how many of them it waits for."""

    leaving: tuple[int, ...]
    due: tuple[int, ...]
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward pass, per segment: targets it fetches, seconds of compute, peak bytes.

    The peaks are those with each segment's fetches issued at its own break point.
    """

    fetched: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    peak_bytes: tuple[int, ...]


class PoochModel:
    """The model of one problem: candidates, in order of copy-out to `tier`, in `capacity_bytes`.

    `early` hoists fetches as early as memory allows; PoocH's code does so in batches (`compact`).
    """

    def __init__(
        self,
        problem: Problem,
        gaps: Sequence[Gap],
        tier: Tier,
        capacity_bytes: int,
        *,
        early: bool = False,
    ) -> None:
        self.capacity_bytes, self.early = capacity_bytes, early
        self.log = record(problem, gaps, tier)
        self.targets = self.log.targets
        self.chains = Chains(problem, self.log)

    # ---- forward --------------------------------------------------------------------------------

    def sync_swapout(self, kinds: Sequence[Kind]) -> Forward:
        """How many copies out, oldest first, each forward op must wait for to find its memory."""
        held = peak = self.log.start_bytes
        queue: list[int] = []
        freed = 0
        due = []
        for op, leaving in zip(self.log.forward, self.log.leaving, strict=True):
            held += op.alloc_bytes + op.workspace_bytes
            while held > self.capacity_bytes and freed < len(queue):
                held -= self.targets[queue[freed]].nbytes
                freed += 1
            due.append(freed)
            peak = max(peak, held)
            held -= op.workspace_bytes + op.free_bytes
            for target in leaving:
                if kinds[target] is OFFLOAD:
                    queue.append(target)
                elif kinds[target] is RECOMPUTE:
                    held -= self.targets[target].nbytes
        return Forward(tuple(queue), tuple(due), peak)

    def fits(self, kinds: Sequence[Kind]) -> bool:
        """Whether there is room at every moment: in both passes, and between the calls."""
        return self.sync_swapout(kinds).peak_bytes <= self.capacity_bytes and self.fits_backward(
            kinds, self.rebuild(kinds)
        )

    def fits_backward(self, kinds: Sequence[Kind], backward: Backward) -> bool:
        """Whether there is room from the boundary on."""
        gone = sum(t.nbytes for t, k in zip(self.targets, kinds, strict=True) if k is not KEEP)
        pause = max(self.log.boundary_bytes, self.log.lead_in.peak_bytes) - gone
        return max((pause, *backward.peak_bytes)) <= self.capacity_bytes

    # ---- backward -------------------------------------------------------------------------------

    def rebuild(self, kinds: Sequence[Kind]) -> Backward:
        """What each segment has to fetch and to run again before its first op."""
        segments, targets = self.log.segments, self.targets
        left = list(kinds)
        missing = sum(t.nbytes for t, kind in zip(targets, kinds, strict=True) if kind is not KEEP)
        expiring = [0] * (len(segments) + 1)
        fetched: list[tuple[int, ...]] = [()] * len(segments)
        seconds = [segment.seconds for segment in segments]
        peaks = []
        for index, segment in enumerate(segments):
            missing += expiring[index]
            chain_peak = 0
            if any(left[i] is not KEEP for i in segment.wanted):
                need = self.chains.need(segment, left)
                for i in need.fetched:
                    left[i] = KEEP
                    missing -= targets[i].fetched_bytes
                    expiring[targets[i].last_segment + 1] += (
                        targets[i].fetched_bytes - targets[i].nbytes
                    )
                chain_peak = segment.start_bytes - missing + need.growth_bytes
                for i in need.again:
                    left[i] = KEEP
                    missing -= targets[i].nbytes
                fetched[index] = need.fetched
                seconds[index] += need.seconds
            peaks.append(max(chain_peak, segment.peak_bytes - missing))
        return Backward(tuple(fetched), tuple(seconds), tuple(peaks))

    # ---- schedule -------------------------------------------------------------------------------

    def compact(self, backward: Backward) -> list[int]:
        """Per segment, the break point at which its fetches (its group) are issued.

        Groups stay in order. With group j issued at break point i, segments i to j - 1 hold its
        bytes beside their own peaks. As in PoocH's code a break point hoists the groups that follow
        it up to the first that does not fit, and hoists none while the next was hoisted already:
        fetches come in batches. With `early`, each group goes to the earliest point with room.
        """
        count = len(backward.fetched)
        sums = [0]
        for group in backward.fetched:
            sums.append(sums[-1] + sum(self.targets[i].fetched_bytes for i in group))
        room = [peak - sums[i + 1] for i, peak in enumerate(backward.peak_bytes)]
        slots: list[int] = []
        for point in range(count):
            if len(slots) > point + 1 and not self.early:
                continue
            if len(slots) <= point:
                slots.append(point)
            while len(slots) < count:
                following = len(slots)
                if max(room[point:following]) + sums[following + 1] > self.capacity_bytes:
                    break
                slots.append(point)
        return slots
