"""interpret: run a Program on any kind of array: the reference for what programs mean.

Instructions run one at a time, in an order that respects only the streams and `after`. Even an
order chosen by an adversary must give the same results: if a hazard is not covered, some order
reads poison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from outcore.ir.program import Action, Alloc, Copy, Free, Program, Run, Stream
from outcore.ir.trace import Effect, Op, Trace

A = TypeVar("A")

Chooser = Callable[[Sequence[int]], int]
"""Picks the next body position among those that may run now."""


@dataclass(frozen=True, slots=True)
class Semantics(Generic[A]):
    """What an array is, and how ops compute on it."""

    evaluate: Callable[[Op, Sequence[A], int], Sequence[A]]
    """`evaluate(op, reads, seed)` returns the buffers that the op makes, in the order of
    `Trace.writes`.

    An op that mutates returns after these what it leaves in each buffer it reads, in the order of
    `Trace.reads`. `seed` numbers the draw of a random op.
    """
    copy: Callable[[A], A]
    """Copies an array into new memory."""
    poison: Callable[[int], A]
    """Makes an array for a buffer (an id) from which no right result can be computed."""


def in_order(ready: Sequence[int]) -> int:
    """Pick the first instruction in the order of the body."""
    return min(ready)


def interpret(
    trace: Trace,
    program: Program,
    given: Mapping[int, A],
    semantics: Semantics[A],
    choose: Chooser = in_order,
) -> dict[int, A]:
    """Run `program` and return the arrays of its result slots, by buffer.

    `given` maps each argument's and tangent's buffer to its array.
    """
    memory = {s.id: semantics.poison(s.buffer) for s in program.slots}
    for slot in (*program.arguments, *program.tangents):
        memory[slot] = semantics.copy(given[program.slots[slot].buffer])
    machine = _Machine(trace, program, memory, semantics)
    for position in _schedule(program, choose):
        machine.step(program.body[position].action)
    return {program.slots[s].buffer: memory[s] for s in program.results}


def _schedule(program: Program, choose: Chooser) -> list[int]:
    """Return the body positions in an order that the streams and `after` allow."""
    queues = {s: [i for i, x in enumerate(program.body) if x.stream is s] for s in Stream}
    heads = dict.fromkeys(Stream, 0)
    done: set[int] = set()
    order: list[int] = []
    while len(order) < len(program.body):
        heads_now = [queues[s][heads[s]] for s in Stream if heads[s] < len(queues[s])]
        ready = [i for i in heads_now if done.issuperset(program.body[i].after)]
        position = choose(ready)
        heads[program.body[position].stream] += 1
        done.add(position)
        order.append(position)
    return order


class _Machine(Generic[A]):
    """The memory, and the seeds that random ops drew the first time they ran."""

    def __init__(
        self, trace: Trace, program: Program, memory: dict[int, A], semantics: Semantics[A]
    ) -> None:
        self.trace, self.program, self.memory, self.semantics = trace, program, memory, semantics
        self.seeds: dict[int, int] = {}

    def step(self, action: Action) -> None:
        """Carry out one action."""
        if isinstance(action, Alloc | Free):
            self._wipe(action)
        elif isinstance(action, Copy):
            self.memory[action.target] = self.semantics.copy(self.memory[action.source])
        else:
            self._run(action)

    def _wipe(self, action: Alloc | Free) -> None:
        self.memory[action.slot] = self.semantics.poison(self.program.slots[action.slot].buffer)

    def _run(self, run: Run) -> None:
        """Run an op; the slots whose memory it donates hold poison afterwards."""
        op = self.trace.ops[run.op]
        if Effect.RANDOM in op.effects:
            self.seeds.setdefault(run.op, len(self.seeds))
        reads = [self.memory[s] for s in run.reads]
        made = self.semantics.evaluate(op, reads, self.seeds.get(run.op, 0))
        for source, _ in run.donate:
            self.memory[source] = self.semantics.poison(self.program.slots[source].buffer)
        changed = run.reads if Effect.MUTATES in op.effects else ()
        for slot, array in zip((*run.writes, *changed), made, strict=True):
            self.memory[slot] = array
