"""measured: steps whose op times and links were measured on a device, under several budgets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.kit.benchmark import Patience
from benchmarks.planner.cells import OURS, SLOW, Cell, judged
from benchmarks.reproduction.steps import Scale
from outcore.errors import InfeasibleError
from outcore.ir.plan import KEEP_ALL, Plan
from outcore.ir.problem import Problem
from outcore.ir.store import load
from outcore.lower import lower
from outcore.policies import POLICIES, ask, resolve
from outcore.simulate import simulate
from outcore.units import format_bytes

FILES = sorted((Path(__file__).parent.parent / "problems").glob("*.json"))
"""Problems of one graph each, as `outcore.ir.store` saves them."""

SHARES = (1.0, 0.75, 1.5, 2.0)
"""Budgets, relative to the one that the step was measured under."""


def measured(scale: Scale, patience: Patience) -> Iterator[Cell]:
    """A row for each file and budget; at small scale only the first budget."""
    for file in FILES:
        problem = load(file, Problem)
        for share in SHARES[:1] if scale.small else SHARES:
            if patience.over():
                return
            budget = int(share * problem.budget_bytes)
            name = f"{file.stem}, {format_bytes(budget)}"
            yield _cell(name, replace(problem, budget_bytes=budget))


def _cell(name: str, problem: Problem) -> Cell:
    in_core = _seconds(problem, KEEP_ALL)
    lost, reasons = dict[str, float](), dict[str, str]()
    for policy in POLICIES:
        if policy in SLOW:
            continue
        try:
            lost[policy] = 1 - in_core / _seconds(problem, ask(resolve(policy), problem))
        except InfeasibleError as error:
            reasons[policy] = str(error)
    return judged(name, problem, in_core, lost, reasons.get(OURS, ""))


def _seconds(problem: Problem, plan: Plan) -> float:
    """Predicted seconds of a step."""
    return simulate(problem, lower(problem, plan)).seconds
