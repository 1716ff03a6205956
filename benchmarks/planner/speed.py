"""speed: measure how long `search` takes, and what a minute of planning would gain."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from benchmarks.kit.benchmark import Patience
from benchmarks.kit.planner import MACHINE, compile_planner
from benchmarks.kit.rows import Check, Row
from benchmarks.reproduction.steps import Scale
from outcore.capture import trace_network
from outcore.compare import Comparison
from outcore.networks import NetworkSpec, network
from outcore.networks.gpt import GPT
from outcore.networks.transformer import TransformerShape
from outcore.policies.search.search import Search
from outcore.presets import preset

MINUTE = Search(effort=1e6, seconds=60.0)
POINT = 0.01
FEW_LAYERS, MANY_LAYERS = 12, 96
LITTLE_MORE = 3.0
"""The most time that eight times the layers may take, relative to the time for one."""


class Task(NamedTuple):
    """A network with a batch and a budget: the in-core peak divided by `share`.

    `most_seconds` is the goal for the planning time; None if there is none.
    """

    name: str
    spec: NetworkSpec
    batch: int
    most_seconds: float | None = None
    share: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed(Row):
    """Planning time on this machine, and predicted fractions of in-core speed that are lost."""

    step: str
    ops: int
    planning_seconds: float
    search_lost: float | None
    """What the plan of `search` loses; None if it has no plan."""
    minute_lost: float | None
    """What the plan loses after a minute of search."""


def speed(scale: Scale, patience: Patience) -> Iterator[Row]:
    """A row for each task, after a warm-up that loads and compiles the planner."""
    compile_planner()
    few: Speed | None = None
    for task in _tasks(scale):
        if patience.over():
            return
        row = _row(task, scale)
        if task.name == _decoder(FEW_LAYERS):
            few = row
        if few is not None and task.name == _decoder(MANY_LAYERS):
            ratio = row.planning_seconds / few.planning_seconds
            said = f"{ratio:.2f} times as long as {few.step}, at most {LITTLE_MORE:g}"
            row = replace(row, checks=(*row.checks, Check(said, ratio <= LITTLE_MORE)))
        yield row


def _tasks(scale: Scale) -> Iterator[Task]:
    tasks = (
        Task("resnet50-v1", network("resnet50-v1"), 640, 2.0),
        Task("resnext101-3d", network("resnext101-3d"), 16, 5.0, 2),
        Task(_decoder(FEW_LAYERS), _gpt(FEW_LAYERS), 16),
        Task(_decoder(MANY_LAYERS), _gpt(MANY_LAYERS), 4),
        Task("resnet1920", network("resnet1920"), 16, 60.0),
    )
    if not scale.small:
        yield from tasks
        return
    for task in tasks[:1]:
        yield task._replace(spec=task.spec.small, batch=64, most_seconds=None, share=2)


def _row(task: Task, scale: Scale) -> Speed:
    comparison = _comparison(task)
    seconds, lost = _plan(comparison, task.share, Search())
    minute = Search(effort=MINUTE.effort, seconds=1.0) if scale.small else MINUTE
    _, least = _plan(comparison, task.share, minute)
    if lost is None or least is None:
        checks = [Check(f"has a plan at 1/{task.share} of the peak", met=False)]
    else:
        checks = [Check(f"{lost - least:.2%} more than in a minute", lost - least <= POINT)]
    if task.most_seconds is not None:
        said = f"planned in {seconds:.1f} s, at most {task.most_seconds:g}"
        checks.append(Check(said, seconds <= task.most_seconds))
    return Speed(
        step=f"{task.name} {task.batch}, 1/{task.share}",
        ops=len(comparison.trace.ops),
        planning_seconds=seconds,
        search_lost=lost,
        minute_lost=least,
        checks=tuple(checks),
    )


def _comparison(task: Task) -> Comparison:
    return Comparison(trace_network(task.spec, task.batch), preset(MACHINE), task.batch)


def _plan(comparison: Comparison, share: int, policy: Search) -> tuple[float, float | None]:
    """Seconds of planning, and what the plan loses; None if there is no plan."""
    start = time.perf_counter()
    row = comparison.row(comparison.in_core_peak_bytes // share, policy)
    seconds = row.planning_seconds or time.perf_counter() - start
    return seconds, None if row.relative_to_in_core is None else 1 - row.relative_to_in_core


def _decoder(layers: int) -> str:
    return f"gpt, {layers} layers"


def _gpt(layers: int) -> NetworkSpec:
    shape = TransformerShape(layers=layers)
    return replace(network("gpt2"), name=_decoder(layers), build=partial(GPT, shape))
