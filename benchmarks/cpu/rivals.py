"""rivals: `search` beside the other policies that move something, under three budgets.

And beside `torch.utils.checkpoint` per block, whose memory no budget holds. All of one budget take
turns step by step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.cpu.in_core import in_core_peak_bytes
from benchmarks.cpu.race import Runner, race
from benchmarks.cpu.scale import FULL, Scale
from benchmarks.kit.benchmark import Patience
from benchmarks.kit.modes import Checkpoint, Eager, Mode, Outcore
from benchmarks.kit.rows import Check, Row

OURS = "search"
RIVALS = (
    "pooch{early=true}",
    "swap-opt{early=true}",
    "window",
    "superneurons",
    "chen-sqrt",
    "cheap",
)
"""The best of each kind; those that move all that can be are in `worth`."""
SHARES = (0.3, 0.4, 0.6)
"""Budgets, of the in-core peak."""
ROUNDS = 7
"""Turns of each: nine ways to train, three times."""
NOISE = 0.03
"""By how much medians of one interleaved run differ for the same plan on a machine in use."""


def rivals(scale: Scale, patience: Patience) -> Iterator[Row]:
    """A race for each budget."""
    if patience.over():
        return
    peak = in_core_peak_bytes(scale.workload)
    for share in SHARES if scale == FULL else (scale.budget_share,):
        if patience.over():
            return
        named = RIVALS if scale == FULL else RIVALS[:1]
        planned = [Outcore(policy, int(peak * share)) for policy in (OURS, *named)]
        modes: list[Mode] = [Eager(), *planned, Checkpoint()]
        rows = list(race(replace(scale, rounds=min(scale.rounds, ROUNDS)), modes, None, patience))
        for row in rows:
            yield _judged(row, rows)


def _judged(row: Runner, rows: list[Runner]) -> Runner:
    """The row; that of `search` with checks against each other one."""
    if row.mode != Outcore(OURS).name or row.of_eager_ratio is None:
        return row
    others = [r for r in rows if r.mode not in (row.mode, Eager().name) and not _larger(row, r)]
    return replace(row, checks=(*row.checks, *(_faster(row, other) for other in others)))


def _larger(ours: Runner, other: Runner) -> bool:
    """Whether ours takes more memory than one that has no budget: the two do not compare."""
    return other.budget_bytes is None and (ours.peak_bytes or 0) > (other.peak_bytes or 0)


def _faster(ours: Runner, other: Runner) -> Check:
    ratio, theirs = ours.of_eager_ratio, other.of_eager_ratio
    if ratio is None or theirs is None:
        return Check(f"{other.mode} has no plan", ratio is not None)
    said = f"{ratio:.3f} of eager's time, {other.mode} {theirs:.3f}"
    return Check(said, ratio <= theirs * (1 + NOISE))
