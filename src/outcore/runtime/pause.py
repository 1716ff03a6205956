"""Pause: what is held between a graph's forward call and its backward call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_weakly: Any = StorageWeakRef  # torch gives it no types


@dataclass(frozen=True, slots=True)
class Pause:
    """What was held when a forward call was over."""

    level_bytes: int
    """Everything on the device."""
    results: tuple[tuple[Any, int], ...]
    """The storages of the call's results there, weakly, and their bytes."""

    def gone_bytes(self, level_bytes: int) -> int:
        """What went since, but for the results themselves, where so much is held now."""
        own = sum(nbytes for storage, nbytes in self.results if storage.expired())
        return self.level_bytes - own - level_bytes


def begin_pause(level_bytes: int, results: Iterable[Any], device: torch.device) -> Pause:
    """Begin it with the results that the forward call returns."""
    tensors = [t for t in results if isinstance(t, torch.Tensor) and t.device == device]
    storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in tensors)}
    return Pause(level_bytes, tuple((_weakly(s), s.nbytes()) for s in storages.values()))
