"""exhausted: find out whether an error means that memory ran out."""

from __future__ import annotations

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
    while error is not None:
        if isinstance(error, MemoryError) or says_memory(error):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
