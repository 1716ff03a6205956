"""rivals: compare `search` with the other policies that move something, on four courses.

`torch.utils.checkpoint` per block takes part, too, although no budget limits its memory. All ways
to train on one course take turns step by step.

The aim is to compare policies, not profiles or processes. So the plans of a course are made from
one profile. Plans that are identical run once. Each runs in two fresh processes, which shows how
much processes differ if nothing else does. `search` with fused kernels has another step, so it
profiles for itself.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from benchmarks.cpu.in_core import in_core_peak_bytes
from benchmarks.cpu.race import INFEASIBLE, Raced, Runner, reason, run, scored
from benchmarks.cpu.scale import FULL, Scale
from benchmarks.cpu.trainer import Trainer, alone
from benchmarks.cpu.worth import SLOW_LINK
from benchmarks.kit.benchmark import Patience
from benchmarks.kit.modes import Checkpoint, Eager, Mode, Outcore
from benchmarks.kit.rounds import ratio_of_medians, seconds
from benchmarks.kit.rows import Check, Row
from benchmarks.kit.worker import Worker, WorkerError
from outcore.errors import InfeasibleError
from outcore.ir.plan import Choice, Gap
from outcore.out_of_process import plan_out_of_process
from outcore.planfile import save_plans
from outcore.policies import resolve
from outcore.runtime.settings.reuse import Given, save_file

OURS = "search"
RIVALS = (
    "pooch{early=true}",
    "swap-opt{early=true}",
    "window",
    "superneurons",
    "chen-sqrt",
    "cheap",
)
"""The best policy of each kind. Policies that move all that they can are in `worth`."""


class Course(NamedTuple):
    """One race: what is trained, at which fraction of its in-core peak, over which link."""

    workload: str
    share: float
    link: str | None = None


COURSES = (
    Course("resnet50-b16-224", 0.4),
    Course("resnet50-b16-224", 0.6),
    Course("resnet50-b32-224", 0.3),
    Course("resnet50-b16-224", 0.4, SLOW_LINK),
)
"""30 % has the larger batch: with 16 images, every plan needs a third of the peak."""
ROUNDS = 5
"""Turns of each process. There are two processes for each way to train."""
DEVIATIONS = 2.0
"""Two times differ if they are more than this many standard deviations apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Racer(Runner):
    """A row. `same_as` names the mode with an identical plan, whose figures this row repeats."""

    same_as: str = ""


class Entry(NamedTuple):
    """One entry in a race: the mode that runs for it, or a note why nothing does."""

    name: str
    mode: Mode | None
    note: str = ""


def rivals(scale: Scale, patience: Patience) -> Iterator[Row]:
    """A race on each course."""
    full = scale == FULL
    policies = (OURS, *(RIVALS if full else RIVALS[:1]))
    for course in COURSES if full else (Course(scale.workload, scale.budget_share),):
        if patience.over():
            return
        with tempfile.TemporaryDirectory() as folder:
            entries = [*_planned(course, policies, Path(folder)), _entry(Checkpoint())]
            yield from _race(course, entries, min(scale.rounds, ROUNDS), patience)


def _race(
    course: Course, entries: Sequence[Entry], rounds: int, patience: Patience
) -> Iterator[Racer]:
    """Rows of all entries, after a row of eager."""
    entries = [_entry(Eager()), *entries]
    modes = list(dict.fromkeys(entry.mode for entry in entries if entry.mode is not None))
    runs = [run(course.workload, modes, rounds, patience) for _ in range(2)]
    raced = {mode.name: _joined([each[mode.name] for each in runs]) for mode in modes}
    rows = []
    for name, mode, note in entries:
        row = Racer(workload=course.workload, mode=name, link=course.link or "disk", note=note)
        if mode is not None:
            row = replace(row, same_as=mode.name if mode.name != name else "")
            row = scored(row, raced[mode.name], raced)
            row = replace(row, of_eager_ratio=_of_eager(mode.name, runs))
        rows.append(row)
    margin = DEVIATIONS * _deviation(runs)
    return (_judged(row, rows, margin) for row in rows)


def _entry(mode: Mode) -> Entry:
    return Entry(mode.name, mode)


