"""error_passthrough: errors that a backend raises, so that dynamo does the right thing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache, partial
from types import new_class
from typing import Any

import torch

from outcore.capture.compiler.compat import (
    ShortenTraceback,
    TorchDynamoException,
    UncapturedHigherOrderOpError,
    UnsupportedFakeTensorException,
)
from outcore.errors import CaptureError, OutcoreError


@contextmanager
def passing() -> Iterator[None]:
    """Let outcore's errors reach the caller of a compiled function as what they are.

    Dynamo turns any exception of a backend into BackendCompilerFailed, except its own
    ShortenTraceback, and leaves uncompiled what raises any, if it is told to
    (`leaving_uncompiled`), except UncapturedHigherOrderOpError. So what is raised has a class that
    is all three: outcore's by name and fields, and these two.
    """
    try:
        yield
    except OutcoreError as error:
        if isinstance(error, ShortenTraceback):  # from a nested `passing`
            raise
        raise _passed(error) from None


@contextmanager
def ending_graphs(told: Callable[[CaptureError], None]) -> Iterator[None]:
    """Let dynamo leave uncompiled what AOTAutograd cannot trace, whatever error that raises.

    Dynamo does so after a few errors only; others end training. They are told to `told` first,
    which may raise what it is told.
    """
    try:
        yield
    except (OutcoreError, TorchDynamoException, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        first, *_ = str(error).splitlines() or [""]
        what = f"{type(error).__name__}: {first}"
        told(CaptureError(reason=f"torch fails to trace its gradients: {what}"))
        raise UnsupportedFakeTensorException(what) from error


def _passed(error: OutcoreError) -> OutcoreError:
    kind = _both(type(error))  # type: ignore[arg-type]  # a class can be hashed
    made = kind.__new__(kind)
    made.__dict__.update(error.__dict__, first_useful_frame=None, frame_exec_strategy=None)
    made.args = error.args
    return made


@cache
def _both(kind: type[OutcoreError]) -> type[OutcoreError]:
    """A class that is `kind` and dynamo's two, named like `kind`; its pickles are plain `kind`."""

    def reduced(error: Any) -> tuple[Callable[..., OutcoreError], tuple[()]]:
        return partial(kind, **{f.name: getattr(error, f.name) for f in fields(kind)}), ()  # type: ignore[arg-type]  # each kind is a dataclass

    names = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce__": reduced}
    made: type[OutcoreError] = new_class(
        kind.__name__,
        (kind, ShortenTraceback, UncapturedHigherOrderOpError),
        exec_body=lambda space: space.update(names),
    )
    return made
