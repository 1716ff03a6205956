"""exhausted: find out whether an error means that memory ran out."""

from __future__ import annotations

from collections.abc import Iterator

import torch

SAID = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "std::bad_alloc",
    "ALLOC_FAILED",
    "unable to find an engine",  # also if no convolution algorithm has room for its workspace
)
"""Texts in errors of torch that have no class of their own."""


def says_memory(error: BaseException) -> bool:
    """Whether this error of torch itself says that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in SAID)


def ran_out(error: BaseException | None) -> bool:
    """Whether this error, or one that it comes from, says that GPU or host memory ran out."""
    return any(isinstance(each, MemoryError) or says_memory(each) for each in causes(error))


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those that it comes from, each once: causes may form a cycle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
