"""outcore demo: train one network in-core and inside a budget, and compare the two runs."""

from __future__ import annotations

import json
from dataclasses import replace
from enum import StrEnum
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outcore.cli.comparison import RunComparison, table, to_dict
from outcore.cli.progress import progress
from outcore.cli.subject import MOST_SAMPLES
from outcore.cli.training import Budgeted, InCore, Mode, Task, TrainingRun, train
from outcore.errors import BudgetError, OptionValueError
from outcore.units import format_bytes, parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outcore.networks import Batch, NetworkSpec

EXIT_BROKEN_PROMISE = 1
RESNET = "resnet50"
BATCH = 16
BATCH_ON_A_GPU = 64
"""Enough to keep a GPU busy: ResNet-50 then needs about 5.6 GiB."""
FEWEST_ITERATIONS = 8
"""At most six until the plan has run and was metered, one timed, and one metered from outside."""


class DeviceName(StrEnum):
    """Where to train."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def demo(  # noqa: PLR0913 - an argument per option of the command
    *,
    network: Annotated[str, typer.Option(help="See `outcore networks`.")] = RESNET,
    budget: Annotated[
        str | None,
        typer.Option(
            help='A size ("600MiB") or a part of the in-core peak (default: 40%, with --small 75%).'
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_SAMPLES,
            help="Samples per iteration (default: 16; for ResNet-50 on a GPU 64).",
        ),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="See `outcore policies` (default: that of the library).")
    ] = None,
    iterations: Annotated[
        int,
        typer.Option(
            min=FEWEST_ITERATIONS, help="Iterations of each run; the first five find the plan."
        ),
    ] = 10,
    device: Annotated[
        DeviceName, typer.Option(help="Where to train; auto: on a GPU if there is one.")
    ] = DeviceName.AUTO,
    link_limit: Annotated[
        str | None, typer.Option(help='Simulate a slower link to the disk, on a CPU: "300MiB/s".')
    ] = None,
    spill_dir: Annotated[
        Path | None,
        typer.Option(help="Directory for offloaded bytes (default: the temporary one)."),
    ] = None,
    small: Annotated[
        bool, typer.Option("--small", help="Use a small variant of the network; takes seconds.")
    ] = False,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed for weights and batches.")
    ] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write all figures to this file, as JSON.")
    ] = None,
) -> None:
    """Train a network in-core, then inside a budget, and compare memory, time and gradients.

    Ends with exit code 1 if gradients differ or the measured peak is above the budget.
    """
    budget = ("75%" if small else "40%") if budget is None else budget
    options = {"policy": policy, "link_limit": link_limit, "spill_dir": spill_dir}
    found = _device(device, link_limit)
    _check(budget, options)
    from outcore.report.place import check_file, writing  # noqa: PLC0415 - loads numpy

    if json_file is not None:
        check_file("--json", json_file)
    usual = (network, found == "cpu", small) != (RESNET, False, False)
    batch = batch or (BATCH if usual else BATCH_ON_A_GPU)
    task = _task(network, batch, iterations, seed, found, small=small)
    console = Console()
    title = "a small variant of " * small + task.spec.summary
    console.print(f"{task.spec.name}, batch {batch}, {_named(found)}: {title}", highlight=False)
    compared = _compare(task, budget, options, console)
    console.print(table(compared))
    for note in compared.report.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    if json_file is not None:
        with writing("--json", json_file):
            json_file.write_text(json.dumps(to_dict(compared), indent=1) + "\n", encoding="utf-8")
    if not compared.kept:
        raise typer.Exit(EXIT_BROKEN_PROMISE)


def _device(asked: DeviceName, link_limit: str | None) -> str:
    """Where to train, as torch names it."""
    import torch  # noqa: PLC0415 - takes seconds, as below

    there = torch.cuda.is_available()
    if asked is DeviceName.CUDA and not there:
        reason = "torch finds no GPU here (see `outcore doctor`); without one: --device cpu"
        raise OptionValueError(option="device", value=asked.value, reason=reason)
    if asked is DeviceName.CPU or not there:
        return "cpu"
    if link_limit is not None:
        reason = "the links of a GPU cannot be slowed down; on the CPU: --device cpu"
        raise OptionValueError(option="link_limit", value=link_limit, reason=reason)
    return f"cuda:{torch.cuda.current_device()}"


def _named(device: str) -> str:
    import torch  # noqa: PLC0415 - takes seconds, as below

    return "on the CPU" if device == "cpu" else f"on {torch.cuda.get_device_name(device)}"


def _check(budget: str, options: dict[str, Any]) -> None:
    """Raise for a wrong budget or option before training, which takes minutes."""
    from outcore.api import Backend  # noqa: PLC0415 - loads torch, which takes seconds
    from outcore.execute.disk import SpillFile  # noqa: PLC0415 - as above

    _budget_bytes(budget, 2**50)
    backend = Backend(budget="100%", **options)
    SpillFile(backend.options.spill_dir).close()


def _budget_bytes(budget: str, in_core_peak_bytes: int) -> int:
    try:
        return parse_size(budget, in_core_peak_bytes)
    except ValueError as error:
        raise BudgetError(option="budget", value=budget, reason=str(error)) from error


def _task(name: str, batch: int, iterations: int, seed: int, device: str, *, small: bool) -> Task:
    """A task with photographs of two classes if the network classifies images, else random data."""
    # These load torch, which takes seconds; `outcore --help` does not need it.
    from outcore.networks import network, photograph_batches  # noqa: PLC0415 - see above
    from outcore.networks.photographs import CLASSES  # noqa: PLC0415 - see above

    spec = network(name)
    spec = spec.small if small else spec
    size = _image_size(spec)
    if size is None:
        drawn = partial(_drawn, spec, batch, seed)
        return Task(spec, {}, batch, drawn, iterations, seed, device)
    photographs = partial(photograph_batches, batch, seed, size=size)
    return Task(spec, {"classes": CLASSES}, batch, photographs, iterations, seed, device)


def _drawn(spec: NetworkSpec, batch: int, seed: int) -> Iterator[Batch]:
    return map(partial(spec.batch, batch), count(seed))


def _image_size(spec: NetworkSpec) -> int | None:
    """Side length in pixels of the images that the network classifies; None if it does not."""
    sample = spec.batch(1)
    shapes = [tuple(each.shape) for each in (*sample.inputs, *sample.targets)]
    if [len(shape) for shape in shapes] != [4, 1] or shapes[0][1] != 3:  # noqa: PLR2004 - n, RGB, h, w
        return None
    return int(shapes[0][-1])


def _compare(task: Task, budget: str, options: dict[str, Any], console: Console) -> RunComparison:
    from outcore.api import Backend  # noqa: PLC0415 - loads torch, as above
    from outcore.execute.malloc import own_malloc  # noqa: PLC0415 - as above

    if task.device == "cpu":
        own_malloc()  # the driver sets it later too: both runs then use the same malloc
    in_core = _in_core(task, console)
    budget_bytes = _budget_bytes(budget, in_core.peak_bytes)
    console.print(f"budget: {format_bytes(budget_bytes)} ({budget})", highlight=False)
    backend = Backend(budget=budget_bytes, **options)
    budgeted = _train(task, Budgeted(backend), console)
    compared = RunComparison(budget_bytes, in_core, budgeted, backend.report())
    if compared.differing:
        # For some networks torch.compile's tracing changes the last bits, with any plan.
        traced = InCore("aot_eager", "aot_eager")
        compared = replace(compared, traced=_train(task, traced, console))
        if compared.differing:
            repeated = replace(traced, title="aot_eager again")
            compared = replace(compared, repeated=_train(task, repeated, console))
    return compared


def _in_core(task: Task, console: Console) -> TrainingRun:
    from outcore.measure import says_memory  # noqa: PLC0415 - loads torch, as above

    try:
        return _train(task, InCore(), console)
    except RuntimeError as error:
        if not says_memory(error):
            raise
        reason = "plain training, with which the demo compares, ran out of memory: take a smaller"
        raise OptionValueError(option="batch", value=task.samples, reason=reason) from error


def _train(task: Task, mode: Mode, console: Console) -> TrainingRun:
    with progress(console, mode.title, task.iterations) as watch:
        return train(task, mode, watch)
