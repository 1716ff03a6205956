"""What the process holds on the device besides what outcore manages: read, not guessed."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, compress, islice, repeat, starmap
from operator import call
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from outcore.gauges import OWN_THREADS, Ledger
from outcore.gc_paused import gc_paused
from outcore.measure.counters import allocated_bytes

_weakly: Any = StorageWeakRef  # torch gives it no types
ALL, YOUNG = range(3), range(2)
"""Generations of the collector."""

TQDM_THREAD = "tqdm_monitor"
"""The name of one that is there once something was compiled, and trains nothing."""


def resident_bytes(
    device: torch.device,
    external: Iterable[torch.Tensor | torch.UntypedStorage] = (),
    ledger: Ledger | None = None,
    elsewhere: Elsewhere | None = None,
) -> int:
    """Bytes in storages on `device` that live tensors hold, each storage once.

    `besides`: storages that are left out, or tensors for theirs. On CUDA this is the allocator's
    own figure less those. On a CPU it is what `ledger` counts, where there is one, and then every
    tensor that the interpreter knows of is visited, and the gradients of leaves, which need not be
    known to it: while other threads live, of the leaves in `besides` alone. `elsewhere`: what was
    found so before, beside the ledger, so that few are to be visited.
    """
    # Subclasses of tensors may answer for themselves, and differently.
    with torch._C.DisableTorchFunctionSubclass():
        near = [each for each in external if each.device == device]
        left_out = dict(_extents(near))
        given = [each for each in near if isinstance(each, torch.Tensor)]
        if device.type == "cuda":
            return allocated_bytes(device) - sum(left_out.values())
        if ledger is None:
            found = {s.data_ptr(): s.nbytes() for s in _storages(_tensors(device, given, ALL))}
            return sum(n for a, n in found.items() if a not in left_out)
        counted = range(ledger.start, ledger.stop)
        held = ledger.live_bytes - sum(n for a, n in left_out.items() if a in counted)
        found = (elsewhere or Elsewhere()).extents(device, given, counted)
        return max(0, held) + sum(n for a, n in found.items() if a not in left_out)


class Elsewhere:
    """The storages on a device that tensors hold and no ledger counts, as they were found last.

    A tensor made since is young to the collector, unless that has moved some: then, and only then,
    all of the process's objects are gone through, which takes a tenth of a second in a large one.
    """

    def __init__(self) -> None:
        self._moves: object = None
        """How often the collector had moved objects to where the oldest are."""
        self._found: dict[int, Any] = {}
        """Weakly, each once."""

    def extents(
        self, device: torch.device, given: list[torch.Tensor], counted: range
    ) -> dict[int, int]:
        """Address and bytes of each storage that lies nowhere in `counted`.

        Gradients of leaves that are old and were not there before are left out: they are new
        memory, as a ledger counts it. So is, until the collector has moved something, what an old
        tensor was given for its data.
        """
        with gc_paused():
            moves = _moves()
            generations = YOUNG if moves == self._moves else ALL
            for storage in _storages(_tensors(device, given, generations)):
                if storage.data_ptr() not in counted:
                    self._found[storage._cdata] = _weakly(storage)
            self._moves = moves if moves == _moves() else None  # another thread has a collector too
        extents = {}
        for cdata, weak in list(self._found.items()):
            there: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if there is None:
                del self._found[cdata]
            elif there.data_ptr() not in counted:
                extents[there.data_ptr()] = there.nbytes()
        return extents


def _moves() -> object:
    """What changes whenever the collector moves objects to its oldest generation."""
    moving = gc.get_stats()[0 if sys.version_info >= (3, 14) else 1 :]
    return [generation["collections"] for generation in moving]


def _extents(given: Iterable[torch.Tensor | torch.UntypedStorage]) -> Iterator[tuple[int, int]]:
    """Address and bytes of each storage that has memory."""
    return ((storage.data_ptr(), storage.nbytes()) for storage in _storages(given))


def _storages(
    given: Iterable[torch.Tensor | torch.UntypedStorage],
) -> Iterator[torch.UntypedStorage]:
    """The storages that have memory."""
    for each in given:
        try:
            storage = each if isinstance(each, torch.UntypedStorage) else each.untyped_storage()
            storage.data_ptr()
        except (RuntimeError, ValueError):  # wrappers around other tensors, lazy parameters
            continue
        yield storage


def _tensors(
    device: torch.device, given: list[torch.Tensor], generations: range
) -> Iterator[torch.Tensor]:
    known = [t for t in _known_tensors(generations) if _is_real(t) and t.device == device]
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
    return all(t.name.startswith(OWN_THREADS) or t.name == TQDM_THREAD for t in others)


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """That of a leaf.

    A view is asked nothing: to know whether it is a leaf it may have to make its history anew,
    which fails where what it views was written to, and is not for two threads at once.
    """
    return tensor.grad if not tensor._is_view() and tensor.is_leaf else None


_is_kind = partial(type.__subclasscheck__, torch.Tensor)
"""Whether a type is that of tensors. It runs nobody's code, as torch's own answer would."""


def _known_tensors(generations: range) -> list[torch.Tensor]:
    """The tensors that the collector knows of, found without a Python step per object.

    By type(), not isinstance(): proxies run code when asked for their class.
    """
    with gc_paused():  # it would move objects between generations, and run finalizers
        return [t for generation in generations for t in _of_generation(generation)]


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
