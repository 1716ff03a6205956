"""Visit: one forward call of a graph with its backward call, and the Interludes between calls."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from outcore.gauges import Moment
from outcore.measure import Reading
from outcore.runtime.step.call_tensors import CallTensors
from outcore.runtime.step.pause import Pause
from outcore.runtime.step.replay import Replay


class Metered(Protocol):
    """What receives the readings of a metered step: a graph."""

    def metered(self, reading: Reading, visit: Visit) -> None:
        """Take the reading of the step that `visit` belongs to."""
        ...


@dataclass(frozen=True, slots=True)
class Interlude:
    """A stretch in which no call ran and some were outstanding; ns of the wall clock."""

    start: int
    stop: int
    waiting: Mapping[weakref.ref[Any], int]
    """Graph of the outstanding calls -> their number."""
    latest: weakref.ref[Any]
    """The graph of the outstanding call that began last."""
    again: frozenset[weakref.ref[Any]]
    """Graphs with an outstanding call that has come back before (`retain_graph`)."""
    private_bytes: int
    """Bytes that the outstanding calls alone hold."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A stretch in which a call waited for a backward call; ns of the wall clock."""

    start: int
    stop: int
    away_bytes: int
    """As `Visit.away_bytes`, as it stopped."""


@dataclass(slots=True)
class Visit:
    """One forward call and its backward call. Times are ns of the wall clock; 0: not yet."""

    owner: weakref.ref[Metered]
    replay: Replay | None = None
    returns: int = 0
    """Backward calls that the engine had counted as the forward call began."""
    thread: threading.Thread = field(default_factory=threading.current_thread)
    """The thread of the forward call."""
    forward_stop: int = 0
    waits: list[Wait] = field(default_factory=list)
    """The waits for its backward call and, with `retain_graph`, for each further one."""
    backward_stop: int = 0
    """When its latest backward call ended."""
    pause: Pause | None = None
    """What was held as a timed forward call ended. None for others, and once `Observer.waited` has
    used it."""
    call_tensors: CallTensors | None = None
    """What the forward call was given and returned. None unless its ops were timed, or it met
    outstanding calls that were new."""
    work: list[tuple[Moment, Moment]] = field(default_factory=list)
    """Start and stop on the device by the driver's clock: of the forward call, then of backward
    calls."""
    ran: object = None
    """The executable that ran the latest of its backward calls."""
    left: tuple[int, tuple[int, int] | None] | None = None
    """As its forward call ended under a plan: how many forward calls had begun, and if they were
    read, the bytes that the allocator had given out, and the most at once before."""
    evicted: bool = False
    """Whether something was moved away while it waited (`Eviction`): its times do not count."""
    away_before: int = 0
    """Bytes of what calls hold that were away as the forward call ended."""
    away_bytes: int = 0
    """How much more of it is away as the latest backward call begins."""

    @property
    def once(self) -> bool:
        """Whether its backward ran exactly once so far; with `retain_graph` it may run again."""
        _, *backward = self.work
        return len(backward) == 1
