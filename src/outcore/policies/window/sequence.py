"""sequence: the variable sequence of Sony's scheduler: what each function touches, in order.

A function is an op, or the pause between the two calls. A variable is a buffer that may leave the
device, or a function's temporary memory: an op's workspace, or what the pause needs. Everything
else stays on the device, and each function has that many bytes less.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from outcore.ir.hardware import Tier
from outcore.ir.liveness import Liveness, liveness
from outcore.ir.plan import KEEP_ALL, Gap
from outcore.ir.problem import Problem
from outcore.ir.trace import Ref, Trace
from outcore.lower.donate import donate
from outcore.lower.expand import expand


@dataclass(frozen=True, slots=True)
class VariableSequence:
    """The variables that each function touches, in order, and their sizes.

    Positions are indices into `order`. Functions are numbered from 0.
    """

    order: tuple[int, ...]
    """Per position: the variable."""
    starts: tuple[int, ...]
    """Per function: its first position; then the end."""
    ops: tuple[int, ...]
    """Per function: the op before which its copies are issued."""
    nbytes: tuple[int, ...]
    """Per variable: its bytes."""
    born: tuple[int, ...]
    """Per variable: the function from which on it counts as a variable, because that function makes
    it, or is the first to use it if it is an argument."""
    next_use: tuple[int | None, ...]
    """Per position: the next position of the same variable; None if there is none."""
    beside_bytes: tuple[int, ...]
    """Per function: bytes on the device that are not variables, minus the arguments that its
    results are written over: these need room once, not twice."""
    fixed_bytes: int
    """Bytes that are on the device throughout."""

    def positions(self, function: int) -> range:
        """The positions of `function`."""
        return range(self.starts[function], self.starts[function + 1])

    def gap(self, position: int) -> Gap:
        """The idle stretch from the use at `position` to the next use. Only buffers have one.

        Raises ValueError at the last use.
        """
        later = self.next_use[position]
        if later is None:
            raise ValueError(f"variable {self.order[position]} is not used after {position}")
        return Gap(self.order[position], self._op(position), self._op(later))

    def _op(self, position: int) -> int:
        """The op of the function that `position` belongs to."""
        return self.ops[bisect_right(self.starts, position) - 1]


def variable_sequence(problem: Problem, min_bytes: int) -> VariableSequence:
    """The sequence of `problem`; smaller buffers than `min_bytes` stay. Linear in ops."""
    return _Builder(problem, min_bytes).build()


class _Builder:
    """Builds the sequence of one problem."""

    def __init__(self, problem: Problem, min_bytes: int) -> None:
        self.problem, self.trace = problem, problem.trace
        self.live: Liveness = liveness(problem.trace)
        self.boundary = problem.trace.boundary
        self.pauses = self.boundary < len(self.trace.ops)
        """Whether there is a backward call, and so a pause before it."""
        size = problem.hardware.slot_bytes
        self.buffer_bytes = [size(Tier.DEVICE, b.nbytes, copied=False) for b in self.trace.buffers]
        self.moves = [
            bool(self.live.uses[b.id]) and not self.live.held[b.id] and b.nbytes >= min_bytes
            for b in self.trace.buffers
        ]
        """Per buffer: whether it may leave the device."""
        self.functions = len(self.trace.ops) + self.pauses
        self.changes = [0] * (self.functions + 1)
        """Per function: by how much the bytes that are not variables change there."""

    def build(self) -> VariableSequence:
        """The finished sequence."""
        ops = [*range(self.boundary), *[self.boundary] * self.pauses]
        ops += range(self.boundary, len(self.trace.ops))
        order, starts = self._order()
        inputs = _buffers(self.trace, self.trace.inputs)
        self._stay(inputs)
        return VariableSequence(
            order=tuple(order),
            starts=tuple(starts),
            ops=tuple(ops),
            nbytes=(*self.buffer_bytes, *self._temporary_bytes()),
            born=tuple(self._born()),
            next_use=tuple(_next_use(order)),
            beside_bytes=tuple(self._beside_bytes()),
            fixed_bytes=self.problem.outside_bytes
            + sum(self.buffer_bytes[b] for b in inputs if self.live.held[b]),
        )

    def _function(self, op: int) -> int:
        """The function of `op`."""
        return op + (self.pauses and op >= self.boundary)

    # ---- variables ------------------------------------------------------------------------------

    def _order(self) -> tuple[list[int], list[int]]:
        """Per function, the buffers it touches that may leave, then its temporary memory."""
        trace, buffers = self.trace, len(self.trace.buffers)
        order: list[int] = []
        starts: list[int] = []
        for op in range(len(trace.ops)):
            if op == self.boundary:
                starts.append(len(order))
                order.append(buffers + op)
            starts.append(len(order))
            order += [b for b in (*trace.reads[op], *trace.writes[op]) if self.moves[b]]
            order.append(buffers + self._function(op))
        return order, [*starts, len(order)]

    def _temporary_bytes(self) -> list[int]:
        """Per function: an op's workspace, or what the rest of the step needs in the pause."""
        nbytes = list(self.problem.profile.workspace_bytes)
        nbytes[self.boundary : self.boundary] = [self.problem.between_bytes] * self.pauses
        return nbytes

    def _born(self) -> list[int]:
        """Per variable: the function from which on it counts. Temporaries follow the buffers."""
        buffers = [self._function(uses[0]) if uses else 0 for uses in self.live.uses]
        return [*buffers, *range(self.functions)]

    # ---- what stays -----------------------------------------------------------------------------

    def _stay(self, inputs: Sequence[int]) -> None:
        """Record in `changes` what is not a variable, and arguments before their first use."""
        arrival = {b: 0 for b in inputs if not self.live.held[b]}
        if self.pauses:
            arrival |= dict.fromkeys(_buffers(self.trace, self.trace.tangents), self.boundary)
        for buffer, uses in enumerate(self.live.uses):
            made = self.live.producer[buffer]
            first = arrival.get(buffer) if made is None else self._function(made)
            if first is None:
                continue
            if self.live.held[buffer]:
                last = self.functions
            elif self.moves[buffer]:
                last = self._function(uses[0])
            else:
                last = self._function(uses[-1]) + 1 if uses else first + 1
            self.changes[first] += self.buffer_bytes[buffer]
            self.changes[last] -= self.buffer_bytes[buffer]

    def _beside_bytes(self) -> list[int]:
        """Per function: the field `beside_bytes` of the sequence."""
        beside = list(accumulate(self.changes))[: self.functions]
        draft = donate(self.trace, expand(self.problem, KEEP_ALL))
        for step in draft.steps:
            written_over = sum(draft.slots[source].nbytes for source, _ in step.run.donate)
            beside[self._function(step.run.op)] -= written_over
        return beside


def _buffers(trace: Trace, values: Iterable[int]) -> tuple[int, ...]:
    """The buffers of `values`."""
    return trace.value_buffers(tuple(map(Ref, values)))


def _next_use(order: Sequence[int]) -> list[int | None]:
    """Per position, the next one of the same variable."""
    next_use: list[int | None] = [None] * len(order)
    seen: dict[int, int] = {}
    for position in range(len(order) - 1, -1, -1):
        next_use[position] = seen.get(order[position])
        seen[order[position]] = position
    return next_use
