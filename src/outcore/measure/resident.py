"""What the process holds on the device besides what outcore manages: read, not guessed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, compress, islice, repeat, starmap
from operator import call

import torch

from outcore.gauges import OWN_THREADS, Ledger


def resident_bytes(
    device: torch.device, besides: Iterable[torch.Tensor] = (), ledger: Ledger | None = None
) -> int:
    """Bytes in storages on `device` that live tensors hold, each storage once.

    `besides`: tensors whose storages are left out. On CUDA this is the allocator's own figure less
    those. On a CPU it is what `ledger` counts, where there is one, and then every tensor that the
    interpreter knows of is visited, and the gradients of leaves, which need not be known to it:
    while other threads live, of the leaves in `besides` alone.
    """
    # Subclasses of tensors may answer for themselves, and differently.
    with torch._C.DisableTorchFunctionSubclass():
        given = [t for t in besides if t.device == device]
        left_out = dict(_extents(given))
        if device.type == "cuda":
            return torch.cuda.memory_allocated(device) - sum(left_out.values())
        found = {a: n for a, n in _extents(_tensors(device, given)) if a not in left_out}
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


def _tensors(device: torch.device, given: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    known = [t for t in _known_tensors() if _is_real(t) and t.device == device]
    yield from known
    # One that another thread sets at that time may be gone as it is read, which ends the process:
    # torch guards nothing there. What is `given` is used by this thread.
    for tensor in known if _is_alone() else given:
        gradient = _gradient(tensor)
        if gradient is not None and _is_real(gradient):
            yield gradient


def _is_alone() -> bool:
    """Whether no other thread of the interpreter could train."""
    this = threading.current_thread()
    others = (t for t in threading.enumerate() if t is not this)
    return all(thread.name.startswith(OWN_THREADS) for thread in others)


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """That of a leaf.

    A view is asked nothing: to know whether it is a leaf it may have to make its history anew,
    which fails where what it views was written to, and is not for two threads at once.
    """
    return tensor.grad if not tensor._is_view() and tensor.is_leaf else None


_is_kind = partial(type.__subclasscheck__, torch.Tensor)
"""Whether a type is that of tensors. It runs nobody's code, as torch's own answer would."""


def _known_tensors() -> list[torch.Tensor]:
    """All tensors that the collector knows of, found without a Python step per object.

    By type(), not isinstance(): proxies run code when asked for their class.
    """
    collecting = gc.isenabled()
    gc.disable()  # it would move objects between generations, and run finalizers
    try:
        return [t for generation in range(3) for t in _of_generation(generation)]
    finally:
        if collecting:
            gc.enable()


def _of_generation(generation: int) -> list[torch.Tensor]:
    """What is in a generation of the collector.

    In a single call from which no other thread gets its turn. The collector knows of tuples that a
    thread is about to make, and `tuple(...)` raises a SystemError there if somebody still holds its
    tuple when that thread goes on. So nothing but tensors is held in the end. All is listed once,
    and no `id` is asked for: auditors would hear of that, and run code. Nor does `tee` help, which
    would be on the list itself, and never freed.
    """
    lists = islice(iter(partial(gc.get_objects, generation), None), 1)
    twice = map(partial(repeat, times=2), lists)
    with_types = map(partial(map, call, (iter, partial(map, type))), twice)
    with_answers = map(partial(map, call, (iter, partial(map, _is_kind))), with_types)
    return list(chain.from_iterable(starmap(compress, with_answers)))


def _is_real(tensor: torch.Tensor) -> bool:
    """Asked first: a fake tensor that another thread is about to make can answer nothing else."""
    fake = isinstance(tensor, torch._subclasses.FakeTensor)
    return not fake and tensor.layout is torch.strided
