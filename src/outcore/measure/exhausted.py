"""exhausted: whether an error says that there is no memory left."""

from __future__ import annotations

import torch

SAID = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "std::bad_alloc",
    "ALLOC_FAILED",
    "unable to find an engine",  # also where no way to convolve has room for its workspace
)
"""What errors of torch say that have no class of their own."""


def says_memory(error: BaseException) -> bool:
    """Whether this error of torch says so itself."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in SAID)


def ran_out(error: BaseException | None) -> bool:
    """Whether memory ran out, of a GPU or of the host, here or in what this error comes from."""
    while error is not None:
        if isinstance(error, MemoryError) or says_memory(error):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
