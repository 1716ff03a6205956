"""parameters: record which of a model's parameters graphs were given, whether planned or not."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef


class Parameters:
    """The parameters that graphs of one Backend were captured with, or called with.

    Calls count while there are `lookers`: torch may run the code that it compiled for one layer for
    all identical ones, so captures do not show all parameters.
    """

    def __init__(self) -> None:
        self._given: dict[int, StorageWeakRef | None] | None = {}
        """`id` of each such parameter -> its storage, which shows whether it is alive; None if it
        has none. Weak references to the parameter itself would keep torch from swapping it."""
        self.lookers: weakref.WeakSet[object] = weakref.WeakSet()
        """Objects that want parameters of calls to be recorded too."""

    @property
    def ids(self) -> set[int] | None:
        """`id` of each such parameter that is alive.

        None: torch gave the backend other tensors in their place, as when DistributedDataParallel
        splits graphs.
        """
        if self._given is None:
            return None
        gone = [number for number, storage in [*self._given.items()] if is_gone(storage)]
        self.forget(gone)
        return {*self._given}

    def forget(self, ids: Iterable[int]) -> None:
        """Forget the parameters with these ids: the graphs that had them run no more."""
        if self._given is not None:
            for number in ids:
                self._given.pop(number, None)

    def take(self, given: Iterable[Any]) -> None:
        """Record the parameters among what a graph is given."""
        for each in given:
            if not isinstance(each, torch.nn.Parameter) or self._given is None:
                continue
            if isinstance(each, FakeTensor):
                self._given = None
            elif id(each) not in self._given or is_gone(self._given[id(each)]):
                self._given[id(each)] = storage_of(each)


def storage_of(parameter: torch.Tensor) -> StorageWeakRef | None:
    """The parameter's storage, weakly; None if it has none."""
    if parameter.layout is not torch.strided:
        return None
    return StorageWeakRef(parameter.untyped_storage())  # type: ignore[no-untyped-call]  # torch's


def is_gone(storage: StorageWeakRef | None) -> bool:
    """Whether a parameter of this storage does not exist any more."""
    return storage is not None and storage.expired()  # type: ignore[no-untyped-call]  # torch's
