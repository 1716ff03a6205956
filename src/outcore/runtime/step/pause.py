"""Pause: what is held between a graph's forward call and its backward call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_weakly: Any = StorageWeakRef  # torch gives it no types


@dataclass(frozen=True, slots=True)
class Storages:
    """Storages on a device, held weakly, by address."""

    found: dict[int, tuple[Any, int]]

    @property
    def live(self) -> dict[int, torch.UntypedStorage]:
        """The storages that are still alive."""
        there = {at: _there(storage) for at, (storage, _) in self.found.items()}
        return {at: storage for at, storage in there.items() if storage is not None}

    def within(self, counted: range | None) -> Storages:
        """The storages at addresses in `counted`; all if it is None."""
        if counted is None:
            return self
        return Storages({at: found for at, found in self.found.items() if at in counted})

    def there(self) -> Storages:
        """The storages that are still alive."""
        return Storages({at: self.found[at] for at in self.live})

    @property
    def expired(self) -> frozenset[int]:
        """The addresses of storages that were freed."""
        return frozenset(at for at, (storage, _) in self.found.items() if storage.expired())

    def nbytes(self, addresses: Iterable[int]) -> int:
        """The bytes of the storages at `addresses`."""
        return sum(self.found[at][1] for at in addresses)


def storages_of(tensors: Iterable[Any], device: torch.device, counted: range | None) -> Storages:
    """The storages of those tensors that are on `device`, within `counted` (addresses) if given."""
    given = (t for t in tensors if isinstance(t, torch.Tensor) and t.device == device)
    storages = (t.untyped_storage() for t in given)
    return Storages({s.data_ptr(): (_weakly(s), s.nbytes()) for s in storages}).within(counted)


def _there(weak: Any) -> torch.UntypedStorage | None:
    found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
    return found


@dataclass(frozen=True, slots=True)
class Pause:
    """What was held as a forward call ended."""

    level_bytes: int
    """All allocated bytes of the device."""
    own: Storages
    """The part of it that the call was given or returned."""

    def gone_bytes(self, level_bytes: int, tangents: Storages) -> int:
        """Bytes freed since then that were not the call's own, if `level_bytes` are allocated now.

        `tangents`: what the backward call is given.
        """
        own = self.own.nbytes(self.own.expired)
        made = tangents.nbytes(tangents.found.keys() - self.own.found.keys())
        return max(0, self.level_bytes - own + made - level_bytes)
