"""verify_program: live when touched; written before read; hazards covered; no leak.

Each op of the trace runs exactly once as the original, in order (design section 3). The hazards are
derived here from the slots that instructions touch, never taken from lowering; an edge of `pace` does
not count as cover. Happens-before is a vector clock of three components, one per stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NoReturn

from outcore.errors import VerifyError
from outcore.ir.hardware import Tier
from outcore.ir.liveness import liveness
from outcore.ir.problem import Problem
from outcore.ir.program import Alloc, Copy, Free, Program, Run, Stream
from outcore.ir.rooms import Rooms
from outcore.ir.trace import Effect


@dataclass(slots=True)
class _SlotState:
    """What the verifier knows of one slot while it walks the body."""

    live: bool = False
    written: bool = False
    ended: bool = False
    last_write: int = -1
    reads: list[int] = field(default_factory=list)


def verify_program(problem: Problem, program: Program) -> None:
    """Raise VerifyError where `program` breaks a rule. Linear in instructions times streams."""
    _Walk(problem, program).run()


class _Walk:
    """One pass over the body with a vector clock per stream."""

    def __init__(self, problem: Problem, program: Program) -> None:
        self.trace, self.program = problem.trace, program
        self.states = [_SlotState() for _ in program.slots]
        self.clocks: dict[Stream, dict[Stream, int]] = {
            s: dict.fromkeys(Stream, -1) for s in Stream
        }
        self.done: list[dict[Stream, int]] = []
        self.next_op = 0
        self.ran: set[int] = set()
        self.rooms = {tier: Rooms() for tier in Tier}

    def run(self) -> None:
        program = self.program
        self._verify_slots()
        self._arrive(program.arguments)
        for position, instruction in enumerate(program.body):
            if position == program.boundary:
                self._cross_boundary()
            self._clock(position)
            action = instruction.action
            if isinstance(action, Alloc):
                self._alloc(position, action.slot)
            elif isinstance(action, Free):
                self._free(position, action.slot)
            elif isinstance(action, Copy):
                self._copy(position, action)
            else:
                self._run(position, action)
        if program.boundary >= len(program.body):
            self._cross_boundary()
        self._finish()

    def _fail(self, position: int, rule: str) -> NoReturn:
        low, high = max(0, position - 3), position + 4
        lines = (
            f"{'>' if index == position else ' '} {index}: {instruction}"
            for index, instruction in enumerate(self.program.body[low:high], low)
        )
        where = f"instruction {position}"
        raise VerifyError(noun="program", rule=rule, where=where, excerpt="\n".join(lines))

    def _check(self, holds: bool, position: int, rule: str) -> None:
        if not holds:
            self._fail(position, rule)

    def _verify_slots(self) -> None:
        for index, slot in enumerate(self.program.slots):
            size = self.trace.buffers[slot.buffer].nbytes
            self._check(slot.id == index, 0, f"slot {slot.id} at index {index}")
            self._check(slot.nbytes >= size, 0, f"slot {index} is smaller than its buffer")

    def _arrive(self, slots: Iterable[int]) -> None:
        for slot in slots:
            state = self.states[slot]
            state.live = state.written = True

    def _cross_boundary(self) -> None:
        at = self.program.boundary
        self._check(self.next_op == self.trace.boundary, at, "boundary is not the trace's")
        self._verify_ready(self.trace.value_buffers(self.trace.outputs), at)
        self._arrive(self.program.tangents)

    # ---- happens-before -------------------------------------------------------------------------

    def _clock(self, position: int) -> None:
        instruction = self.program.body[position]
        clock = dict(self.clocks[instruction.stream])
        for earlier in instruction.after:
            self._check(0 <= earlier < position, position, f"waits for {earlier}, not before it")
            for stream, reached in self.done[earlier].items():
                clock[stream] = max(clock[stream], reached)
        clock[instruction.stream] = position
        self.clocks[instruction.stream] = clock
        self.done.append(clock)

    def _ordered(self, earlier: int, position: int, hazard: str) -> None:
        if earlier < 0:
            return
        stream = self.program.body[earlier].stream
        covered = self.done[position][stream] >= earlier
        self._check(covered, position, f"{hazard}: {earlier} need not be done before {position}")

    # ---- one rule per action --------------------------------------------------------------------

    def _stream(self, position: int, expected: Stream) -> None:
        found = self.program.body[position].stream
        self._check(found is expected, position, f"on stream {found.value}, not {expected.value}")

    def _alloc(self, position: int, slot: int) -> None:
        state, tier = self.states[slot], self.program.slots[slot].tier
        self._stream(position, Stream.COMPUTE if tier is Tier.DEVICE else Stream.OUT)
        self._check(not state.live and not state.ended, position, f"slot {slot} allocated twice")
        state.live, state.last_write = True, position
        if tier is not Tier.DEVICE:
            mine = self.program.slots[slot]
            for other in self.rooms[tier].take(mine.offset, mine.offset + mine.nbytes, slot):
                self._check(not self.states[other].live, position, f"overlaps live slot {other}")
                self._ordered(
                    self.states[other].last_write, position, "room used before it is free"
                )

    def _touch(self, position: int, slot: int, *, writes: bool) -> None:
        state = self.states[slot]
        self._check(state.live, position, f"slot {slot} is not live")
        self._check(writes or state.written, position, f"slot {slot} read before it is written")
        self._ordered(state.last_write, position, f"slot {slot} touched before it is ready")
        if not writes:
            state.reads.append(position)
            return
        for read in state.reads:
            self._ordered(read, position, f"slot {slot} overwritten before it is read")
        state.last_write, state.written, state.reads = position, True, []

    def _free(self, position: int, slot: int) -> None:
        state, tier = self.states[slot], self.program.slots[slot].tier
        self._stream(position, Stream.COMPUTE if tier is Tier.DEVICE else Stream.IN)
        self._check(slot not in self.program.results, position, f"slot {slot} is a result")
        self._check(state.written, position, f"slot {slot} freed before it is written")
        self._touch(position, slot, writes=True)
        state.live, state.ended = False, True

    def _copy(self, position: int, copy: Copy) -> None:
        source, target = (self.program.slots[s] for s in (copy.source, copy.target))
        away = source.tier is Tier.DEVICE
        self._stream(position, Stream.OUT if away else Stream.IN)
        self._check(source.buffer == target.buffer, position, "copy between two buffers")
        self._check(source.tier is not target.tier, position, "copy inside one tier")
        self._touch(position, copy.source, writes=False)
        self._touch(position, copy.target, writes=True)

    def _run(self, position: int, run: Run) -> None:
        self._stream(position, Stream.COMPUTE)
        self._check(0 <= run.op < len(self.trace.ops), position, f"unknown op {run.op}")
        self._verify_order(position, run)
        slots = self.program.slots
        reads = tuple(slots[s].buffer for s in run.reads)
        writes = tuple(slots[s].buffer for s in run.writes)
        self._check(reads == self.trace.reads[run.op], position, f"reads buffers {reads}")
        self._check(writes == self.trace.writes[run.op], position, f"writes buffers {writes}")
        on_device = all(slots[s].tier is Tier.DEVICE for s in (*run.reads, *run.writes))
        self._check(on_device, position, "runs on a slot that is not on the device")
        mutates = Effect.MUTATES in self.trace.ops[run.op].effects
        for slot in run.reads:
            self._touch(position, slot, writes=False)
            if mutates:
                self._touch(position, slot, writes=True)
        for source, target in run.donate:
            self._donate(position, run, source, target)
        for slot in run.writes:
            self._check(not self.states[slot].written, position, f"slot {slot} written twice")
            self._touch(position, slot, writes=True)

    def _verify_order(self, position: int, run: Run) -> None:
        if run.again:
            self._check(run.op in self.ran, position, f"op {run.op} runs again before it ran")
            self._check(self.trace.ops[run.op].repeatable, position, f"op {run.op} cannot repeat")
            return
        self._check(run.op == self.next_op, position, f"op {run.op} where {self.next_op} is next")
        late = self.trace.boundary > run.op and position >= self.program.boundary
        self._check(not late, position, f"forward op {run.op} in the backward call")
        self.ran.add(run.op)
        self.next_op += 1

    def _donate(self, position: int, run: Run, source: int, target: int) -> None:
        old, new = self.states[source], self.states[target]
        slots = self.program.slots
        self._check(
            source in run.reads and target in run.writes, position, "donates what it has not"
        )
        self._check(slots[source].nbytes == slots[target].nbytes, position, "donates another size")
        self._check(source not in self.program.results, position, f"donates result {source}")
        self._check(not new.live and not new.ended, position, f"slot {target} is live already")
        old.reads = [r for r in old.reads if r != position]
        for read in old.reads:
            self._ordered(read, position, f"slot {source} donated before it is read")
        old.live, old.ended, old.last_write = False, True, position
        new.live, new.last_write = True, -1

    def _finish(self) -> None:
        end = len(self.program.body) - 1
        self._check(self.next_op == len(self.trace.ops), end, f"op {self.next_op} never runs")
        results = set(self.program.results)
        for slot, state in enumerate(self.states):
            leaks = state.live and slot not in results
            self._check(not leaks, end, f"slot {slot} of {self.program.slots[slot]} leaks")
        live = liveness(self.trace)
        self._verify_ready((b for b, held in enumerate(live.held) if held), end)

    def _verify_ready(self, buffers: Iterable[int], position: int) -> None:
        """What the caller gets or keeps is on the device, written, as far as compute knows."""
        slots = {self.program.slots[s].buffer: s for s in self.program.results}
        for buffer in buffers:
            slot = slots.get(buffer, -1)
            there = slot >= 0 and self.states[slot].live and self.states[slot].written
            self._check(there, position, f"result buffer {buffer} is not there")
            write = self.states[slot].last_write
            reached = self.clocks[Stream.COMPUTE]
            ready = write < 0 or reached[self.program.body[write].stream] >= write
            self._check(ready, position, f"result buffer {buffer} may not be written yet")
