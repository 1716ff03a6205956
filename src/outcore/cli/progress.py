"""progress: show the progress of a run, as a bar on a terminal, else one line per iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from outcore.cli.training import Iteration
from outcore.units import format_seconds


@contextmanager
def progress(console: Console, title: str, total: int) -> Iterator[Callable[[Iteration], None]]:
    """Yield a function that shows one iteration."""
    if not console.is_terminal:
        numbers = count(1)
        yield lambda step: console.print(
            f"{title} {next(numbers)}/{total}: {_text(step)}", highlight=False
        )
        return
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=total, text="starting")
        yield lambda step: bar.update(task, advance=1, text=_text(step))


def _text(step: Iteration) -> str:
    return f"{step.phase}, loss {step.loss:.4f}, {format_seconds(step.seconds)}"
