"""Store: what one forward call leaves for its backward call.

A store is named by a number in the stand-in tensor that autograd saves. It dies with that tensor's
storage, that is with its autograd graph, whether or not backward ran.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from outcore.execute import Executable, Lane
from outcore.runtime.session import Visit

_numbers = count()


@dataclass(slots=True)
class Store:
    """The crossing of one forward call, the lane its copies went through, and the way back.

    `visit`: the step it belongs to. `arguments` and `versions`: inputs that a rerun will read, and
    how often each had been written.
    """

    visit: Visit
    executable: Executable
    lane: Lane
    crossing: list[Any]
    arguments: Sequence[tuple[str, torch.Tensor]] = ()
    versions: Sequence[int] = ()
    number: int = field(default_factory=lambda: next(_numbers))

    def check_versions(self) -> None:
        """Raise RuntimeError where an input that a rerun will read was overwritten since."""
        for (name, tensor), version in zip(self.arguments, self.versions, strict=True):
            if tensor._version != version:
                raise RuntimeError(
                    f"input {name} of shape {tuple(tensor.shape)} was changed in place between "
                    f"forward and backward (version {version} -> {tensor._version}), but the plan "
                    "recomputes from it. Change it after backward, or use a policy without "
                    'recomputation, such as policy="swap-all".'
                )

    def release(self) -> None:
        """Drop everything held. Called once, from anywhere, also from a finaliser."""
        self.crossing.clear()
        self.arguments = ()
        self.lane.close()


class _Name(bytearray):
    """The memory of a stand-in: a number that can be watched.

    The tensor's storage owns it, so it lives as long as any alias of the stand-in. A weak reference
    to the tensor itself would end with the object that Python sees, which autograd may replace.
    """


class Stores:
    """The stores of forward calls whose backward is still to come."""

    def __init__(self) -> None:
        self._live: dict[int, Store] = {}

    def __len__(self) -> int:
        """How many forward calls are outstanding."""
        return len(self._live)

    def __contains__(self, number: int) -> bool:
        """Whether the store of this number is still there."""
        return number in self._live

    def owners(self) -> tuple[object, ...]:
        """The graphs of the outstanding forward calls, oldest first."""
        return tuple(store.visit.owner for store in self._live.values())

    def add(self, store: Store, *, follow: bool) -> torch.Tensor:
        """Keep `store`; returns the stand-in that names it.

        `follow`: the store dies with the stand-in. Otherwise (saved-tensor hooks of the user may
        replace the stand-in) it lives until its backward ran.
        """
        name = _Name(store.number.to_bytes(8, sys.byteorder))
        self._live[store.number] = store
        if follow:
            weakref.finalize(name, self.drop, store.number).atexit = False
        return torch.frombuffer(name, dtype=torch.int64)

    def find(self, stand_in: torch.Tensor) -> Store:
        """The store that `stand_in` names. Raises RuntimeError where it is gone."""
        number = int(stand_in.item())
        if number not in self._live:
            raise RuntimeError(
                "backward through a graph whose data is gone: it ran before without "
                "retain_graph=True, or a saved-tensor hook changed what was saved"
            )
        return self._live[number]

    def drop(self, number: int) -> None:
        """Release a store, if it is still there."""
        store = self._live.pop(number, None)
        if store is not None:
            store.release()
