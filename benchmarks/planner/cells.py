"""Cell: a row for one step under one budget, planned by every policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from benchmarks.kit.benchmark import Patience
from benchmarks.kit.rows import Check, Row
from benchmarks.planner.together import together
from benchmarks.reproduction.steps import Lab, Scale, lab
from outcore.bound import lower_bound
from outcore.ir.hardware import Tier
from outcore.ir.problem import Problem
from outcore.policies import POLICIES, resolve

DEVICE_BYTES = 16 * 2**30
PAPERS = (
    ("resnet50-v1", 640, "v100-pcie3", 12e9, 0.08),
    ("resnet50-v1", 640, "v100-pcie3", 16e9, 0.075),
    ("resnet50-v1", 640, "v100-nvlink2", 75e9, 0.005),
    ("resnet50-v1", 1440, "v100-nvlink2", 50e9, 0.10),
)
"""Network, batch, machine, bytes per second of its link, and the largest loss allowed."""

NETWORKS = {
    "resnet50-v1": 640,
    "alexnet": 2688,
    "vgg16": 256,
    "googlenet": 512,
    "inception-v4": 128,
    "densenet121": 256,
    "pix2pixhd": 8,
    "deeplabv3plus": 24,
    "resnext101-3d": 16,
    "unet3d": 4,
    "gpt2": 16,
    "vit": 256,
}
"""Batch of each network: about what needs 50 GB."""
SHARES = (2, 3, 4)
"""Budgets: the in-core peak is divided by these numbers."""

OURS = "search"
SLOW = frozenset({"pooch-paper"})
"""Policies left out: their second step takes time cubic in the maps, minutes for deep networks."""

POINTS = 0.03
"""The largest loss of a plan beyond the bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell(Row):
    """Fractions of in-core speed that are lost. All figures but the planning time are predicted."""

    step: str
    budget_bytes: int
    bound_lost: float | None = None
    """What even the best plan loses, by the lower bound."""
    search_lost: float | None = None
    """What `search` loses; None if it has no plan."""
    other_lost: float | None = None
    """What the best of the other policies loses."""
    best_other: str = ""
    planning_seconds: float | None = None


def papers(scale: Scale, patience: Patience) -> Iterator[Row]:
    """The cells that have a goal of their own, from papers."""
    for name, batch, machine, link, goal in PAPERS:
        if patience.over():
            return
        found = lab(name, machine, DEVICE_BYTES, scale, link=link)
        row = cell(found, batch, f"{name} {batch}, {machine} at {link / 1e9:g} GB/s")
        lost = 1.0 if row.search_lost is None else row.search_lost
        check = Check(f"loses {lost:.2%}, at most {goal:.1%}", lost <= goal)
        yield replace(row, checks=(*row.checks, check))


def budgets(scale: Scale, patience: Patience) -> Iterator[Row]:
    """Every network at fractions of its in-core peak."""
    return together(_of_network, NETWORKS, scale, patience)


def _of_network(name: str, batch: int, scale: Scale) -> list[Cell]:
    peak = lab(name, "v100-pcie3", 0, scale).at(batch).in_core.peak(Tier.DEVICE)
    found = ((share, lab(name, "v100-pcie3", peak // share, scale)) for share in SHARES)
    cells = [cell(each, batch, f"{name} {batch}, 1/{share}") for share, each in found]
    return [replace(each, planning_seconds=None) for each in cells]


def cell(found: Lab, batch: int, step: str) -> Cell:
    """One step under one budget, by all policies."""
    comparison = found.at(batch)
    problem = comparison.problem(found.budget_of(comparison))
    rows = {n: comparison.row(problem.budget_bytes, resolve(n)) for n in POLICIES if n not in SLOW}
    lost = {n: 1 - r.relative_to_in_core for n, r in rows.items() if r.relative_to_in_core}
    ours = rows[OURS]
    row = judged(step, problem, comparison.in_core.seconds, lost, ours.reason)
    return replace(row, planning_seconds=ours.planning_seconds)


def judged(
    step: str, problem: Problem, in_core_seconds: float, lost: Mapping[str, float], reason: str
) -> Cell:
    """One step under one budget.

    `lost`: the fraction of in-core speed that each policy with a plan loses; `reason`: why ours has
    none.
    """
    others = {name: fraction for name, fraction in lost.items() if name != OURS}
    best = min(others, key=others.__getitem__, default="")
    blank = Cell(
        step=step,
        budget_bytes=problem.budget_bytes,
        other_lost=others.get(best),
        best_other=best,
    )
    if OURS not in lost:
        check = Check("has a plan where another policy has one", not others)
        return replace(blank, checks=(check,), note=reason)
    mine, other = lost[OURS], others.get(best, 1.0)
    bound = 1 - in_core_seconds / lower_bound(problem)
    over = mine - bound
    checks = (
        Check(f"loses {mine:.2%}, {best} {other:.2%}", mine <= other + 1e-9),
        Check(f"{over:.2%} beyond the bound, at most {POINTS:.0%}", over <= POINTS),
    )
    return replace(blank, bound_lost=bound, search_lost=mine, checks=checks)
