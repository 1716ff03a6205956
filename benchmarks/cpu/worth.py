"""worth: compare outcore's policies with their peers, at a budget of 40 % of the in-core peak.

All workers of one run take turns step by step. Eager, `aot_eager` and plain Inductor have no
budget; they are there for comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.cpu.in_core import in_core_peak_bytes
from benchmarks.cpu.race import Runner, race
from benchmarks.cpu.scale import FULL, Scale
from benchmarks.cpu.spill import Spill
from benchmarks.kit.benchmark import Patience
from benchmarks.kit.modes import (
    AotEager,
    Checkpoint,
    Eager,
    Inductor,
    Mode,
    Outcore,
)
from benchmarks.kit.rows import Row, at_most
from outcore.runtime.settings.options import DEFAULT_POLICY

SLOW_LINK = "300MiB/s"
RECOMPUTE_ALL = "recompute-all"
"""It takes tens of times as long as eager with any link, so it runs at full speed only."""
COMPARED = ("swap-all-naive", "swap-all", RECOMPUTE_ALL, "swap-opt", "pooch", DEFAULT_POLICY)
"""Not all policies: each needs its own process, and all processes are alive at once."""
SPEEDY_RECOMPUTE = f"{RECOMPUTE_ALL}{{max_ops=12,stay=true}}"
TIME_LIMIT = 1.15
"""Limit for the step time of the default policy, relative to eager, with the full-speed disk."""


def worth(scale: Scale, patience: Patience) -> Iterator[Row]:
    """Rows at full speed, then, for fewer modes, with a slower link."""
    if patience.over():
        return
    budget = int(in_core_peak_bytes(scale.workload) * scale.budget_share)
    for link in (None, SLOW_LINK) if scale.throttled else (None,):
        if patience.over():
            return
        for row in race(scale, _modes(scale, budget, link), link, patience):
            yield _judged(row)


def _modes(scale: Scale, budget: int, link: str | None) -> Sequence[Mode]:
    """The modes to compare, the reference first."""
    left_out = set() if link is None else {RECOMPUTE_ALL}
    policies = (DEFAULT_POLICY,) if scale != FULL else (*COMPARED, SPEEDY_RECOMPUTE)
    planned = [Outcore(policy, budget, link) for policy in policies if policy not in left_out]
    unlimited: list[Mode] = [AotEager(), Inductor()] if link is None and scale == FULL else []
    return (Eager(), *unlimited, *planned, Checkpoint(), Inductor(0.5), Spill(link))


def _judged(row: Runner) -> Runner:
    """The row with one more check, if it is for the default policy: its time."""
    if row.mode != Outcore(DEFAULT_POLICY).name or row.link != "disk" or not row.checks:
        return row
    return replace(
        row, checks=(*row.checks, *at_most("time of eager's", row.of_eager_ratio, TIME_LIMIT))
    )
