"""meaning: run traces without torch, on integers that ops mix, so that any mistake shows."""

from __future__ import annotations

from collections.abc import Sequence

from outcore.interpret import Semantics
from outcore.ir.liveness import liveness
from outcore.ir.program import Program
from outcore.ir.trace import Effect, Op, Trace

MODULUS = (1 << 61) - 1


def semantics(trace: Trace) -> Semantics[int]:
    """Semantics on integers: a result depends on the op, the seed, and each read with its place.

    An op that mutates changes everything that it reads.
    """

    def evaluate(op: Op, reads: Sequence[int], seed: int) -> list[int]:
        mixed = op.id + 1 + (7919 * (seed + 1) if Effect.RANDOM in op.effects else 0)
        for place, array in enumerate(reads, 1):
            mixed = (mixed * 1_000_003 + array * (2 * place + 1)) % MODULUS
        changed = len(reads) if Effect.MUTATES in op.effects else 0
        return [(mixed + 31 * i) % MODULUS for i in range(len(trace.writes[op.id]) + changed)]

    # Each poison is different, so that two wrong results never agree by chance.
    poisons = iter(range(-1, -(1 << 40), -1))
    return Semantics(evaluate, lambda array: array, lambda buffer: next(poisons) * 1009 - buffer)


def given(program: Program) -> dict[int, int]:
    """An integer for the buffer of each argument and tangent."""
    slots = (*program.arguments, *program.tangents)
    return {program.slots[s].buffer: 100_003 * (program.slots[s].buffer + 1) for s in slots}


def results_of(trace: Trace) -> set[int]:
    """The buffers that the caller sees: those that calls return, and those that it held before."""
    return {buffer for buffer, held in enumerate(liveness(trace).held) if held}
