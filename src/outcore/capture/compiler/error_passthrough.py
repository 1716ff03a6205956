"""error_passthrough: let outcore's errors through dynamo, which wraps what a backend raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache, partial
from types import new_class
from typing import Any

from outcore.capture.compiler.compat import ShortenTraceback
from outcore.errors import OutcoreError


@contextmanager
def passing() -> Iterator[None]:
    """Let outcore's errors reach the caller of a compiled function as what they are.

    Dynamo turns any exception of a backend into BackendCompilerFailed, except its own
    ShortenTraceback. So what is raised has a class that is both: outcore's by name and fields, and
    a ShortenTraceback.
    """
    try:
        yield
    except OutcoreError as error:
        if isinstance(error, ShortenTraceback):  # from a nested `passing`
            raise
        raise _passed(error) from error


def _passed(error: OutcoreError) -> OutcoreError:
    kind = _both(type(error))  # type: ignore[arg-type]  # a class can be hashed
    made = kind.__new__(kind)
    made.__dict__.update(error.__dict__, first_useful_frame=None, frame_exec_strategy=None)
    made.args = error.args
    return made


@cache
def _both(kind: type[OutcoreError]) -> type[OutcoreError]:
    """A class that is both `kind` and dynamo's, named like `kind`; its pickles are plain `kind`."""

    def reduced(error: Any) -> tuple[Callable[..., OutcoreError], tuple[()]]:
        return partial(kind, **{f.name: getattr(error, f.name) for f in fields(kind)}), ()  # type: ignore[arg-type]  # each kind is a dataclass

    names = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce__": reduced}
    made: type[OutcoreError] = new_class(
        kind.__name__, (kind, ShortenTraceback), exec_body=lambda space: space.update(names)
    )
    return made
