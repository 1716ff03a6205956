"""ran_out: whether an error says that there is no memory left."""

from __future__ import annotations

import torch

SAID = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "std::bad_alloc",
    "ALLOC_FAILED",
    "unable to find an engine",  # cuDNN has tried all, and none found room for its workspace
)
"""What errors of torch say that have no class of their own."""


def ran_out(error: BaseException | None) -> bool:
    """Whether memory ran out, of a GPU or of the host, here or in what this error comes from."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(said in str(error) for said in SAID):
            return True
        error = error.__cause__ or error.__context__
    return False
