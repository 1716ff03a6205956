"""rivals: `search` beside the other policies that move something, on four courses.

And beside `torch.utils.checkpoint` per block, whose memory no budget holds. All on one course
take turns step by step. Policies are compared, not profiles nor processes: the plans of a course
are made from one profile, those that are the same run once, and each runs in two fresh processes,
which tell by how much processes differ where nothing else does. `search` with fused kernels, whose
step is another one, profiles for itself.
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
from outcore.runtime.reuse import Given, save_file

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
ROUNDS = 5
"""Turns of each process, of which there are two for each way to train."""
DEVIATIONS = 2.0
"""Two ways differ where their times do by more than so many standard deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Racer(Runner):
    """`same_as`: the mode whose plan is the very same; its figures stand here too."""

    same_as: str = ""


class Entry(NamedTuple):
    """One that takes part: what runs for it, or why nothing does."""

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
    """Rows of all entries, and of eager before them."""
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
    """What each policy makes of one profile, in a file of its own; what is the same only once."""
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
    """The same mode in one process after the other; what went wrong, where something did."""
    fine = []
    for part in parts:
        if isinstance(part, str):
            return part
        fine.append(part)
    turns = tuple(turn for part in fine for turn in part.turns)
    return Raced(turns, max(part.peak_bytes for part in fine), fine[0].report)


def _of_eager(name: str, runs: Sequence[Mapping[str, Raced | str]]) -> float | None:
    """Mean of the ratios within a run: from one to the next the machine may have changed."""
    logs = []
    for each in runs:
        mine, eager = each[name], each[Eager().name]
        if isinstance(mine, str) or isinstance(eager, str):
            return None
        logs.append(math.log(ratio_of_medians(mine.turns, eager.turns)))
    return math.exp(fmean(logs))


def _deviation(runs: Sequence[Mapping[str, Raced | str]]) -> float:
    """Standard deviation of the ratio of two modes' times, each from one process of either run.

    A process takes its mode's time, times what is common to its run, times noise: the logarithms
    of first over second differ between the modes by the noise of two processes.
    """
    first, second = runs
    logs = []
    for name in first:
        one, other = first[name], second[name]
        if not isinstance(one, str) and not isinstance(other, str):
            logs.append(math.log(seconds(one.turns) / seconds(other.turns)))
    return stdev(logs) / math.sqrt(2) if len(logs) > 1 else 0.0


def _judged(row: Racer, rows: Sequence[Racer], margin: float) -> Racer:
    """The row; that of `search` with checks against each other one."""
    if row.mode != Outcore(OURS).name:
        return row
    apart = (row.mode, Eager().name, Outcore(OURS, fuse=True).name)
    others = [r for r in rows if r.mode not in apart and not _larger(row, r)]
    return replace(row, checks=(*row.checks, *(_faster(row, r, margin) for r in others)))


def _larger(ours: Racer, other: Racer) -> bool:
    """Whether ours takes more memory than one that has no budget: the two do not compare."""
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
