"""monotone: check whether `search` ever finds a slower plan with more memory or bandwidth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from benchmarks.kit.benchmark import Patience
from benchmarks.kit.rows import Check, Row
from benchmarks.planner.together import together
from benchmarks.reproduction.steps import Scale, lab
from outcore.compare import Comparison
from outcore.lower import lower
from outcore.policies.search.search import Search
from outcore.presets import preset
from outcore.simulate import simulate
from outcore.sweep.budgets import spaced

MACHINE = "v100-pcie3"
BATCHES = {
    "resnet50-v1": 640,
    "alexnet": 2688,
    "googlenet": 512,
    "densenet121": 256,
    "unet3d": 4,
    "gpt2": 16,
    "vit": 256,
}
BUDGETS = 12
"""Number of budgets from the floor to the in-core peak."""
LINK_SHARE = 2
"""For the links, the budget is the in-core peak divided by this."""
LINKS = (0.5, 0.7, 0.85, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0)
"""Rates of the link, relative to the machine's."""
NONE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope(Row):
    """Predicted fraction of in-core speed that is lost, as memory grows or the link gets faster.

    `figures` are gigabytes of device memory, or of the link per second.
    """

    step: str
    of: str
    figures: tuple[float, ...]
    lost: tuple[float, ...]


def monotone(scale: Scale, patience: Patience) -> Iterator[Row]:
    """Two rows for each network: one for memory, one for the link."""
    batches = dict(list(BATCHES.items())[:1]) if scale.small else BATCHES
    return together(_of_network, batches, scale, patience)


def _of_network(name: str, batch: int, scale: Scale) -> list[Slope]:
    comparison = lab(name, MACHINE, 0, scale).at(batch)
    lowest, peak = comparison.floor().floor.nbytes, comparison.in_core_peak_bytes
    budgets = spaced(lowest, peak, 3 if scale.small else BUDGETS)
    rates = LINKS[::4] if scale.small else LINKS
    budget = max(lowest, peak // LINK_SHARE)
    step, link = f"{name} {batch}", preset(MACHINE).hardware.links[0][2].bytes_per_second
    return [
        slope(step, "memory", budgets, [_lost(comparison, each) for each in budgets]),
        slope(
            f"{step}, 1/{LINK_SHARE}",
            "link",
            [link * rate for rate in rates],
            [_lost(comparison, budget, rate) for rate in rates],
        ),
    ]


def _lost(comparison: Comparison, budget_bytes: int, rate: float = 1.0) -> float:
    """The loss of the plan for this budget alone, over a link that is `rate` times as fast."""
    problem = comparison.problem(budget_bytes)
    links = (
        (source, target, replace(link, bytes_per_second=link.bytes_per_second * rate))
        for source, target, link in problem.hardware.links
    )
    problem = replace(problem, hardware=replace(problem.hardware, links=tuple(links)))
    plan = Search().plan(problem)
    return 1 - comparison.in_core.seconds / simulate(problem, lower(problem, plan)).seconds


def slope(step: str, of: str, figures: Sequence[float], lost: Sequence[float]) -> Slope:
    """The row with its check."""
    most = max((after - before for before, after in pairwise(lost)), default=-inf)
    times = sum(after - before > NONE for before, after in pairwise(lost))
    said = f"{times} of {len(lost) - 1} steps up lose more, {max(0.0, most):.2%} at most"
    return Slope(
        step=step,
        of=of,
        figures=tuple(figure / 1e9 for figure in figures),
        lost=tuple(lost),
        checks=(Check(said, most <= NONE),),
    )
