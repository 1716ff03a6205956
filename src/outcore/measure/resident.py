"""resident: find out how many bytes the tensors of this process hold on a device."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, compress, islice, repeat, starmap, takewhile
from operator import call, is_not
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from outcore.gauges import OWN_THREADS, Ledger
from outcore.gc_paused import gc_paused
from outcore.measure.counters import allocated_bytes

_weakly: Any = StorageWeakRef  # torch has no types for it
ALL, YOUNG, OLDEST = range(3), range(2), 2
"""Generations of the garbage collector."""

COMPRESSED = torch.sparse_csr, torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc
"""Layouts of sparse tensors: first those compressed by row, then those by column."""

TQDM_THREAD = "tqdm_monitor"
"""The name of a thread that exists once something was compiled, and does not train."""


def resident_bytes(
    device: torch.device,
    excluded: Iterable[torch.Tensor | torch.UntypedStorage] = (),
    ledger: Ledger | None = None,
    elsewhere: Elsewhere | None = None,
) -> int:
    """Bytes of the storages on `device` that live tensors hold, each storage counted once.

    `excluded`: storages to leave out, or tensors whose storages to leave out.

    On CUDA this is the allocator's figure without those of them that it counts. On a CPU it is what
    `ledger` counts, if given, plus the tensors that the interpreter knows of and the ledger does
    not count, plus gradients of leaves, which the interpreter may not know of. While other threads
    live, only gradients of leaves in `excluded` are read.

    `elsewhere`: remembers what was found outside the ledger, so that few objects need to be
    visited.
    """
    # Subclasses of tensors may override what is called here, and answer differently.
    with torch._C.DisableTorchFunctionSubclass():
        near = [each for each in excluded if each.device == device]
        if device.type == "cuda":
            return max(0, allocated_bytes(device) - _allocators_bytes(near))
        left_out = dict(_extents(near))
        given = [each for each in near if isinstance(each, torch.Tensor)]
        if ledger is None:
            tensors = _tensors(device, given, _known_tensors(ALL))
            found = {s.data_ptr(): s.nbytes() for s in _storages(tensors)}
            return sum(n for a, n in found.items() if a not in left_out)
        counted = range(ledger.start, ledger.stop)
        held = ledger.live_bytes - sum(n for a, n in left_out.items() if a in counted)
        found = (elsewhere or Elsewhere()).extents(device, given, counted)
        hidden = ledger.elsewhere_bytes(found.keys() | left_out.keys())
        return max(0, held) + hidden + sum(n for a, n in found.items() if a not in left_out)


def frozen_objects() -> int:
    """How many objects `gc.freeze` has hidden: tensors among them cannot be found."""
    return gc.get_freeze_count()


class Elsewhere:
    """The storages on a device that tensors hold and no ledger counts, as last found.

    A new tensor is in a young generation of the garbage collector, unless the collector has moved
    objects to the oldest one. It appends them there, so they follow what was there at the last
    visit. Collections of the oldest generation change its order, and `gc.unfreeze` puts old objects
    behind new ones. After these, all objects of the process are visited, which takes a tenth of a
    second in a large one.
    """

    def __init__(self) -> None:
        self._moves = Moves()
        """The collector's counts at the last visit."""
        self._anchor: torch.Tensor | None = None
        """In the oldest generation at the last visit; None: visit all objects there."""
        self._mark = _new_mark()
        """The next anchor, and the collector's counts when it was made."""
        self._found: dict[int, Any] = {}
        """Weak references to the storages, each once, by their identity."""
        self._once = self._visited = False
        """Whether this is within `at_once`, and whether objects were visited since that began."""

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """In this context no tensor comes that a ledger does not count: objects are visited once.

        What is freed meanwhile is noticed.
        """
        self._once = True
        try:
            yield
        finally:
            self._once = self._visited = False

    def extents(
        self, device: torch.device, given: list[torch.Tensor], counted: range
    ) -> dict[int, int]:
        """Address and bytes of each storage that is outside the addresses `counted`.

        This leaves out gradients of old leaves that were not there before: they are new memory, so
        a ledger counts them. It also leaves out new data that an old tensor was given, until all
        objects are visited.
        """
        with gc_paused():
            moves = _moves()
            known = [] if self._visited else self._new_tensors(moves)
            for storage in _storages(_tensors(device, given, known)):
                if storage.data_ptr() not in counted:
                    self._found[storage._cdata] = _weakly(storage)
            self._visited = self._once
        extents = {}
        for cdata, weak in list(self._found.items()):
            there: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if there is None:
                del self._found[cdata]
            elif there.data_ptr() not in counted:
                extents[there.data_ptr()] = there.nbytes()
        return extents

    def _new_tensors(self, moves: Moves) -> list[torch.Tensor]:
        """All tensors that came since the last visit, and perhaps others; `moves` are the counts.

        Call it while the collector is paused. Another thread may collect nevertheless.
        """
        mark, made = self._mark
        known = self._after_anchor(moves)
        if not any(each is mark for each in known):  # it was put before the anchor
            known, self._anchor, self._mark = _known_tensors(ALL), None, _new_mark()
        elif moves != made:  # a collection has moved it to the oldest generation
            self._anchor, self._mark = mark, _new_mark()
        self._moves = moves
        if moves != _moves():
            self._moves, self._anchor = Moves(), None
        return known

    def _after_anchor(self, moves: Moves) -> list[torch.Tensor]:
        """The tensors in young generations, and those that objects were moved to since."""
        if moves == self._moves:
            return _known_tensors(YOUNG)
        if not moves.appended_since(self._moves):
            return _known_tensors(ALL)
        return _known_tensors(YOUNG) + _of_generation(OLDEST, self._anchor)


