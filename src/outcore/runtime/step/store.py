"""Store: holds what one forward call leaves for its backward call.

A number in the stand-in tensor, which autograd saves, names the store. The store dies with that
tensor's storage, that is, with its autograd graph, whether or not backward ran.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import torch

from outcore.capture.compiler.stand_in import Name, name, number_of, stand_in
from outcore.errors import StepError
from outcore.execute import Executable, Lane
from outcore.ir.hardware import Tier
from outcore.runtime.step.visit import Visit

Owner: TypeAlias = weakref.ref[Any]
"""The graph of a forward call, weakly."""

_numbers = count()


class MovedTensors(NamedTuple):
    """Tensors of a waiting call that were moved to an outer tier until it comes back."""

    lane: Lane
    """Holds them. Its regions are numbered as `positions`."""
    positions: tuple[int, ...]
    """Where they belong in `Store.crossing`, which has None there meanwhile."""
    tier: Tier
    nbytes: int
    """What they held."""


@dataclass(slots=True)
class Store:
    """What crosses from one forward call to its backward call, and what runs the latter.

    `visit`: the record of the two calls. `lane`: what the copies go through. `crossing`: the
    tensors and other values that backward gets. `versions`: for each of these how often that tensor
    may have been written as the backward call begins; None where `versions_of` has it.
    `queue`: what the forward call computed on (`Driver.queue`). `runner`: what runs the backward
    call, if that may be dropped before (`BySize`).
    """

    visit: Visit
    executable: Executable
    lane: Lane
    crossing: list[Any]
    versions: list[range | None] = field(default_factory=list)
    queue: object = None
    number: int = field(default_factory=lambda: next(_numbers))
    runner: Any = None
    call: Any = None
    """What `ByGradients` notes of the forward call."""
    draws: Any = None
    """The generator's states before and after the forward call, if that may have to run again."""
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    """That of the forward call."""
    away: list[MovedTensors] = field(default_factory=list)
    """What was moved out of `crossing`, to make room for another call (`Eviction`)."""

    def check_versions(self) -> None:
        """Raise StepError if something that backward will read was overwritten since."""
        for tensor, version in zip(self.crossing, self.versions, strict=True):
            if version is not None and tensor._version not in version:
                shape = tuple(tensor.shape)
                raise StepError(
                    reason=f"a tensor of shape {shape} that backward reads was changed in place "
                    f"after forward (version {version[-1]} -> {tensor._version}). Change it after "
                    "backward, or change a copy. If plain PyTorch allows it, the plan recomputes "
                    'from this tensor: use a policy that does not, such as policy="swap-all"'
                )

    @property
    def private_bytes(self) -> int:
        """Bytes that only this call holds; 0 once backward has taken the crossing."""
        return self.executable.private_bytes - self.away_bytes if self.crossing else 0

    @property
    def away_bytes(self) -> int:
        """Bytes that were moved away."""
        return sum(each.nbytes for each in self.away)

    def fetch(self) -> None:
        """Bring back what was moved away: the call comes back. Raises SpillError if that fails.

        On a device with queues this must be called on `queue`, as whatever the call computes.
        """
        while self.away:
            lane, positions = self.away[0].lane, self.away[0].positions
            copies = [lane.copy_in(region) for region in range(len(positions))]
            for position, (tensor, handle) in zip(positions, copies, strict=True):
                lane.wait(handle)
                self.crossing[position] = tensor
            lane.close()
            del self.away[0]

    def release(self) -> None:
        """Drop everything held, if that was not done before. Any thread may call it."""
        self.lane.close()  # first, so that no copy holds what is freed below
        for each in self.away:
            each.lane.close()
        self.crossing.clear()
        self.versions.clear()
        self.runner = self.call = None


