"""What the process holds on the device besides what outcore manages: read, not guessed."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from itertools import compress

import torch

from outcore.gauges import Ledger


def resident_bytes(
    device: torch.device, besides: Iterable[torch.Tensor] = (), ledger: Ledger | None = None
) -> int:
    """Bytes in storages on `device` that live tensors hold, each storage once.

    `besides`: tensors whose storages are left out. On CUDA this is the allocator's own figure less
    those. On a CPU it is what `ledger` counts, where there is one, and then every tensor that the
    interpreter knows of is visited, and the gradients of leaves, which need not be known to it.
    """
    # Subclasses of tensors may answer for themselves, and differently.
    with torch._C.DisableTorchFunctionSubclass():
        left_out = dict(_extents(besides))
        if device.type == "cuda":
            return torch.cuda.memory_allocated(device) - sum(left_out.values())
        found = {a: n for a, n in _extents(_tensors(device)) if a not in left_out}
        if ledger is None:
            return sum(found.values())
        counted = range(ledger.start, ledger.stop)
        held = ledger.live_bytes - sum(n for a, n in left_out.items() if a in counted)
        return max(0, held) + sum(n for a, n in found.items() if a not in counted)


def _extents(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Address and bytes of each storage that has memory."""
    for tensor in tensors:
        try:
            storage = tensor.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()
        except (RuntimeError, ValueError):  # wrappers around other tensors, lazy parameters
            continue


def _tensors(device: torch.device) -> Iterator[torch.Tensor]:
    for tensor in _known_tensors():
        if not _is_real(tensor) or tensor.device != device:
            continue
        yield tensor
        gradient = tensor.grad if tensor.is_leaf else None
        if gradient is not None and _is_real(gradient):
            yield gradient


def _known_tensors() -> Iterator[torch.Tensor]:
    """All tensors that the collector knows of, found without a Python step per object.

    By type(), not isinstance(): proxies run code when asked for their class. By the id of the
    type: a metaclass may forbid hashing.
    """
    things = gc.get_objects()
    kinds = {id(kind): kind for kind in map(type, things)}
    wanted = {number for number, kind in kinds.items() if issubclass(kind, torch.Tensor)}
    return compress(things, map(wanted.__contains__, map(id, map(type, things))))


def _is_real(tensor: torch.Tensor) -> bool:
    """Asked first: a fake tensor that another thread is about to make can answer nothing else."""
    fake = isinstance(tensor, torch._subclasses.FakeTensor)
    return not fake and tensor.layout is torch.strided
