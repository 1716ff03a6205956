"""Positions: the moments of a step, and the bytes that any plan holds at each of them.

The positions are the arrival of the arguments, the first run of each op in order, and the pause
between the forward and the backward call. At each, some bytes cannot be away.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from outcore.ir.liveness import Liveness
from outcore.ir.problem import Problem
from outcore.ir.trace import Ref

ARRIVAL = 0
"""The position at which the arguments have arrived and nothing has run."""


@dataclass(frozen=True, slots=True)
class Positions:
    """Facts by position, except `of_op` (the position of each op) and `touches` (by buffer).

    `ops`: None for the arrival and the pause. `pause`: the position of the pause, or `end` if there
    is no backward call. `fixed_bytes`: what no plan can move away: buffers of the caller and held
    ones, what the op reads and makes, its workspace, and external memory. Savings by donations are
    not subtracted. `seconds`: the op's time. For an op's variants, the least seconds and the least
    workspace count. `touches`: the positions at which a buffer must be on the device.
    """

    ops: tuple[int | None, ...]
    seconds: tuple[float, ...]
    fixed_bytes: tuple[int, ...]
    of_op: tuple[int, ...]
    touches: tuple[tuple[int, ...], ...]
    pause: int

    @property
    def end(self) -> int:
        """The position after the last one."""
        return len(self.ops)


def make_positions(problem: Problem, live: Liveness) -> Positions:
    """The positions of the step of `problem`. Linear in ops."""
    trace, profile = problem.trace, problem.profile
    count, boundary = len(trace.ops), trace.boundary
    ops: list[int | None] = [None, *range(boundary)]
    pause = len(ops)
    if boundary < count:
        ops += [None, *range(boundary, count)]
    of_op = tuple(q for q, op in enumerate(ops) if op is not None)
    touches = _touches(problem, live, of_op, pause)
    held = _held_bytes(problem, live, touches, len(ops))
    seconds, fixed = [], []
    for position, op in enumerate(ops):
        between = problem.between_bytes if position == pause else 0
        costs = () if op is None else profile.costs[op]
        inside = min((cost.workspace_bytes for cost in costs), default=between)
        seconds.append(min((cost.seconds for cost in costs), default=0.0))
        fixed.append(problem.outside_bytes + held[position] + inside)
    return Positions(tuple(ops), tuple(seconds), tuple(fixed), of_op, touches, pause)


def _touches(
    problem: Problem, live: Liveness, of_op: tuple[int, ...], pause: int
) -> tuple[tuple[int, ...], ...]:
    trace = problem.trace
    found = [[of_op[op] for op in uses] for uses in live.uses]

    def arrive(values: Iterable[int], position: int) -> None:
        for buffer in trace.value_buffers(tuple(map(Ref, values))):
            found[buffer].append(position)

    arrive(trace.inputs, ARRIVAL)
    if trace.boundary < len(trace.ops):
        arrive(trace.tangents, pause)
    return tuple(tuple(sorted(set(positions))) for positions in found)


def _held_bytes(
    problem: Problem, live: Liveness, touches: tuple[tuple[int, ...], ...], count: int
) -> list[int]:
    """Per position, the bytes of held buffers that exist, and of others that are touched there."""
    change, touched = [0] * (count + 1), [0] * count
    for buffer in problem.trace.buffers:
        positions = touches[buffer.id]
        if live.held[buffer.id] and positions:
            change[positions[0]] += buffer.nbytes
        elif not live.held[buffer.id]:
            for position in positions:
                touched[position] += buffer.nbytes
    return [a + b for a, b in zip(accumulate(change[:count]), touched, strict=True)]