class Stores:
    """The stores of the outstanding forward calls."""

    def __init__(self) -> None:
        self._live: dict[int, Store] = {}
        self._calls: dict[Owner, dict[int, Store]] = {}
        """The same stores by graph. A graph may have none: finalizers drop stores at any time."""
        self._names: dict[int, weakref.ref[Name]] = {}
        """What watches the stand-ins of stores. A dropped store needs no watching: in a callback,
        Python would drop an interrupt."""
        self._put_away = False
        """Whether anything was ever moved away."""
        self._waiting: list[Callable[[], object]] = []
        """What is called once there is no store."""

    def __len__(self) -> int:
        """Number of outstanding forward calls."""
        return len(self._live)

    def __contains__(self, number: int) -> bool:
        """Whether the store with this number still exists."""
        return number in self._live

    def all(self) -> list[Store]:
        """All stores, oldest first."""
        return list(self._live.values())

    def counts(self) -> dict[Any, int]:
        """Live graph -> number of its outstanding calls, for graphs with any."""
        found = ((each(), self._living(calls)) for each, calls in list(self._calls.items()))
        return {owner: len(calls) for owner, calls in found if calls and owner is not None}

    def of(self, owner: Any) -> list[Store]:
        """The stores of one graph, oldest first."""
        return self._living(self._calls.get(weakref.ref(owner), {}))

    def external(self, owner: Any) -> list[Store]:
        """The stores of all other live graphs."""
        calls = ((each(), calls) for each, calls in list(self._calls.items()))
        others = (c for each, c in calls if each is not None and each is not owner)
        return [store for each in others for store in self._living(each)]

    def _living(self, calls: dict[int, Store]) -> list[Store]:
        """Those of one graph's stores that exist: an interrupt may have left others (`drop`)."""
        return [store for number, store in list(calls.items()) if number in self._live]

    def away_bytes(self) -> int:
        """Bytes of all stores that were moved away."""
        return sum(store.away_bytes for store in self.all()) if self._put_away else 0

    def add(self, store: Store, *, follow: bool) -> torch.Tensor:
        """Keep `store`; returns the stand-in that names it.

        `follow`: the store dies with the stand-in. Otherwise it lives until its backward ran,
        because saved-tensor hooks of the user may replace the stand-in.
        """
        memory = name(store.number)
        if sum(map(len, list(self._calls.values()))) != len(self._live):
            self._release_lost()
        if not self._live:
            self._calls.clear()
        if follow:  # first: what an interrupt leaves of the rest is found, or was never there
            drop = partial(self._orphan, store.number)
            self._names[store.number] = weakref.ref(memory, drop)
        self._calls.setdefault(store.visit.owner, {})[store.number] = store
        self._live[store.number] = store
        return stand_in(memory)

    def put_away(self, store: Store, away: MovedTensors) -> None:
        """Drop from `store` what was moved away, until it is fetched."""
        store.away.append(away)
        store.visit.evicted = self._put_away = True
        with contextlib.suppress(IndexError):  # another thread's finalizer may have emptied it
            for position in away.positions:
                store.crossing[position] = store.versions[position] = None
        if store.number not in self._live:
            away.lane.close()

    def find(self, saved: torch.Tensor) -> Store:
        """The store that a saved stand-in names. Raises StepError if it is gone, or not named."""
        number = number_of(saved)
        if number is None:
            raise StepError(
                reason="a saved-tensor hook changed a tensor that outcore saves (uint8, 96 "
                "elements), so it cannot tell which forward call this backward call belongs to: "
                "let the hook change tensors of floating-point numbers only"
            )
        store = self._live.get(number)
        if store is None:
            raise StepError(
                reason="backward through a graph whose saved data was freed: an earlier backward "
                "call ran without retain_graph=True, or a hook on a saved tensor replaced it"
            )
        return store

    def drop(self, number: int) -> None:
        """Release a store, if it still exists."""
        store = self._live.pop(number, None)
        self._names.pop(number, None)
        if store is not None:
            self._release(self._calls.get(store.visit.owner, {}), number)
            self._wake()

    def once_empty(self, call: Callable[[], object]) -> None:
        """Call `call` once no forward call is outstanding; perhaps from a finalizer."""
        self._waiting.append(call)
        self._wake()

    def _wake(self) -> None:
        while self._waiting and not self._live:
            with contextlib.suppress(IndexError):  # another thread may have taken the last one
                self._waiting.pop()()

    def _release_lost(self) -> None:
        """Release those that an interrupt left half dropped."""
        for calls in list(self._calls.values()):
            for number in [number for number in list(calls) if number not in self._live]:
                self._release(calls, number)

    def _release(self, calls: dict[int, Store], number: int) -> None:
        """Release a store of one graph's `calls`, unless another thread has taken it from there."""
        store = calls.pop(number, None)
        if store is not None:
            store.release()

    def _orphan(self, number: int, _: object) -> None:
        """Drop a store whose stand-in died, unless the program ends: its device may be gone."""
        if not sys.is_finalizing():
            self.drop(number)
