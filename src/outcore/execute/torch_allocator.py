"""torch_allocator: the settings of torch's allocator of GPU memory, and how outcore extends them.

They hold for the process.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import torch
from torch._C import _accelerator_setAllocatorSettings as set_allocator

from outcore.execute.segments import (
    EXPANDABLE,
    ROUNDING,
    SPLITTING,
    asked,
    expanding,
    expands,
    is_set,
    not_expanding,
)
from outcore.gauges import note_refusal

_ask: Callable[[], str] | None
"""Returns the settings that were made last, also while the process ran; None before torch 2.13."""
try:
    from torch._C import _accelerator_getAllocatorSettings as _ask
except ImportError:
    _ask = None

_made: list[str] = []
"""The settings that outcore left in force; empty before it did."""


def settings() -> tuple[str, str]:
    """The settings in force, after the name of the variable that they may come from.

    Before torch 2.13, what others set while the process runs is not seen.
    """
    name, text = asked(os.environ)
    if _ask is not None:
        return name, _ask() or text
    return name, next(iter(_made), text)


def counts() -> bool:
    """Whether torch's own caching allocator is in use. Others do not count memory."""
    names = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")
    cached = all(os.environ.get(name) != "1" for name in names)
    return cached and torch.cuda.get_allocator_backend() == "native"


def expands_well() -> bool:
    """Whether segments are expandable, or will be (`expand`), and free memory serves any size."""
    _, text = settings()
    said = expands(text)
    return said is None or (said and not is_set(SPLITTING, text))


def expand(device: torch.device) -> None:
    """Turn on expandable segments if they work and nobody has set them.

    Warns if they do not, and about settings that are in the way.
    """
    name, text = settings()
    if not counts() or [text] == _made:
        return
    said = expands(text)
    if said is None:
        text, refusal = _tried(device, text)
        if refusal:
            _warn(
                f"this GPU's driver refuses {EXPANDABLE} ({refusal}), so they stay off. Memory is "
                "lost to fragmentation, and a step may need more than predicted"
            )
    elif not said:
        _warn(
            f"without {EXPANDABLE} in {name}, memory is lost to fragmentation, and a step may need "
            "more than predicted"
        )
    elif is_set(SPLITTING, text):
        _warn(
            f"with {SPLITTING} and {EXPANDABLE} in {name}, large free blocks serve no small "
            f"tensors: memory is lost, and torch waits for the GPU to get it back. Leave "
            f"{SPLITTING} out: expandable segments serve the same purpose"
        )
    if is_set(ROUNDING, text):
        _warn(
            f"with {ROUNDING} in {name}, blocks are larger than tensors, and a step may need more "
            "than predicted"
        )
    _made[:] = [text]


def _tried(device: torch.device, text: str) -> tuple[str, str]:
    """The settings that are in force after a trial of expandable segments, and what was refused."""
    on = expanding(text)
    set_allocator(on)
    try:
        # Not a tensor, as it would be a fake one while torch compiles; on a new stream, so that no
        # cached block serves it.
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types for it
        allocated = torch.cuda.caching_allocator_alloc(1, device, stream)
        torch.cuda.caching_allocator_delete(allocated)  # type: ignore[no-untyped-call]  # as above
        torch.cuda.empty_cache()  # also of free segments that cannot expand
    except torch.OutOfMemoryError:
        note_refusal()
        return on, ""
    except RuntimeError as error:
        off = not_expanding(text)
        set_allocator(off)
        return off, str(error).partition("\n")[0]
    return on, ""


def _warn(text: str) -> None:
    warnings.warn(f"outcore: {text}", stacklevel=4)
