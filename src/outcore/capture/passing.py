"""Errors of ours on their way through dynamo, which wraps what a backend raises into its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache, partial
from types import new_class
from typing import Any

from outcore.capture.compat import ShortenTraceback
from outcore.errors import OutcoreError


@contextmanager
def passing() -> Iterator[None]:
    """Let errors of ours reach the caller of a compiled function as what they are.

    Dynamo turns any exception of a backend into BackendCompilerFailed, save those that are its own
    ShortenTraceback. So what is raised is of a class that is both: ours, by name and by fields.
    """
    try:
        yield
    except OutcoreError as error:
        if isinstance(error, ShortenTraceback):  # from a call inside this one
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
    """The class that is `kind` and dynamo's, under the name of `kind`; its copies are `kind`."""

    def reduced(error: Any) -> tuple[Callable[..., OutcoreError], tuple[()]]:
        return partial(kind, **{f.name: getattr(error, f.name) for f in fields(kind)}), ()  # type: ignore[arg-type]  # each kind is a dataclass

    names = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce__": reduced}
    made: type[OutcoreError] = new_class(
        kind.__name__, (kind, ShortenTraceback), exec_body=lambda space: space.update(names)
    )
    return made
