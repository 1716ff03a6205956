"""variant: how the graphs are made that run calls with several results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

from outcore.capture import as_dynamo_compiles, as_kernels, without_autocast
from outcore.gc_paused import gc_paused
from outcore.runtime.budget.engine import Engine
from outcore.runtime.by_size import BySize
from outcore.runtime.runner import Runner

Graph: TypeAlias = Runner | BySize


class Variant(NamedTuple):
    """How a graph is made."""

    engine: Engine | None = None
    """Its engine; None: that of its device."""
    provisional: bool = False
    """As for `PlannedGraph`."""
    may_run_again: bool = False
    """Whether forward may have to run again."""


ALONE = Variant()
"""The variant of a graph that is the only one."""

Make: TypeAlias = Callable[[Any, Variant], Graph]
"""Makes what runs calls, of a joint graph. Raises CaptureError if it cannot."""


@contextmanager
def as_compiled() -> Iterator[None]:
    """In this context, graphs are made as while torch compiles."""
    with as_dynamo_compiles(), as_kernels(), without_autocast(), gc_paused():
        yield
