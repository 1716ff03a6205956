"""parameters: which of a model's parameters graphs have been given, planned or not."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses import FakeTensor


class Parameters:
    """Those that the graphs of one Backend were captured with, or called with while somebody looks.

    Torch may run what it compiled of one layer for all those alike.
    """

    def __init__(self) -> None:
        self.ids: set[int] | None = set()
        """Of those that live. None: torch gave others in their stead, as it does where
        DistributedDataParallel splits graphs."""
        self.lookers: weakref.WeakSet[object] = weakref.WeakSet()
        """Who wants to know of calls, too."""

    def take(self, given: Iterable[Any]) -> None:
        """Note what a graph is given."""
        for each in given:
            if not isinstance(each, torch.nn.Parameter) or self.ids is None:
                continue
            if isinstance(each, FakeTensor):
                self.ids = None
            elif id(each) not in self.ids:
                self.ids.add(id(each))
                weakref.finalize(each, self.ids.discard, id(each)).atexit = False
