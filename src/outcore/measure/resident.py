"""What the process holds on the device besides what outcore manages: read, not guessed."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import torch


def resident_bytes(device: torch.device, besides: Iterable[torch.Tensor] = ()) -> int:
    """Bytes in storages on `device` that live tensors hold, each storage once.

    `besides`: tensors whose storages are left out. On CUDA this is the allocator's own figure less
    those; on a CPU no allocator keeps count, so every tensor the interpreter knows of is visited,
    and the gradients of leaves, which need not be known to it.
    """
    seen = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in besides}
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) - sum(seen.values())
    held = 0
    for tensor in _tensors(device):
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen[storage._cdata] = storage.nbytes()
            held += storage.nbytes()
    return held


def _tensors(device: torch.device) -> Iterator[torch.Tensor]:
    for thing in gc.get_objects():
        # type(), not isinstance(): proxies run code when asked for their class.
        if not issubclass(type(thing), torch.Tensor) or thing.device != device:
            continue
        if _has_storage(thing):
            yield thing
        gradient = thing.grad if thing.is_leaf else None
        if gradient is not None and _has_storage(gradient):
            yield gradient


def _has_storage(tensor: torch.Tensor) -> bool:
    fake = isinstance(tensor, torch._subclasses.FakeTensor)
    return not fake and tensor.layout is torch.strided
