"""verifier: measure how many single faults in a program are caught before it runs.

Generated traces and plans (with a fixed seed) are lowered. Each instruction and each hazard edge is
then removed in turn. A missing edge is harmful if some order of the streams then gives another
result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, given, settings

from benchmarks.cpu.scale import Scale
from benchmarks.kit.benchmark import Patience
from benchmarks.kit.rows import Check, Row
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from tests.pure.mutations import Tally
from tests.pure.test_lower import lowered, planned

LIMIT = 0.95
"""The least fraction of lost instructions that must be caught."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kills(Row):
    """One kind of fault. `harmful` ones change results; `missed` are harmful and not caught."""

    fault: str
    tried: int
    caught: int
    caught_share: float
    harmful: int | None = None
    missed: int | None = None


def verifier(scale: Scale, patience: Patience) -> Iterator[Row]:
    """Lost instructions, then lost edges. Takes about a second per ten examples."""
    if patience.over():
        return
    tally = _tally(scale.examples)
    share = tally.instructions_caught / tally.instructions
    yield Kills(
        fault="lost instruction",
        tried=tally.instructions,
        caught=tally.instructions_caught,
        caught_share=share,
        checks=(Check(f"{share:.2%} caught, at least {LIMIT:.0%}", share >= LIMIT),),
    )
    yield Kills(
        fault="lost hazard edge",
        tried=tally.edges,
        caught=tally.edges_caught,
        caught_share=tally.edges_caught / tally.edges,
        harmful=tally.edges_harmful,
        missed=tally.edges_harmful_missed,
        checks=(Check("every harmful one caught", not tally.edges_harmful_missed),),
    )


def _tally(examples: int) -> Tally:
    tally = Tally()

    @given(planned())
    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def collect(case: tuple[Problem, Plan]) -> None:
        problem, plan = case
        program = lowered(problem, plan)
        if program is not None:
            tally.add(problem, program)

    collect()
    return tally
