"""queues: simulate a device whose copies are as late as its events allow, and detect races.

Ops compute on the CPU at once, so a queue that computes has always run all of its commands. Copies
run only when something waits for them, in an order that no real device has. A copy knows its ends
by address and does not keep them alive. If a program frees or overwrites memory that a copy may
still use, RaceError is raised.

Each queue has a vector clock: how far it knows each queue to have come. Two accesses of the same
memory, one of them a write, race unless the later one's queue knows of the earlier one. Freed
memory is reused by the queue that it was allocated on, so that queue must know of all accesses by
then. `Watched` reports what ops access; without it, only the accesses of copies are checked.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

P = ParamSpec("P")
R = TypeVar("R")

POISON = 0xFF
_lock = threading.RLock()


def one_at_a_time(method: Callable[P, R]) -> Callable[P, R]:
    """Run `method` under a lock, because worker threads give commands too."""

    @wraps(method)
    def locked(*args: P.args, **kwargs: P.kwargs) -> R:
        with _lock:
            return method(*args, **kwargs)

    return locked


class RaceError(AssertionError):
    """Raised for two accesses that nothing orders."""


class Access(NamedTuple):
    """A copy's access to memory from `start` to `stop`: the `number`th command of `queue`."""

    queue: str
    number: int
    start: int
    stop: int
    writes: bool
    storage: StorageWeakRef
    host: bool
    """Whether this is host memory: a device keeps that alive until its copies are done."""


@dataclass(slots=True)
class LateEvent:
    """A position in a queue, and the queue's clock there."""

    timed: bool = False
    queue: str = ""
    number: int = 0
    clock: dict[str, int] = field(default_factory=dict)


class LateCopy(NamedTuple):
    """A command to move bytes."""

    number: int
    target: Access
    source: Access
    kept: tuple[torch.Tensor, ...]
    """The end in host memory, kept alive."""


class LateWait(NamedTuple):
    """A command to wait for a position in another queue."""

    number: int
    queue: str
    until: int


@dataclass(slots=True)
class Used:
    """A storage that ops touched; for each queue, the number of its last command that did."""

    storage: StorageWeakRef
    owner: str
    """The queue that it was allocated on."""
    read: dict[str, int] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)
    """Queues whose work is awaited before the memory is reused."""


