"""Pass `expand`: turn a Plan into the most basic Draft that carries it out.

Each copy is issued when it is needed and waited for at once. This is the least memory and the least
overlap that the plan allows. Later passes move copies and frees.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, pairwise
from typing import NoReturn

from outcore.errors import VerifyError
from outcore.ir.hardware import Tier
from outcore.ir.liveness import Liveness, dead_gaps, liveness
from outcore.ir.plan import Choice, Gap, Keep, Offload, Plan, Recompute
from outcore.ir.problem import Problem
from outcore.ir.program import Action, Alloc, Copy, Free, Run, Slot
from outcore.ir.trace import Effect, Ref
from outcore.lower.draft import Draft, Step


def expand(problem: Problem, plan: Plan) -> Draft:
    """Walk the trace once and bring back what each op needs. Linear in the runs it emits.

    Raises VerifyError if the plan recomputes a buffer from something that no longer exists.
    """
    return _Expansion(problem, plan).run()


class _Expansion:
    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.trace, self.hardware, self.plan = problem.trace, problem.hardware, plan
        self.live: Liveness = liveness(problem.trace)
        self.device: dict[int, int] = {}
        """Buffer -> the device slot that holds it now."""
        self.outer: dict[int, int] = {}
        """Buffer -> the slot in an outer tier that holds a valid copy now."""
        self.now: dict[int, Choice] = {}
        """Buffer -> the choice for the gap that it is in now."""
        self.dead = {gap.buffer: gap for gap in dead_gaps(problem.trace)}
        self.ending: dict[int, list[int]] = {}
        """Op -> the buffers whose dead gap ends with it and is listed in the plan."""
        for gap, _ in plan.choices:
            if gap.dead:
                self.ending.setdefault(gap.before, []).append(gap.buffer)
        self.passed = [0] * len(problem.trace.buffers)
        """Per buffer: how many of its uses are done."""
        self.mutated: dict[int, int] = {}
        """Buffer -> the last op so far that may have mutated it."""
        self.slots: list[Slot] = []
        self.steps: list[Step] = []
        self.pending: list[Action] = []
        """Actions for the `before` of the next step."""
        self.extent = dict.fromkeys(Tier, 0)

    def run(self) -> Draft:
        trace = self.trace
        arguments = self._arrive(trace.inputs)
        tangents: tuple[int, ...] = ()
        boundary = len(trace.ops)
        for op in range(len(trace.ops)):
            if op == trace.boundary:
                boundary, tangents = len(self.steps), self._arrive(trace.tangents)
            self._original(op)
        if trace.boundary >= len(trace.ops):
            boundary, tangents = len(self.steps), self._arrive(trace.tangents)
        results = tuple(self.device[b] for b, held in enumerate(self.live.held) if held)
        return Draft(self.slots, self.steps, boundary, arguments, tangents, results)

    # ---- slots ----------------------------------------------------------------------------------

    def _slot(self, buffer: int, tier: Tier, *, copied: bool = False) -> int:
        nbytes = self.hardware.slot_bytes(tier, self.trace.buffers[buffer].nbytes, copied=copied)
        offset = 0 if tier is Tier.DEVICE else self.extent[tier]
        self.extent[tier] += nbytes
        self.slots.append(Slot(len(self.slots), buffer, tier, nbytes, offset))
        return len(self.slots) - 1

    def _arrive(self, values: Iterable[int]) -> tuple[int, ...]:
        buffers = self.trace.value_buffers(tuple(map(Ref, values)))
        for buffer in buffers:
            self.device[buffer] = self._slot(buffer, Tier.DEVICE)
        unused = (b for b in buffers if not self.live.uses[b] and not self.live.held[b])
        self.pending += [Free(self.device[b]) for b in unused]
        return tuple(self.device[b] for b in buffers)

    def _allocate(self, buffer: int) -> int:
        slot = self._slot(buffer, Tier.DEVICE)
        self.pending.append(Alloc(slot))
        return slot

    # ---- original runs --------------------------------------------------------------------------

    def _original(self, op: int) -> None:
        reads, writes = self.trace.reads[op], self.trace.writes[op]
        self._bring(reads)
        after = self._end_dead(op)
        for buffer in writes:
            self.device[buffer] = self._allocate(buffer)
        run = Run(op, self._devices(reads), self._devices(writes), variant=self.plan.variant(op))
        for buffer in (*reads, *writes):
            self.passed[buffer] += 1
            if not self.live.held[buffer]:
                after += self._leave(buffer, op)
        if Effect.MUTATES in self.trace.ops[op].effects:
            self.mutated.update(dict.fromkeys(reads, op))
        self._emit(run, after)

    def _end_dead(self, op: int) -> list[Action]:
        """Free what was held only for recomputations up to `op`; returns actions for after it."""
        ending = self.ending.get(op, ())
        for buffer in ending:
            self.now.pop(buffer, None)
        # First in `before`, so that what is fetched can use this memory.
        self.pending[:0] = [Free(self.device.pop(b)) for b in ending if b in self.device]
        return [Free(self.outer.pop(b)) for b in ending if b in self.outer]

    def _devices(self, buffers: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.device[b] for b in buffers)

    def _emit(self, run: Run, after: list[Action]) -> None:
        self.steps.append(Step(self.pending, run, after))
        self.pending = []

    def _leave(self, buffer: int, op: int) -> list[Action]:
        """The actions after the use of `buffer` by `op`, as the plan chooses."""
        uses, passed = self.live.uses[buffer], self.passed[buffer]
        gap = self.dead.get(buffer) if passed == len(uses) else Gap(buffer, op, uses[passed])
        if gap is None:
            self.now.pop(buffer, None)
            return [Free(self.device.pop(buffer))]
        choice = self.now[buffer] = self.plan.choice(gap)
        if isinstance(choice, Keep):
            return []
        away: list[Action] = []
        if isinstance(choice, Offload) and buffer not in self.outer:
            target = self.outer[buffer] = self._slot(buffer, choice.tier, copied=True)
            away = [Alloc(target), Copy(self.device[buffer], target)]
        return [*away, Free(self.device.pop(buffer))]

    # ---- bringing back --------------------------------------------------------------------------

    def _bring(self, buffers: Iterable[int]) -> None:
        """Make sure that each of `buffers` is live on the device."""
        wanted = [b for b in buffers if b not in self.device]
        chain, fetched = self._chain(wanted)
        if not chain:
            for buffer in fetched:
                self._fetch(buffer)
            return
        wanted_now = set(wanted)
        last_reader = {b: op for op in chain for b in self.trace.reads[op]}
        temporary: dict[int, int] = {}
        for op in chain:
            for buffer in self.trace.reads[op]:
                if buffer in fetched and buffer not in self.device and buffer not in temporary:
                    self._fetch(buffer)
            self._again(op, wanted_now, last_reader, temporary)
        for buffer in wanted:
            if buffer not in self.device:
                self._fetch(buffer)

    def _chain(self, wanted: Iterable[int]) -> tuple[list[int], dict[int, None]]:
        """The ops to run again for `wanted`, in order, and the buffers to fetch for them."""
        ops: set[int] = set()
        fetched: dict[int, None] = {}
        stack = list(wanted)
        seen = set(stack)
        while stack:
            buffer = stack.pop()
            if buffer in self.outer:
                fetched[buffer] = None
                continue
            producer = self._producer(buffer)
            ops.add(producer)
            more = [b for b in self.trace.reads[producer] if b not in self.device and b not in seen]
            seen.update(more)
            stack += more
        return sorted(ops), fetched

    def _producer(self, buffer: int) -> int:
        producer = self.live.producer[buffer]
        if producer is None:
            self._refuse(buffer, "the caller passed it in, and it is gone")
        op = self.trace.ops[producer]
        if not op.repeatable:
            self._refuse(buffer, f"op {op.id} {op.target} may not run again")
        for read in self.trace.reads[producer]:
            # The bytes that it read are lost: a mutated buffer is held, so it was never copied.
            by = self.mutated.get(read, -1)
            if by > producer:
                self._refuse(buffer, f"op {producer} read buffer {read}, which op {by} mutated")
        return producer

    def _refuse(self, buffer: int, detail: str) -> NoReturn:
        name = self.trace.buffers[buffer].name
        raise VerifyError(
            noun="plan",
            rule="what is recomputed can be made again from what is left",
            where=f"buffer {buffer}" + (f" ({name})" if name else ""),
            detail=detail,
        )

    def _fetch(self, buffer: int) -> None:
        source = self.outer[buffer]
        target = self.device[buffer] = self._slot(buffer, Tier.DEVICE, copied=True)
        self.pending += [Alloc(target), Copy(source, target), *self._drop_copy(buffer)]

    def _drop_copy(self, buffer: int) -> list[Action]:
        """Free the outer copy of `buffer`, now on the device, unless a later gap needs it."""
        if buffer not in self.outer or self._offloaded_later(buffer):
            return []
        return [Free(self.outer.pop(buffer))]

    def _offloaded_later(self, buffer: int) -> bool:
        uses = self.live.uses[buffer][self.passed[buffer] :]
        between = (Gap(buffer, a, b) for a, b in pairwise(uses))
        last = [self.dead[buffer]] if uses and buffer in self.dead else []
        return any(isinstance(self.plan.choice(gap), Offload) for gap in chain(last, between))

    def _again(
        self, op: int, wanted: set[int], last_reader: dict[int, int], temporary: dict[int, int]
    ) -> None:
        """Run `op` again. `temporary`: buffer -> slot, for buffers that only this chain needs."""
        after: list[Action] = []
        writes = []
        reads = tuple(
            temporary[b] if b in temporary else self.device[b] for b in self.trace.reads[op]
        )
        for buffer in self.trace.writes[op]:
            slot = self._allocate(buffer)
            writes.append(slot)
            if buffer in self.device:
                after.append(Free(slot))
            elif buffer in wanted or self._stays(buffer):
                self.device[buffer] = slot
                after += self._drop_copy(buffer)
            elif buffer in last_reader:
                temporary[buffer] = slot
            else:
                after.append(Free(slot))
        ended = [b for b in self.trace.reads[op] if b in temporary and last_reader[b] == op]
        after += [Free(temporary.pop(b)) for b in ended]
        variant = self.plan.variant(op)
        self._emit(Run(op, reads, tuple(writes), again=True, variant=variant), after)

    def _stays(self, buffer: int) -> bool:
        choice = self.now.get(buffer)
        return isinstance(choice, Recompute) and choice.stay
