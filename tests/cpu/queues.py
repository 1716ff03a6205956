"""A device of queues for tests: as late as the events allow, and watched by vector clocks.

Ops compute on the CPU, so the compute queue has always run all that was put into it. Copies run
only once something waits for them, and in an order that no real device has. What is at either end
of a copy is known by its address, and not kept alive: a program that gives memory back, or writes
to it, before a copy is ordered before that, is told so.

A queue's clock says how far into each queue it is known to have come. Two accesses of one piece of
memory, one of them a write, race unless the later one's queue knows of the earlier one.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

P = ParamSpec("P")
R = TypeVar("R")

POISON = 0xFF
_lock = threading.RLock()


def one_at_a_time(method: Callable[P, R]) -> Callable[P, R]:
    """Workers give commands too."""

    @wraps(method)
    def locked(*args: P.args, **kwargs: P.kwargs) -> R:
        with _lock:
            return method(*args, **kwargs)

    return locked


class RaceError(AssertionError):
    """Two accesses that nothing orders."""


class Access(NamedTuple):
    """A copy's access to memory from `start` to `stop`: the `number`th command of `queue`."""

    queue: str
    number: int
    start: int
    stop: int
    writes: bool
    storage: StorageWeakRef
    host: bool
    """Whether it is the host's memory: a device keeps that until its copies are done."""


@dataclass(slots=True)
class LateEvent:
    """A place in a queue, and what that queue knew there."""

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
    """The host's end."""


class LateWait(NamedTuple):
    """A command to wait for a place in another queue."""

    number: int
    queue: str
    until: int


class LateDevice:
    """A `device.Device` in RAM."""

    compute, out, into = "compute", "out", "into"
    rounding_bytes = 64
    shares_memory = False
    notes: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.generator = torch.default_generator
        self.commands: dict[str, deque[LateCopy | LateWait]] = {
            self.out: deque(),
            self.into: deque(),
        }
        self.clocks: dict[str, dict[str, int]] = {
            q: dict.fromkeys((self.compute, self.out, self.into), 0)
            for q in (self.compute, self.out, self.into)
        }
        self.earlier: list[str] = []
        """Queues that computed before."""
        self.done = {self.out: 0, self.into: 0}
        self.accesses: list[Access] = []
        """Of copies that some queue does not know of yet."""
        self.copies = 0
        self.clocks[self.compute][self.compute] = self.computed = 1
        """Stands for what is computed from the latest copy on, which nobody tells us of."""
        self.hosts: list[StorageWeakRef] = []
        """What `host` gave."""
        self.taken: dict[int, int] = {}
        """Address of device memory -> how far the compute queue was when it was taken."""
        self.deaf = 0
        """A wait not to hear, counted from 1; for tests that want it missed."""
        self.waits = 0
        self.trims = 0
        self.scalars_on_host = False

    @property
    def stage(self) -> str:
        return self.compute

    def on(self, queue: str) -> AbstractContextManager[object]:
        assert queue == self.compute
        return nullcontext()

    def share(self, tensor: torch.Tensor, queue: str) -> None:
        """Its memory is the host's, which no queue is late with."""

    def current(self) -> str:
        return self.compute

    def switch(self, name: str) -> None:
        """Compute on a new queue, which knows of nothing, from now on."""
        self.earlier.append(self.compute)
        self.compute = name
        for clock in self.clocks.values():
            clock[name] = 0
        self.clocks[name] = dict.fromkeys(self.clocks[self.out], 0)
        self.clocks[name][name] = self.computed = 1

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
        if event.queue in (self.compute, *self.earlier):
            return
        if queue in (self.compute, *self.earlier):
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
        known = self.clocks[queue][self.compute]
        if known < (self.computed if queue == self.out else self.taken[target.data_ptr()]):
            raise RaceError(f"{ends} is not ordered after what was computed before it")
        for end in ends:
            self._check(end)
        self.accesses += ends
        tensors = zip((target, source), ends, strict=True)
        kept = tuple(memory for memory, end in tensors if end.host)
        self.commands[queue].append(LateCopy(number, ends[0], ends[1], kept))
        self.copies += 1
        self._tick(self.compute)
        self.computed = self.clocks[self.compute][self.compute]

    @one_at_a_time
    def empty(self, nbytes: int) -> torch.Tensor:
        self._tick(self.compute)
        memory = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self.taken[memory.data_ptr()] = self.clocks[self.compute][self.compute]
        return memory

    def holds(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.dim()) or not self.scalars_on_host

    def trim(self) -> None:
        self.trims += 1

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
        if queue != self.compute:
            self._run(queue, self.clocks[queue][queue])
        for clock in self.clocks.values():  # the host waited, and gives all commands to come
            _learn(clock, self.clocks[queue])
        self._forget()

    def come(self, event: LateEvent) -> bool:
        return event.queue == self.compute

    @one_at_a_time
    def attend(self, event: LateEvent) -> None:
        self._run(event.queue, event.number)
        # Who waited may give memory back that was copied to. That a copy away is waited for by the
        # compute queue too is still to be seen.
        self.accesses = [
            a for a in self.accesses if a.queue != self.into or event.clock[a.queue] < a.number
        ]

    def seconds(self, start: LateEvent, stop: LateEvent) -> float:
        assert start.timed
        assert stop.timed
        return 1e-6

    @one_at_a_time
    def check_given_back(self) -> None:
        """Raise RaceError where memory is gone that a copy may still touch."""
        for access in self.accesses:
            computing = (self.clocks[q] for q in (self.compute, *self.earlier))
            known = any(clock[access.queue] >= access.number for clock in computing)
            if access.storage.expired() and not (known or access.host):
                raise RaceError(f"memory given back before {access}")

    def _forget(self) -> None:
        """Drop the accesses that every queue knows of, and those whose memory is gone."""
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

    def _access(self, queue: str, number: int, memory: torch.Tensor, *, writes: bool) -> Access:
        start, weak = memory.data_ptr(), StorageWeakRef(memory.untyped_storage())
        self.hosts = [host for host in self.hosts if not host.expired()]
        host = any(host.cdata == weak.cdata for host in self.hosts)
        return Access(queue, number, start, start + memory.nbytes, writes, weak, host)

    def _run(self, queue: str, until: int) -> None:
        """Run the commands of `queue` up to number `until`, and before them what they wait for."""
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
    """Let `clock` know what `other` knows."""
    for queue, number in other.items():
        clock[queue] = max(clock[queue], number)
