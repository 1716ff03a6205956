"""rivals: `search` beside the other policies that move something, on four courses.

And beside `torch.utils.checkpoint` per block, whose memory no budget holds. All on one course
take turns step by step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from benchmarks.cpu.in_core import in_core_peak_bytes
from benchmarks.cpu.race import Runner, race
from benchmarks.cpu.scale import FULL, Scale
from benchmarks.cpu.worth import SLOW_LINK
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


class Course(NamedTuple):
    """One race: what is trained, in which part of its in-core peak, over which link."""

    workload: str
    share: float
    link: str | None = None


COURSES = (
    Course("resnet50-b16-224", 0.4),
    Course("resnet50-b16-224", 0.6),
    Course("resnet50-b32-224", 0.3),
    Course("resnet50-b16-224", 0.4, SLOW_LINK),
)
"""30 % with the larger batch: 16 images need a third of their peak under any plan."""
ROUNDS = 7
"""Turns of each: nine ways to train, three times."""
NOISE = 0.03
"""By how much medians of one interleaved run differ for the same plan on a machine in use."""


def rivals(scale: Scale, patience: Patience) -> Iterator[Row]:
    """A race on each course."""
    full = scale == FULL
    for course in COURSES if full else (Course(scale.workload, scale.budget_share),):
        if patience.over():
            return
        budget = int(in_core_peak_bytes(course.workload) * course.share)
        named = RIVALS if full else RIVALS[:1]
        planned = [Outcore(policy, budget, course.link) for policy in (OURS, *named)]
        modes: list[Mode] = [Eager(), *planned, Checkpoint()]
        run = replace(scale, workload=course.workload, rounds=min(scale.rounds, ROUNDS))
        rows = list(race(run, modes, course.link, patience))
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
