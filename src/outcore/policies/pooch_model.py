"""PoocH's model of a step: `Trainer.optimize_swap_targets` of its published code.

Four parts, named as there. `forward` ("sync_swapout") walks the forward pass and waits for copies out
where memory is needed, and for all of them at the boundary. `rebuild` finds what each break point of
the backward pass must fetch and run again. `compact` hoists the fetches, in order, as early as memory
allows. `backward_seconds` plays the fetches against the compute.

Lifetimes are those of the trace; no offsets, so no fragmentation. An evaluation takes a few hundred
microseconds for ResNet-50.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from outcore.ir.hardware import Tier
from outcore.ir.liveness import liveness
from outcore.ir.plan import Gap
from outcore.ir.problem import Problem
from outcore.policies.pooch_log import Segment, record


class Kind(Enum):
    """What happens to a target."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


KEEP, OFFLOAD, RECOMPUTE = Kind


@dataclass(frozen=True, slots=True)
class Forward:
    """The forward pass with its wait at the boundary; `waited` are the targets it had to wait for."""

    seconds: float
    waited: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward pass, per segment: targets it fetches, seconds of compute, peak bytes.

    The peaks are those with each segment's fetches issued at its own break point.
    """

    fetched: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    peak_bytes: tuple[int, ...]


class PoochModel:
    """The model of one problem: candidates, in order of copy-out, under `capacity_bytes`."""

    def __init__(self, problem: Problem, gaps: Sequence[Gap], capacity_bytes: int) -> None:
        self.problem, self.trace, self.live = problem, problem.trace, liveness(problem.trace)
        self.capacity_bytes = capacity_bytes
        self.log = record(problem, gaps)
        self.targets = self.log.targets
        self.target_of = {target.gap.buffer: i for i, target in enumerate(self.targets)}
        self.makes = [
            tuple((b, self._device_bytes(b)) for b in writes) for writes in self.trace.writes
        ]

    def _device_bytes(self, buffer: int) -> int:
        nbytes = self.trace.buffers[buffer].nbytes
        return self.problem.hardware.slot_bytes(Tier.DEVICE, nbytes, copied=False)

    # ---- forward --------------------------------------------------------------------------------

    def forward(self, kinds: Sequence[Kind], free: int = -1) -> Forward | None:
        """Play the forward pass; None where it does not fit. The copy of target `free` takes no time."""
        clock = channel = 0.0
        held = self.log.start_bytes
        queue: list[tuple[int, float]] = []
        head = 0
        waited: list[int] = []
        for op, leaving in zip(self.log.forward, self.log.leaving, strict=True):
            while head < len(queue) and queue[head][1] < clock:
                held -= self.targets[queue[head][0]].nbytes
                head += 1
            held += op.alloc_bytes + op.workspace_bytes
            while held > self.capacity_bytes and head < len(queue):
                target, done = queue[head]
                clock = max(clock, done)
                held -= self.targets[target].nbytes
                waited.append(target)
                head += 1
            if held > self.capacity_bytes:
                return None
            clock += op.seconds
            held -= op.workspace_bytes + op.free_bytes
            for target in leaving:
                if kinds[target] is OFFLOAD:
                    copy = 0.0 if target == free else self.targets[target].out_seconds
                    channel = max(clock, channel) + copy
                    queue.append((target, channel))
                elif kinds[target] is RECOMPUTE:
                    held -= self.targets[target].nbytes
        waited += [target for target, _ in queue[head:]]
        return Forward(max(clock, channel), tuple(waited))

    def fits(self, kinds: Sequence[Kind], backward: Backward) -> bool:
        """Whether the pause between the calls and the backward pass fit; `forward` sees to the rest."""
        gone = sum(t.nbytes for t, k in zip(self.targets, kinds, strict=True) if k is not KEEP)
        pause = max(self.log.boundary_bytes, self.log.lead_in.peak_bytes) - gone
        return max((pause, *backward.peak_bytes)) <= self.capacity_bytes

    # ---- backward -------------------------------------------------------------------------------

    def rebuild(self, kinds: Sequence[Kind]) -> Backward:
        """What each segment has to fetch and to run again before its first op."""
        present = [kind is KEEP for kind in kinds]
        missing = sum(t.nbytes for t, here in zip(self.targets, present, strict=True) if not here)
        expiring = [0] * (len(self.log.segments) + 1)
        padding = 0
        fetched, seconds, peaks = [], [], []
        for index, segment in enumerate(self.log.segments):
            wanted = [i for i in segment.wanted if not present[i]]
            chain, coming = self._chain(segment.op, wanted, kinds, present)
            for i in coming:
                target = self.targets[i]
                present[i] = True
                missing -= target.nbytes
                padding += target.fetched_bytes - target.nbytes
                expiring[target.last_segment + 1] += target.fetched_bytes - target.nbytes
            padding -= expiring[index]
            again, peak = 0.0, 0
            if chain:
                level = segment.start_bytes - missing + padding
                again, peak = self._replay(chain, wanted, present, segment, level)
                for i in wanted:
                    missing -= 0 if present[i] else self.targets[i].nbytes
                    present[i] = True
            fetched.append(tuple(coming))
            seconds.append(segment.seconds + again)
            peaks.append(max(peak, segment.peak_bytes - missing + padding))
        return Backward(tuple(fetched), tuple(seconds), tuple(peaks))

    def _chain(
        self, op: int, wanted: Sequence[int], kinds: Sequence[Kind], present: Sequence[bool]
    ) -> tuple[list[int], list[int]]:
        """Ops to run again before `op` to have the `wanted` targets, and targets to fetch."""
        ops: set[int] = set()
        coming: list[int] = []
        stack = [self.targets[i].gap.buffer for i in wanted]
        seen = set(stack)
        while stack:
            buffer = stack.pop()
            target = self.target_of.get(buffer, -1)
            if target >= 0 and kinds[target] is OFFLOAD and not present[target]:
                coming.append(target)
                continue
            producer = self.live.producer[buffer]
            assert producer is not None, "recomputable() lets no such target through"
            ops.add(producer)
            for read in self.trace.reads[producer]:
                if read not in seen and not self._there(read, op, present):
                    seen.add(read)
                    stack.append(read)
        return sorted(ops), coming

    def _there(self, buffer: int, op: int, present: Sequence[bool]) -> bool:
        """Whether `buffer` is on the device before the recomputations for `op`."""
        if not self.live.held[buffer] and self.live.uses[buffer][-1] < op:
            return False
        target = self.target_of.get(buffer, -1)
        return target < 0 or present[target]

    def _replay(
        self,
        chain: Sequence[int],
        wanted: Iterable[int],
        present: Sequence[bool],
        segment: Segment,
        level: int,
    ) -> tuple[float, int]:
        """Seconds and peak bytes of running `chain` again; temporaries go at their last reader."""
        profile = self.problem.profile
        staying = {self.targets[i].gap.buffer for i in wanted}
        last_reader = {b: op for op in chain for b in self.trace.reads[op]}
        temporary: dict[int, int] = {}
        peak = 0
        for op in chain:
            made = self.makes[op]
            inside = level + sum(nbytes for _, nbytes in made) + profile.workspace_bytes[op]
            peak = max(peak, inside)
            for buffer, nbytes in made:
                if self._there(buffer, segment.op, present):
                    continue
                if buffer in staying:
                    level += nbytes
                elif buffer in last_reader:
                    temporary[buffer] = nbytes
                    level += nbytes
            for buffer in self.trace.reads[op]:
                if last_reader[buffer] == op:
                    level -= temporary.pop(buffer, 0)
        return sum(profile.seconds[op] for op in chain), peak

    # ---- schedule -------------------------------------------------------------------------------

    def fetch_seconds(self, backward: Backward, free: int = -1) -> list[float]:
        """Per segment, the time its fetches hold the link; that of target `free` takes none."""
        targets = self.targets
        return [sum(targets[i].in_seconds for i in g if i != free) for g in backward.fetched]

    def compact(self, backward: Backward) -> list[int]:
        """Per segment, the break point at which its fetches are issued: the earliest that fits.

        In order, without overtaking. With group j issued at break point i, segments i to j - 1 hold
        its bytes beside their own peaks.
        """
        count = len(backward.fetched)
        sums = [0]
        for group in backward.fetched:
            sums.append(sums[-1] + sum(self.targets[i].fetched_bytes for i in group))
        room = [peak - sums[i + 1] for i, peak in enumerate(backward.peak_bytes)]
        slots: list[int] = []
        for point in range(count):
            if len(slots) <= point:
                slots.append(point)
            while len(slots) < count:
                following = len(slots)
                if max(room[point:following]) + sums[following + 1] > self.capacity_bytes:
                    break
                slots.append(point)
        return slots

    def backward_seconds(
        self, seconds: Sequence[float], fetch_seconds: Sequence[float], slots: Sequence[int]
    ) -> float:
        """Time of the backward pass: segment i waits for group i, and groups follow one another."""
        clock = self.log.lead_in.seconds
        channel = 0.0
        issued = 0
        done = [0.0] * len(slots)
        for index, compute in enumerate(seconds):
            while issued < len(slots) and slots[issued] <= index:
                if fetch_seconds[issued]:
                    channel = max(channel, clock) + fetch_seconds[issued]
                    done[issued] = channel
                issued += 1
            clock = max(clock, done[index]) + compute
        return clock