def _new_mark() -> tuple[torch.Tensor, Moves]:
    """A tensor by which to know what is new, and the collector's counts when it was made."""
    return torch.empty(0, device="meta"), _moves()


class Moves(NamedTuple):
    """How often the collector has moved objects to its oldest generation."""

    appending: int = -1
    """By collections that append them."""
    others: tuple[int, ...] = ()
    """By collections that change the order there, and a number that `gc.freeze` changes if there
    were others since the last of these."""

    def appended_since(self, earlier: Moves) -> bool:
        """Whether objects were moved since then, and all of them follow what was there."""
        return self.appending != earlier.appending and self.others == earlier.others


def _moves() -> Moves:
    """The counts as they are now."""
    counts = [generation["collections"] for generation in gc.get_stats()]
    if sys.version_info >= (3, 14):  # each collection moves some
        return Moves(0, tuple(counts))
    return Moves(counts[1], (counts[2], counts[1] - gc.get_count()[2]))


def _extents(given: Iterable[torch.Tensor | torch.UntypedStorage]) -> Iterator[tuple[int, int]]:
    """Address and bytes of each storage that has memory."""
    return ((storage.data_ptr(), storage.nbytes()) for storage in _storages(given))


def _allocators_bytes(given: Iterable[torch.Tensor | torch.UntypedStorage]) -> int:
    """Bytes of the storages that come from torch's allocator, each counted once.

    Memory of other libraries (by DLPack, for example) and of other processes is not resizable.
    """
    own = (storage for storage in _storages(given) if storage.resizable())
    return sum(dict(_extents(own)).values())


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
    device: torch.device, given: list[torch.Tensor], known: list[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """The tensors among `known` on `device`, and gradients of leaves."""
    known = [t for t in known if _is_real(t) and t.device == device]
    for tensor in known:
        yield from _dense(tensor)
    # If another thread sets a gradient while it is read, it may be freed in between, which ends the
    # process: torch guards nothing there. Tensors that are `given` are used by this thread.
    for tensor in known if _is_alone() else given:
        gradient = _gradient(tensor)
        if gradient is not None and _is_real(gradient):
            yield from _dense(gradient)


def _is_alone() -> bool:
    """Whether no other thread of the interpreter could be training."""
    this = threading.current_thread()
    others = (t for t in threading.enumerate() if t is not this)
    return all(t.name.startswith(OWN_THREADS) or t.name == TQDM_THREAD for t in others)


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a leaf; None for other tensors.

    Views are not asked whether they are leaves. A view may then have to rebuild its history, which
    fails if its base was written to, and is not safe in two threads at once.
    """
    return tensor.grad if not tensor._is_view() and tensor.is_leaf else None


_is_kind = partial(type.__subclasscheck__, torch.Tensor)
"""Whether a type is a tensor type. Unlike torch's own check, it runs no foreign code."""


def _known_tensors(generations: range) -> list[torch.Tensor]:
    """The tensors that the collector tracks, found without a Python step per object.

    Uses type(), not isinstance(), because proxies run code when they are asked for their class.
    """
    with gc_paused():  # the collector would move objects between generations, and run finalizers
        return [t for generation in generations for t in _of_generation(generation)]


def _of_generation(generation: int, anchor: object = None) -> list[torch.Tensor]:
    """List the tensors in a generation of the collector, only those after `anchor` if it is there.

    This is a single call in which no other thread gets a turn. The collector also tracks tuples
    that a thread is still building. `tuple(...)` in that thread raises a SystemError if someone
    still holds its tuple when the thread continues. So in the end only tensors are held. All
    objects are listed once. `id` is not called, because audit hooks would be informed and run code.
    `tee` does not help: it would be on the list itself, and never freed.
    """
    lists = islice(iter(partial(gc.get_objects, generation), None), 1)
    twice: Iterator[Iterator[Any]] = map(partial(repeat, times=2), lists)
    if anchor is not None:
        before = partial(takewhile, partial(is_not, anchor))
        twice = map(partial(map, before), map(partial(map, reversed), twice))
    with_types = map(partial(map, call, (iter, partial(map, type))), twice)
    with_answers = map(partial(map, call, (iter, partial(map, _is_kind))), with_types)
    return list(chain.from_iterable(starmap(compress, with_answers)))


def _is_real(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has memory of its own: it is strided or sparse, and not fake.

    Checked first, because a fake tensor that another thread is still making can answer nothing
    else.
    """
    fake = isinstance(tensor, torch._subclasses.FakeTensor)
    return not fake and tensor.layout in (torch.strided, torch.sparse_coo, *COMPRESSED)


def _dense(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The strided tensors whose memory `tensor` has: itself, or what it is made of."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    alone = tensor.detach()  # its values have no history
    if tensor.layout in COMPRESSED[:2]:
        return alone.crow_indices(), alone.col_indices(), alone.values()
    return alone.ccol_indices(), alone.row_indices(), alone.values()