class LateDevice:
    """A `device.Device` in host memory."""

    out, into, stage = "out", "into", "stage"
    rounding_bytes = 64
    shares_memory = False
    notes: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.generator = torch.default_generator
        self.compute = self.caller = "compute"
        """The current compute queue, and the one on which callers allocate."""
        self.commands: dict[str, deque[LateCopy | LateWait]] = {
            self.out: deque(),
            self.into: deque(),
        }
        queues = (self.compute, self.stage, self.out, self.into)
        self.clocks = {queue: dict.fromkeys(queues, 0) for queue in queues}
        self.accesses: list[Access] = []
        """Accesses by copies that some queue does not know of yet."""
        self.copies = 0
        self.computed: dict[str, int] = {}
        """Compute queue -> the position that stands for all it computed since the latest copy."""
        for queue in (self.compute, self.stage):
            self.clocks[queue][queue] = self.computed[queue] = 1
        self.hosts: list[StorageWeakRef] = []
        """The storages that `host` returned."""
        self.taken: dict[int, tuple[str, int]] = {}
        """Address of device memory -> the queue that it was allocated on, and its position then."""
        self.used: dict[int, Used] = {}
        """Address of torch's storage object -> what ops did with the storage."""
        self.deaf = 0
        """The number of a wait to ignore, from 1, for tests of a missing wait; 0: ignore none."""
        self.waits = 0
        self.trims = self.retried = 0
        self.scalars_on_host = False

    @contextmanager
    def on(self, queue: str) -> Iterator[None]:
        before, self.compute = self.compute, queue
        try:
            yield
        finally:
            self.compute = before

    @one_at_a_time
    def share(self, tensor: torch.Tensor, queue: str) -> None:
        used = self._use(tensor)
        used.shared.add(queue)

    def current(self) -> str:
        return self.compute

    def switch(self, name: str) -> None:
        """Compute from now on in a new queue, which knows of nothing yet."""
        self.compute = self.caller = name
        for clock in self.clocks.values():
            clock[name] = 0
        self.clocks[name] = dict.fromkeys(self.clocks[self.out], 0)
        self.clocks[name][name] = self.computed[name] = 1

    def event(self, *, timed: bool = False) -> LateEvent:
        return LateEvent(timed)

    @one_at_a_time
    def record(self, event: LateEvent, queue: str) -> None:
        self._tick(queue)
        event.queue, event.number = queue, self.clocks[queue][queue]
        event.clock = dict(self.clocks[queue])

    @one_at_a_time
    def wait(self, queue: str, event: LateEvent) -> None:
        assert event.queue, "an event that was never recorded"
        self.waits += 1
        if self.waits == self.deaf:
            return
        self._tick(queue)
        mine = self.clocks[queue]
        _learn(mine, event.clock)
        if event.queue in self.computed:
            return
        if queue in self.computed:
            self._run(event.queue, event.number)
            self._forget()
        else:
            self.commands[queue].append(LateWait(mine[queue], event.queue, event.number))

    @one_at_a_time
    def copy(self, queue: str, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.dtype == source.dtype == torch.uint8
        assert target.shape == source.shape
        self._tick(queue)
        number = self.clocks[queue][queue]
        ends = [self._access(queue, number, t, writes=t is target) for t in (target, source)]
        computing, position = self.compute, self.computed[self.compute]
        if queue == self.into:
            computing, position = self.taken[target.data_ptr()]
        if self.clocks[queue][computing] < position:
            raise RaceError(f"{ends} is not ordered after what was computed before it")
        for end, memory in zip(ends, (target, source), strict=True):
            self._check(end)
            self._check_computed(queue, self._use(memory), writes=end.writes)
        self.accesses += ends
        tensors = zip((target, source), ends, strict=True)
        kept = tuple(memory for memory, end in tensors if end.host)
        self.commands[queue].append(LateCopy(number, ends[0], ends[1], kept))
        self.copies += 1
        self._tick(self.compute)
        self.computed[self.compute] = self.clocks[self.compute][self.compute]

    @one_at_a_time
    def computes(self, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> None:
        """Record and check an op of the current queue."""
        queue = self.compute
        self._tick(queue)
        number = self.clocks[queue][queue]
        for writes, memories in ((False, read), (True, written)):
            for memory in memories:
                used = self._use(memory, queue if writes else None)
                self._check_computed(queue, used, writes=writes)
                self._check(self._access(queue, number, memory, writes=writes))
                (used.written if writes else used.read)[queue] = number

    @one_at_a_time
    def empty(self, nbytes: int) -> torch.Tensor:
        self._tick(self.compute)
        memory = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self.taken[memory.data_ptr()] = self.compute, self.clocks[self.compute][self.compute]
        self._use(memory, self.compute)
        return memory

    def holds(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.dim()) or not self.scalars_on_host

    def trim(self) -> None:
        self.trims += 1

    def retries(self) -> int:
        return self.retried

    def is_capturing(self) -> bool:
        return False

    @one_at_a_time
    def host(self, nbytes: int) -> torch.Tensor:
        memory = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self.hosts.append(StorageWeakRef(memory.untyped_storage()))
        return memory

    def shrink(self, memory: torch.Tensor, nbytes: int) -> torch.Tensor:
        assert not any(self.commands.values()), "a copy is under way"
        return memory[:nbytes].fill_(POISON)

    @one_at_a_time
    def finish(self, queue: str) -> None:
        if queue not in self.computed:
            self._run(queue, self.clocks[queue][queue])
        for clock in self.clocks.values():  # the host waited, and gives all later commands
            _learn(clock, self.clocks[queue])
        self._forget()

    def come(self, event: LateEvent) -> bool:
        return event.queue in self.computed

    @one_at_a_time
    def wait_on_host(self, event: LateEvent) -> None:
        self._run(event.queue, event.number)
        # Having waited, the host may free memory that was copied into. Copies away stay in the
        # list: the compute queue has to wait for them, too.
        self.accesses = [
            a for a in self.accesses if a.queue != self.into or event.clock[a.queue] < a.number
        ]

    def seconds(self, start: LateEvent, stop: LateEvent) -> float:
        assert start.timed
        assert stop.timed
        return 1e-6

    @one_at_a_time
    def check_given_back(self) -> None:
        """Raise RaceError if memory was freed that a copy or another queue's op may still use."""
        for access in self.accesses:
            used = self.used.get(access.storage.cdata)
            if used is None or access.host or not used.storage.expired():
                continue
            owners = used.shared | {used.owner}
            if not any(self.clocks[q][access.queue] >= access.number for q in owners):
                raise RaceError(f"memory given back before {access}")
        gone = [key for key, used in self.used.items() if used.storage.expired()]
        for used in map(self.used.pop, gone):
            self._check_computed(used.owner, used, writes=True, apart=used.shared)

    def _forget(self) -> None:
        """Drop the accesses that every queue knows of, and those whose memory was freed."""
        self.accesses = [
            a
            for a in self.accesses
            if not a.storage.expired() and any(c[a.queue] < a.number for c in self.clocks.values())
        ]

    def _tick(self, queue: str) -> None:
        self.check_given_back()
        self.clocks[queue][queue] += 1

    def _check(self, mine: Access) -> None:
        known = self.clocks[mine.queue]
        for other in self.accesses:
            apart = other.stop <= mine.start or mine.stop <= other.start
            if apart or not (mine.writes or other.writes) or known[other.queue] >= other.number:
                continue
            raise RaceError(f"nothing orders {other} and {mine}")

    def _check_computed(
        self, queue: str, used: Used, *, writes: bool, apart: Iterable[str] = ()
    ) -> None:
        """Raise RaceError if `queue` accesses a storage and does not know what ops did with it."""
        known = self.clocks[queue]
        for touched in (used.written, used.read) if writes else (used.written,):
            for other, number in touched.items():
                if known[other] < number and other not in apart:
                    raise RaceError(f"{queue} does not know of op {number} of {other}: {used}")

    def _use(self, memory: torch.Tensor, owner: str | None = None) -> Used:
        """The record of the storage of `memory`; if it is new, its queue is `owner`.

        None: the storage is a caller's.
        """
        weak = StorageWeakRef(memory.untyped_storage())
        return self.used.setdefault(weak.cdata, Used(weak, owner or self.caller))

    def _access(self, queue: str, number: int, memory: torch.Tensor, *, writes: bool) -> Access:
        start, weak = memory.data_ptr(), StorageWeakRef(memory.untyped_storage())
        self.hosts = [host for host in self.hosts if not host.expired()]
        host = any(host.cdata == weak.cdata for host in self.hosts)
        return Access(queue, number, start, start + memory.nbytes, writes, weak, host)

    def _run(self, queue: str, until: int) -> None:
        """Run the commands of `queue` up to number `until`, and first those that they wait for."""
        commands = self.commands[queue]
        while commands and commands[0].number <= until:
            command = commands.popleft()
            if isinstance(command, LateWait):
                self._run(command.queue, command.until)
            else:
                target, source = command.target, command.source
                if target.storage.expired() or source.storage.expired():
                    raise RaceError(f"memory given back before {command}")
                ctypes.memmove(target.start, source.start, target.stop - target.start)


def _learn(clock: dict[str, int], other: dict[str, int]) -> None:
    """Update `clock` with what `other` knows."""
    for queue, number in other.items():
        clock[queue] = max(clock[queue], number)


class Watched(TorchDispatchMode):
    """Reports to a device what ops access. Storages first seen in a read are the caller's."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view:
            return result
        schema = func._schema.arguments
        given = {**dict(zip((a.name for a in schema), args, strict=False)), **kwargs}
        writing = [a.name for a in schema if a.alias_info is not None and a.alias_info.is_write]
        read, written = _tensors(given), _tensors([given.get(name) for name in writing])
        known = {_place(tensor) for tensor in read}
        made = [tensor for tensor in _tensors(result) if _place(tensor) not in known]
        self.device.computes(read, [*written, *made])
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The device's tensors in `tree`; uint8 tensors are generator states, which lie on the host."""
    found = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return [tensor for tensor in found if tensor.dtype != torch.uint8]


def _place(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