def _planned(course: Course, policies: Sequence[str], folder: Path) -> Iterator[Entry]:
    """Plan by each policy from one profile. Identical plans share a mode, so that they run once."""
    budget = int(in_core_peak_bytes(course.workload) * course.share)
    blank = Outcore(policies[0], budget, course.link)
    fused = replace(blank, fuse=True)
    try:
        with Worker(alone, course.workload, blank) as worker:
            worker.ask(Trainer.warm_up)
            problem = worker.ask(Trainer.problem)
    except (InfeasibleError, WorkerError) as error:
        yield from (Entry(replace(blank, policy=p).name, None, reason(error)) for p in policies)
        return
    known: dict[tuple[tuple[tuple[Gap, Choice], ...], tuple[tuple[int, int], ...]], Mode] = {}
    for number, policy in enumerate(policies):
        file = folder / f"{number}.json"
        mode = replace(blank, policy=policy, plan=str(file))
        try:
            plan = plan_out_of_process(resolve(policy), problem)
        except InfeasibleError as error:
            yield Entry(mode.name, None, reason(error))
            continue
        save_plans(save_file([(problem, plan)], Given(), most=0), file)
        yield Entry(mode.name, known.setdefault((plan.choices, plan.variants), mode))
    yield Entry(fused.name, fused)


def _joined(parts: Sequence[Raced | str]) -> Raced | str:
    """The same mode in one process after the other, as one result; or the error, if one failed."""
    fine = []
    for part in parts:
        if isinstance(part, str):
            return part
        fine.append(part)
    turns = tuple(turn for part in fine for turn in part.turns)
    return Raced(turns, max(part.peak_bytes for part in fine), fine[0].report)


def _of_eager(name: str, runs: Sequence[Mapping[str, Raced | str]]) -> float | None:
    """Geometric mean over the runs of the ratio to eager: the machine may change between runs."""
    logs = []
    for each in runs:
        mine, eager = each[name], each[Eager().name]
        if isinstance(mine, str) or isinstance(eager, str):
            return None
        logs.append(math.log(ratio_of_medians(mine.turns, eager.turns)))
    return math.exp(fmean(logs))


def _deviation(runs: Sequence[Mapping[str, Raced | str]]) -> float:
    """Standard deviation of the ratio of two modes' times, each from one process of the same run.

    A process's time is its mode's time, times a factor common to its run, times noise. So the
    logarithms of first over second run differ between modes by the noise of two processes.
    """
    first, second = runs
    logs = []
    for name in first:
        one, other = first[name], second[name]
        if not isinstance(one, str) and not isinstance(other, str):
            logs.append(math.log(seconds(one.turns) / seconds(other.turns)))
    return stdev(logs) / math.sqrt(2) if len(logs) > 1 else 0.0


def _judged(row: Racer, rows: Sequence[Racer], margin: float) -> Racer:
    """The row; if it is that of `search`, with a check against each other row."""
    if row.mode != Outcore(OURS).name:
        return row
    apart = (row.mode, Eager().name, Outcore(OURS, fuse=True).name)
    others = [r for r in rows if r.mode not in apart and not _larger(row, r)]
    return replace(row, checks=(*row.checks, *(_faster(row, r, margin) for r in others)))


def _larger(ours: Racer, other: Racer) -> bool:
    """Whether ours uses more memory than one without a budget: then the two cannot be compared."""
    return other.budget_bytes is None and (ours.peak_bytes or 0) > (other.peak_bytes or 0)


def _faster(ours: Racer, other: Racer, margin: float) -> Check:
    ratio, theirs = ours.of_eager_ratio, other.of_eager_ratio
    if other.same_as == ours.mode:
        return Check(f"{other.mode} has the same plan", True)
    if ratio is None or theirs is None:
        ran = ratio is not None and other.note.startswith(INFEASIBLE)
        return Check(f"{other.mode}: {other.note or ours.note}", ran)
    said = f"{ratio:.3f} of eager's time, {other.mode} {theirs:.3f}, give or take {margin:.3f}"
    return Check(said, ratio <= theirs * (1 + margin))
