"""verify_program: check that a Program is right: slot lifetimes, data, hazards, no leaks.

Each op of the trace runs exactly once as the original, in order. The hazards are derived here from
the slots that instructions touch, never taken from lowering. A `pace` edge does not count as a
wait. docs/ir.md lists the rules, in the order of this file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NoReturn

from outcore.ir.clocks import Clocks
from outcore.ir.hardware import Tier
from outcore.ir.problem import Problem
from outcore.ir.program import Alloc, Copy, Free, Program, Run, Stream
from outcore.ir.rooms import Rooms
from outcore.ir.trace import Effect
from outcore.ir.verify_shape import excerpt, fail, numbers, verify_interface, verify_shape


def verify_program(problem: Problem, program: Program) -> None:
    """Raise VerifyError if `program` breaks a rule. Linear in instructions times streams."""
    verify_shape(problem.trace, program)
    verify_interface(problem.trace, program)
    _Walk(problem, program).run()


@dataclass(slots=True)
class _SlotState:
    """What the verifier knows about one slot while it walks the body."""

    live: bool = False
    written: bool = False
    ended: bool = False
    version: int = 0
    """How often its buffer had been mutated when the bytes in this slot were made."""
    last_write: int = -1
    reads: list[int] = field(default_factory=list)


class _Walk:
    """One pass over the body, with the state of every slot."""

    def __init__(self, problem: Problem, program: Program) -> None:
        trace = problem.trace
        self.trace, self.profile, self.program = trace, problem.profile, program
        self.states = [_SlotState() for _ in program.slots]
        self.clocks = Clocks(program.body)
        self.next_op = 0
        self.versions = [0] * len(trace.buffers)
        """Per buffer: how often an op has mutated it so far."""
        self.read_versions: list[tuple[int, ...]] = []
        """Per op that has run: the versions of the buffers that it read."""
        self.variants: list[int] = []
        """Per op that has run: its variant."""
        self.linked = {(start, stop) for start, stop, _ in problem.hardware.links}
        self.rooms = {tier: Rooms() for tier in Tier}
        self.crossing: frozenset[int] = frozenset()
        """Slots that hold what the forward call leaves for the backward call."""
        self.donations = {
            (d.op, trace.values[d.source].buffer, trace.values[d.target].buffer)
            for d in trace.donations
        }

    def run(self) -> None:
        program = self.program
        self._arrive(program.arguments)
        for position, instruction in enumerate(program.body):
            if position == program.boundary:
                self._cross_boundary()
            self.clocks.issue(instruction.after)
            action = instruction.action
            if isinstance(action, Alloc):
                self._alloc(position, action.slot)
            elif isinstance(action, Free):
                self._free(position, action.slot)
            elif isinstance(action, Copy):
                self._copy(position, action)
            else:
                self._run(position, action)
        if program.boundary == len(program.body):
            self._cross_boundary()
        self._finish()

    def _fail(self, position: int, rule: str, detail: str) -> NoReturn:
        fail(f"instruction {position}", rule, detail, excerpt(self.program, position))

    def _arrive(self, slots: Iterable[int]) -> None:
        for slot in slots:
            state = self.states[slot]
            state.live = state.written = True

    # ---- one rule per action --------------------------------------------------------------------

    def _stream(self, position: int, expected: Stream) -> None:
        found = self.program.body[position].stream
        if found is not expected:
            rule = "an instruction is on the stream of its kind and tier"
            self._fail(position, rule, f"it is on {found.value}, not on {expected.value}")

    def _ordered(self, earlier: int, position: int, rule: str, slot: int) -> None:
        if earlier >= 0 and not self.clocks.ordered(earlier, position):
            self._fail(position, rule, f"of slot s{slot}, {earlier} need not be done by then")

    def _alloc(self, position: int, slot: int) -> None:
        state, mine = self.states[slot], self.program.slots[slot]
        on_device = mine.tier is Tier.DEVICE
        self._stream(position, Stream.COMPUTE if on_device else Stream.OUT)
        if state.live or state.ended:
            self._fail(position, "a slot is allocated once", f"slot s{slot} was before")
        state.live, state.last_write = True, position
        if on_device:
            return
        for other in self.rooms[mine.tier].take(mine.offset, mine.offset + mine.nbytes, slot):
            if self.states[other].live:
                rule = "live slots of a tier share no bytes"
                self._fail(position, rule, f"s{slot} and s{other} do")
            if other in self.crossing:
                rule = "what crosses to the backward call keeps its room"
                self._fail(position, rule, f"s{slot} takes bytes of s{other}")
            rule = "a room is used again after its last owner is freed"
            self._ordered(self.states[other].last_write, position, rule, other)

    def _touch(self, position: int, slot: int, *, writes: bool) -> None:
        state = self.states[slot]
        if not state.live:
            self._fail(position, "a slot is live when it is touched", f"slot s{slot} is not")
        if not (writes or state.written):
            self._fail(position, "a slot is written before it is read", f"slot s{slot} is not")
        rule = "a slot is touched after its last write is done"
        self._ordered(state.last_write, position, rule, slot)
        if not writes:
            state.reads.append(position)
            return
        self._after_reads(position, slot)
        state.last_write, state.written, state.reads = position, True, []

    def _after_reads(self, position: int, slot: int) -> None:
        rule = "a slot is written, freed or donated after its reads are done"
        for read in self.states[slot].reads:
            self._ordered(read, position, rule, slot)

    def _write_once(self, position: int, slot: int) -> None:
        if self.states[slot].written:
            self._fail(position, "a slot is written once", f"slot s{slot} was before")
        self._touch(position, slot, writes=True)

    def _free(self, position: int, slot: int) -> None:
        state, on_device = self.states[slot], self.program.slots[slot].tier is Tier.DEVICE
        self._stream(position, Stream.COMPUTE if on_device else Stream.IN)
        if not state.written:
            self._fail(position, "a slot is written before it is freed", f"slot s{slot} is not")
        self._touch(position, slot, writes=True)
        state.live, state.ended = False, True

    def _copy(self, position: int, copy: Copy) -> None:
        source, target = (self.program.slots[s] for s in (copy.source, copy.target))
        self._stream(position, Stream.OUT if source.tier is Tier.DEVICE else Stream.IN)
        if source.buffer != target.buffer:
            detail = f"from buffer {source.buffer} to buffer {target.buffer}"
            self._fail(position, "a copy is between two slots of one buffer", detail)
        if (source.tier is Tier.DEVICE) == (target.tier is Tier.DEVICE):
            detail = f"it is from {source.tier.value} to {target.tier.value}"
            self._fail(position, "a copy is between the device and another tier", detail)
        if (source.tier, target.tier) not in self.linked:
            detail = f"there is none from {source.tier.value} to {target.tier.value}"
            self._fail(position, "a copy is over a link of the machine", detail)
        self._touch(position, copy.source, writes=False)
        self._write_once(position, copy.target)
        self.states[copy.target].version = self.states[copy.source].version

    # ---- runs -----------------------------------------------------------------------------------

    def _run(self, position: int, run: Run) -> None:
        self._stream(position, Stream.COMPUTE)
        self._verify_order(position, run)
        self._verify_variant(position, run)
        self._verify_slots(position, run)
        for slot in run.reads:
            self._touch(position, slot, writes=False)
        self._verify_versions(position, run)
        if Effect.MUTATES in self.trace.ops[run.op].effects:
            self._mutate(position, run)
        for source, target in run.donate:
            self._donate(position, run, source, target)
        for slot in run.writes:
            self._write_once(position, slot)

    def _verify_order(self, position: int, run: Run) -> None:
        """First runs come once and in order, on their side of the boundary; reruns come later."""
        if run.again:
            if run.op >= self.next_op:
                rule = "an op runs again after it ran"
                self._fail(position, rule, f"op {run.op} has not run")
            if not self.trace.ops[run.op].repeatable:
                rule = "only an op that may run again does"
                self._fail(position, rule, f"op {run.op} is not repeatable")
            return
        if run.op != self.next_op:
            rule = "each op runs once as the original, in order"
            self._fail(position, rule, f"op {run.op} where op {self.next_op} is next")
        self.next_op += 1

    def _verify_variant(self, position: int, run: Run) -> None:
        """The profile has the variant. A rerun uses the original's: others round differently."""
        known = len(self.profile.costs[run.op])
        if not 0 <= run.variant < known:
            rule = "a run is of a variant that the profile has"
            detail = f"op {run.op} has {known - 1} alternatives, and this is variant {run.variant}"
            self._fail(position, rule, detail)
        if not run.again:
            self.variants.append(run.variant)
        elif run.variant != self.variants[run.op]:
            rule = "all runs of an op are of one variant"
            detail = f"op {run.op} ran as variant {self.variants[run.op]}, not {run.variant}"
            self._fail(position, rule, detail)

    def _verify_slots(self, position: int, run: Run) -> None:
        slots = self.program.slots
        for word, found, expected in (
            ("reads", run.reads, self.trace.reads[run.op]),
            ("makes", run.writes, self.trace.writes[run.op]),
        ):
            buffers = tuple(slots[s].buffer for s in found)
            if buffers != expected:
                rule = "a run reads and writes slots of the op's buffers, in order"
                detail = f"op {run.op} {word} {numbers(expected)}, not {numbers(buffers)}"
                self._fail(position, rule, detail)
        away = [s for s in (*run.reads, *run.writes) if slots[s].tier is not Tier.DEVICE]
        if away:
            self._fail(position, "a run finds its slots on the device", f"s{away[0]} is not there")

    def _verify_versions(self, position: int, run: Run) -> None:
        """What a run reads has been mutated as often as what the original run read."""
        found = tuple(self.states[s].version for s in run.reads)
        if run.again:
            expected = self.read_versions[run.op]
        else:
            expected = tuple(self.versions[b] for b in self.trace.reads[run.op])
            self.read_versions.append(expected)
        for slot, have, want in zip(run.reads, found, expected, strict=True):
            if have != want:
                rule = "a run reads what the original run reads, mutations included"
                buffer = self.program.slots[slot].buffer
                detail = f"slot s{slot} holds buffer {buffer} after {have} mutations, not {want}"
                self._fail(position, rule, detail)

    def _mutate(self, position: int, run: Run) -> None:
        for slot in run.reads:
            self._touch(position, slot, writes=True)
            buffer = self.program.slots[slot].buffer
            self.versions[buffer] += 1
            self.states[slot].version = self.versions[buffer]

    def _donate(self, position: int, run: Run, source: int, target: int) -> None:
        old, new, slots = self.states[source], self.states[target], self.program.slots
        if source not in run.reads or target not in run.writes:
            self._fail(position, "a run donates what it reads to what it makes", f"s{source}")
        if (run.op, slots[source].buffer, slots[target].buffer) not in self.donations:
            detail = f"buffer {slots[source].buffer} to buffer {slots[target].buffer}"
            self._fail(position, "the trace allows the donation", detail)
        if slots[source].nbytes != slots[target].nbytes:
            detail = f"{slots[source].nbytes} B to {slots[target].nbytes} B"
            self._fail(position, "a slot is donated to one of its size", detail)
        if source in self.crossing:
            rule = "what crosses to the backward call is not overwritten"
            self._fail(position, rule, f"s{source} is donated")
        if not old.live:
            self._fail(position, "a slot is donated once", f"s{source} is gone already")
        if new.live or new.ended:
            self._fail(position, "a slot is allocated once", f"slot s{target} was before")
        old.reads = [read for read in old.reads if read != position]
        self._after_reads(position, source)
        old.live, old.ended, old.last_write = False, True, position
        new.live, new.last_write = True, -1

    # ---- the ends of the two calls --------------------------------------------------------------

    def _cross_boundary(self) -> None:
        if self.next_op != self.trace.boundary:
            rule = "the forward call runs the forward ops"
            detail = f"it ends before op {self.next_op}, not before op {self.trace.boundary}"
            fail("the boundary", rule, detail)
        self._verify_ready("the boundary", self.trace.value_buffers(self.trace.outputs))
        alive = (slot for slot, state in enumerate(self.states) if state.live)
        self.crossing = frozenset(alive).difference(self.program.arguments)
        self._arrive(self.program.tangents)

    def _finish(self) -> None:
        if self.next_op != len(self.trace.ops):
            rule = "each op runs once as the original, in order"
            fail("the end", rule, f"op {self.next_op} never runs")
        results = set(self.program.results)
        for slot, state in enumerate(self.states):
            if state.live and slot not in results:
                detail = f"slot s{slot} of buffer {self.program.slots[slot].buffer} is"
                fail("the end", "nothing but the results is left", detail)
        self._verify_ready("the end", (self.program.slots[s].buffer for s in results))

    def _verify_ready(self, where: str, buffers: Iterable[int]) -> None:
        """What the caller gets or keeps is on the device, and compute has waited for its writes."""
        slots = {self.program.slots[s].buffer: s for s in self.program.results}
        for buffer in buffers:
            state = self.states[slots[buffer]]
            if not (state.live and state.written):
                rule = "what a call returns is there at its end"
                fail(where, rule, f"slot s{slots[buffer]} of buffer {buffer} is not")
            if state.version != self.versions[buffer]:
                rule = "what a call returns has seen every mutation"
                fail(where, rule, f"slot s{slots[buffer]} of buffer {buffer} has not")
            if state.last_write >= 0 and not self.clocks.known(state.last_write, Stream.COMPUTE):
                rule = "what a call returns is written by its end"
                detail = f"{state.last_write} need not be done by then"
                fail(where, rule, f"slot s{slots[buffer]} of buffer {buffer}: {detail}")
