"""cache: SuperNeurons' tensor cache (Algorithm 2), at planning time.

The step is walked once, with everything that may be evicted on the device. When an op lacks memory,
the least recently used buffers that it does not touch are evicted immediately. They come back when
they are touched next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import inf

from outcore.ir.hardware import Tier
from outcore.ir.liveness import liveness
from outcore.ir.plan import Gap, Plan
from outcore.ir.problem import Problem
from outcore.lower.donate import donate
from outcore.lower.draft import Draft, Step, occupancy
from outcore.lower.expand import expand


@dataclass(frozen=True, slots=True)
class Walked:
    """What happened in the gaps in which the cache may evict."""

    touched: dict[Gap, int]
    """The op that touches the buffer again, or the op for which a replay does."""
    evicted: dict[Gap, int]
    """The op that needs the buffer's memory, for the gaps in which it is evicted."""


def walk(
    problem: Problem, plan: Plan, gaps: Collection[Gap], capacity_bytes: float = inf
) -> Walked:
    """Run `plan`, which keeps `gaps`, in `capacity_bytes`; evict only in `gaps`.

    Workspaces count. A buffer that a replay has fetched stays up to the end of its gap. Linear in
    the runs of the plan.
    """
    draft = donate(problem.trace, expand(problem, plan))
    return _Walk(problem, draft, gaps, capacity_bytes).run()


class _Walk:
    """The state of the cache at a step of the draft."""

    def __init__(
        self, problem: Problem, draft: Draft, gaps: Collection[Gap], capacity_bytes: float
    ) -> None:
        self.problem, self.draft, self.capacity_bytes = problem, draft, capacity_bytes
        self.uses = liveness(problem.trace).uses
        self.begins = {(gap.buffer, gap.after): gap for gap in gaps}
        """(Buffer, op) -> the gap that begins after this use."""
        self.recent: OrderedDict[int, Gap] = OrderedDict()
        """Buffer -> the gap it is in, for buffers on the device that are not locked; the least
        recently used first."""
        self.away: dict[int, Gap] = {}
        """Buffer -> the gap in which it was evicted."""
        self.away_bytes = 0
        """Bytes that are evicted now, minus the padding of buffers that came back."""
        self.padding: dict[int, int] = {}
        """Buffer -> bytes that it needs in addition since it came back."""
        self.walked = Walked({}, {})

    def run(self) -> Walked:
        """Walk all steps of the draft."""
        draft, boundary = self.draft, self.problem.trace.boundary
        held = occupancy(self.problem, draft)
        for index, (step, op) in enumerate(zip(draft.steps, _served(draft), strict=True)):
            if index == draft.boundary:
                self._make_room(held.between, boundary - 1)
            buffers = self._buffers(step)
            for buffer in buffers:
                self._touch(buffer, op)
            self._make_room(held.steps[index], op)
            if not step.run.again:
                for buffer in buffers:
                    self._unlock(buffer, op)
        return self.walked

    def _buffers(self, step: Step) -> tuple[int, ...]:
        """The buffers that `step` reads or writes, each once."""
        run = step.run
        slots = self.draft.slots
        return tuple(dict.fromkeys(slots[s].buffer for s in (*run.reads, *run.writes)))

    def _touch(self, buffer: int, op: int) -> None:
        """Lock `buffer` for a step of `op`; fetch it if it was evicted."""
        gap = self.recent.pop(buffer, None)
        if gap is None:
            gap = self.away.pop(buffer, None)
            if gap is None:
                return
            self.padding[buffer] = self._slot_bytes(buffer, fetched=True) - self._slot_bytes(
                buffer, fetched=False
            )
            self.away_bytes -= self._slot_bytes(buffer, fetched=True)
        self.walked.touched[gap] = op

    def _unlock(self, buffer: int, op: int) -> None:
        """After the use by `op`: the buffer may be evicted, or is gone."""
        if (buffer, op) in self.begins:
            self.recent[buffer] = self.begins[buffer, op]
        if self.uses[buffer][-1] == op:
            self.away_bytes += self.padding.pop(buffer, 0)

    def _make_room(self, held_bytes: int, op: int) -> None:
        """Evict the least recently used buffers until `held_bytes`, minus what is away, fit."""
        while self.recent and held_bytes - self.away_bytes > self.capacity_bytes:
            buffer, gap = self.recent.popitem(last=False)
            self.away[buffer] = gap
            self.away_bytes += self._slot_bytes(buffer, fetched=False)
            self.away_bytes += self.padding.pop(buffer, 0)
            self.walked.evicted[gap] = op

    def _slot_bytes(self, buffer: int, *, fetched: bool) -> int:
        """Device bytes of `buffer`; `fetched`: once a copy has filled it."""
        nbytes = self.problem.trace.buffers[buffer].nbytes
        return self.problem.hardware.slot_bytes(Tier.DEVICE, nbytes, copied=fetched)


def _served(draft: Draft) -> Iterator[int]:
    """Per step, the op that it serves: its own, or the one that a replay is for."""
    ops: list[int] = []
    op = -1
    for step in reversed(draft.steps):
        if not step.run.again:
            op = step.run.op
        ops.append(op)
    return reversed(ops)
