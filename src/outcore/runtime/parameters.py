"""parameters: record which of a model's parameters graphs were given, whether planned or not."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses import FakeTensor


class Parameters:
    """The parameters that graphs of one Backend were captured with, or called with.

    Calls count while there are `lookers`: torch may run the code that it compiled for one layer for
    all identical ones, so captures do not show all parameters.
    """

    def __init__(self) -> None:
        self.ids: set[int] | None = set()
        """`id` of each such parameter that is alive. None: torch gave the backend other tensors in
        their place, as when DistributedDataParallel splits graphs."""
        self.lookers: weakref.WeakSet[object] = weakref.WeakSet()
        """Objects that want parameters of calls to be recorded too."""

    def forget(self, ids: Iterable[int]) -> None:
        """Forget the parameters with these ids: the graphs that had them run no more."""
        if self.ids is not None:
            self.ids.difference_update(ids)

    def take(self, given: Iterable[Any]) -> None:
        """Record the parameters among what a graph is given."""
        for each in given:
            if not isinstance(each, torch.nn.Parameter) or self.ids is None:
                continue
            if isinstance(each, FakeTensor):
                self.ids = None
            elif id(each) not in self.ids:
                self.ids.add(id(each))
                weakref.finalize(each, self.ids.discard, id(each)).atexit = False
