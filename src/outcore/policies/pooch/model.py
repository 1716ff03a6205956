"""model: PoocH's model of a step: its memory (`clock.py` has the time).

From `Trainer.optimize_swap_targets` of PoocH's published code, with its names:

- `sync_swapout` walks the forward pass and waits for copies out when memory is needed.
- `rebuild` (`backward.py`) finds what each break point of the backward pass must fetch and
  run again.
- `compact` moves the fetches earlier, in order, as far as memory allows.

Lifetimes are the trace's. There are no offsets, so there is no fragmentation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from outcore.ir.hardware import Tier
from outcore.ir.liveness import liveness
from outcore.ir.plan import Gap
from outcore.ir.problem import Problem
from outcore.policies.pooch.backward import Backward, BackwardModel, Detour
from outcore.policies.pooch.log import OFFLOAD, RECOMPUTE, Kind, record


@dataclass(frozen=True, slots=True)
class Forward:
    """The forward pass."""

    leaving: tuple[int, ...]
    """Targets that are copied out, in order."""
    due: tuple[int, ...]
    """Per op: how many of these copies it waits for, the oldest first."""
    peak_bytes: int
    """The most bytes held, after the waits."""


class PoochModel:
    """The model of one problem: candidates, in order of copy-out to `tier`, in `capacity_bytes`.

    With `early`, fetches are issued as early as memory allows; PoocH's code does this in batches
    (`compact`).
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
        self.trace, self.capacity_bytes, self.early = problem.trace, capacity_bytes, early
        self.log = record(problem, gaps, tier)
        self.targets = self.log.targets
        producer = liveness(problem.trace).producer
        self.producers = tuple(producer[target.gap.buffer] for target in self.targets)
        """The op that makes each target; None for what the caller passes in."""
        self.backwards = BackwardModel(problem, self.log)

    # ---- forward --------------------------------------------------------------------------------

    def sync_swapout(self, kinds: Sequence[Kind]) -> Forward:
        """How many copies out, oldest first, each forward op must wait for to have its memory."""
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
            self.rebuild(kinds)
        )

    def fits_backward(self, backward: Backward) -> bool:
        """Whether there is room from the boundary on."""
        pause = max(self.log.boundary_bytes, self.log.lead_in.peak_bytes)
        peak = max((pause - backward.missing_bytes[0], *backward.peak_bytes))
        return peak <= self.capacity_bytes

    # ---- backward -------------------------------------------------------------------------------

    def rebuild(self, kinds: Sequence[Kind]) -> Backward:
        """The backward pass of `kinds`: what each segment fetches and runs again at its start."""
        return self.backwards.rebuild(kinds)

    def detour(self, kinds: Sequence[Kind], backward: Backward, target: int) -> Detour:
        """How `backward`, the pass of `kinds`, changes if `target` is recomputed, not offloaded."""
        return self.backwards.detour(kinds, backward, target)

    # ---- schedule -------------------------------------------------------------------------------

    def compact(self, backward: Backward) -> list[int]:
        """Per segment, the break point at which its fetches (its group) are issued.

        Groups stay in order. With group j issued at break point i, segments i to j - 1 hold its
        bytes in addition to their own peaks. As in PoocH's code, a break point issues the groups
        after it, up to the first that does not fit. It issues none if the next group was issued
        earlier already, so fetches come in batches. With `early`, each group goes to the earliest
        point with room.
        """
        groups = backward.fetched
        sums = [0]
        for group in groups:
            sums.append(sums[-1] + sum(self.targets[i].fetched_bytes for i in group))
        room = [peak - total for peak, total in zip(backward.peak_bytes, sums[1:], strict=True)]
        slots: list[int] = []
        highest: deque[int] = deque()  # of room[point : len(slots)]: the maximum, then lower ones
        for point in range(len(groups)):
            if highest and highest[0] < point:
                highest.popleft()
            if len(slots) > point + 1 and not self.early:
                continue
            while len(slots) < len(groups) and (
                len(slots) == point
                or room[highest[0]] + sums[len(slots) + 1] <= self.capacity_bytes
            ):
                while highest and room[highest[-1]] <= room[len(slots)]:
                    highest.pop()
                highest.append(len(slots))
                slots.append(point)
        return slots
