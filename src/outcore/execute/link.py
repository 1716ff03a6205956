"""link: move bytes between memory and the spill file, on one worker thread per direction.

Each direction has one queue. Work that must come after all copies issued so far, such as releasing
a lane's room or closing the file, is a barrier that passes through both queues, one after the
other. The thread that issues a barrier need not wait for it. A copy can be called off until a
worker begins with it.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Final, TypeAlias
from weakref import ref

import torch

from outcore.errors import StepError
from outcore.execute.disk import FILE_BLOCK_BYTES, SpillFile, new_bounce, words
from outcore.execute.driver import CopySpan, Direction, OnCopy, Region
from outcore.execute.folders import in_memory
from outcore.gauges import OWN_THREADS
from outcore.units import format_bytes

FORKED: Final = (
    "this process was forked from the one that wrapped the model or offloaded the optimizer: wrap "
    "the model again here; use the optimizer, and read or save its state, in the parent process"
)
"""The reason of the StepError in a forked process, which has none of the workers."""

CLOSED: Final = (
    "outcore was closed while the step ran: by close or unwrap, or because the program ends"
)
"""The reason of the StepError of a step whose copies were dropped."""

CHUNK_BYTES: Final = 8 << 20
"""The most bytes that one system call moves. Measured: larger chunks than 4 MiB are no faster."""

SPILLS_TO_MEMORY = (
    "outcore: the spill folder {folder} is in memory, so offloading there frees no memory; "
    "choose one on a disk with spill_dir or OUTCORE_SPILL_DIR"
)

_THROTTLED_CHUNK_SECONDS = 0.02
"""A throttled link moves at most this much time's worth of bytes at once."""
_THROTTLE_CREDIT_SECONDS = 0.05
"""How much time a throttled link may make up for after it slept too long."""


class Throttle:
    """Limits one direction of a link to `bytes_per_second`; None: no limit.

    Keeps the time at which an ideal link would have moved all bytes so far, and sleeps until then.
    If a sleep was too long, later copies make up for it, up to a credit. Time without copies gives
    no credit.
    """

    def __init__(
        self,
        bytes_per_second: float | None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bytes_per_second = bytes_per_second
        self.chunk_bytes = CHUNK_BYTES
        """Move at most this much between two calls of `moved`."""
        if bytes_per_second is not None:
            blocks = int(bytes_per_second * _THROTTLED_CHUNK_SECONDS) // FILE_BLOCK_BYTES
            self.chunk_bytes = min(CHUNK_BYTES, max(1, blocks) * FILE_BLOCK_BYTES)
        self._clock, self._sleep = clock, sleep
        self._due = -float("inf")
        """When an ideal link would have moved all bytes so far, by `clock`."""

    def begin(self, ready_seconds: float) -> None:
        """Begin a copy that could have started at `ready_seconds` on an idle link."""
        self._due = max(self._due, ready_seconds)

    def moved(self, nbytes: int) -> None:
        """Count `nbytes`, and return no sooner than the link would have moved them."""
        if self.bytes_per_second is None:
            return
        now = self._clock()
        self._due = max(self._due, now - _THROTTLE_CREDIT_SECONDS) + nbytes / self.bytes_per_second
        if self._due > now:
            self._sleep(self._due - now)


class CopyJob:
    """One copy: the job of a worker, and the handle that a lane returns."""

    __slots__ = (
        "_unclaimed",
        "address",
        "after",
        "direction",
        "done",
        "error",
        "kept",
        "lane",
        "ready_seconds",
        "region",
        "written",
    )

    def __init__(
        self,
        lane: FileRoom,
        direction: Direction,
        region: int,
        address: int,
        kept: torch.Tensor | torch.UntypedStorage,
        after: tuple[CopyJob, ...],
    ) -> None:
        self.lane: FileRoom | None = lane
        """The lane of the copy; None once the copy is done."""
        self.direction, self.region, self.address = direction, region, address
        """`address`: of the memory that the bytes are read from or written to."""
        self.kept: torch.Tensor | torch.UntypedStorage | None = kept
        """Keeps the memory at `address` alive until the copy is done."""
        self.written: CopyJob | None = None
        """The copy that wrote what this one reads; it is over before this one begins."""
        self.after = after
        """Copies that must be done before this one begins."""
        self.ready_seconds = time.perf_counter()
        """From when on the copy could run: when it was issued, or when the last of `after` was
        done. Once it is done: when it finished."""
        self.error: Exception | None = None
        """Why the copy failed or was dropped; None otherwise."""
        self.done = threading.Lock()
        """Held until the copy is done."""
        self.done.acquire()
        self._unclaimed = [True]
        """Popped by whoever runs the copy or calls it off. Only one `pop` succeeds."""

    def run(self, bounce: memoryview, throttle: Throttle) -> None:
        """Copy, on a worker thread. An error is stored for the thread that waits."""
        if not self._claimed():
            return
        try:
            self._move(bounce, throttle)
        except Exception as error:  # noqa: BLE001 - the lane's `wait` raises it
            self.error = error.with_traceback(None)  # its frames refer to this copy
        self._end()

    def call_off(self) -> None:
        """Drop the copy, unless a worker has begun. Its memory is then freed on this thread."""
        if self._claimed():
            self.error = dropped()
            self._end()

    def _claimed(self) -> bool:
        """Whether this call is the first, so that its caller may run or drop the copy."""
        try:
            return self._unclaimed.pop()
        except IndexError:
            return False

    def _end(self) -> None:
        """Mark the copy as done."""
        # Before `done` is released: after that, the compute thread relies on its `del` to free the
        # memory.
        self.lane = self.kept = self.written = None
        self.after = ()
        self.ready_seconds = time.perf_counter()
        self.done.release()

    def _move(self, bounce: memoryview, throttle: Throttle) -> None:
        """Move the bytes once `after` is done. Raises what goes wrong."""
        lane = self.lane
        assert lane is not None  # noqa: S101 - a copy runs once
        for earlier in self.after:
            with earlier.done:
                pass
            if earlier.error is not None:
                raise earlier.error
            self.ready_seconds = max(self.ready_seconds, earlier.ready_seconds)
        lane.check_open()
        if self.written is not None and self.written.error is not None:
            raise self.written.error  # what is there is of an earlier time
        start = time.perf_counter()
        throttle.begin(self.ready_seconds)
        call = lane.file.write if self.direction == "out" else lane.file.read
        nbytes, offset = lane.regions[self.region].nbytes, lane.offset(self.region)
        for moved in call(self.address, nbytes, offset, bounce, throttle.chunk_bytes):
            throttle.moved(moved)
            lane.check_open()
        if lane.on_copy is not None:
            stop = time.perf_counter()
            span = CopySpan(self.direction, self.region, start, stop, nbytes, lane.key)
            lane.on_copy(span)


def dropped() -> CancelledError:
    """The error of a copy whose result can no longer be of use."""
    return CancelledError("it was dropped when its lane was closed")


class Barrier:
    """Runs `action` once everything issued before it is done. `last`: the workers end with it."""

    __slots__ = ("action", "done", "last")

    def __init__(self, action: Callable[[], None] | None = None, *, last: bool = False) -> None:
        self.action, self.last = action, last
        self.done = threading.Lock()
        """Held until `action` has run."""
        self.done.acquire()

    def run(self) -> None:
        """Run `action`, and release the threads that wait."""
        if self.action is not None:
            self.action()
        self.done.release()


_Queue: TypeAlias = SimpleQueue[CopyJob | Barrier]


def _serve(queue: _Queue, throttle: Throttle, onward: _Queue | None) -> None:
    """Run the jobs of one queue in order. Barriers move to `onward`; the last worker runs them."""
    bounce = new_bounce()
    last = False
    while not last:
        job = queue.get()
        if isinstance(job, CopyJob):
            job.run(bounce, throttle)
        else:
            last = job.last
            job.run() if onward is None else onward.put(job)
        del job  # hold nothing while waiting: an error's traceback refers to the driver


class Spill:
    """The spill file and its two workers, made when a driver first needs them."""

    def __init__(self, spill_dir: str | os.PathLike[str] | None, rate: float | None) -> None:
        self.file = SpillFile(spill_dir)
        if in_memory(self.file.directory):
            warnings.warn(SPILLS_TO_MEMORY.format(folder=self.file.directory), stacklevel=2)
        self.closed = False
        """Whether copies are refused; those that wait are dropped."""
        self.pid = os.getpid()
        """The process in which the workers run; a fork does not have them."""
        self.out: _Queue = SimpleQueue()
        self.into: _Queue = SimpleQueue()
        self._held: dict[ref[FileRoom], tuple[int, int]] = {}
        """Open room -> its offset and size."""
        self._leaving: set[ref[FileRoom]] = set()
        """Rooms that are given back once the copies issued so far are over."""
        self._dead: deque[ref[FileRoom]] = deque()
        """Rooms that died. Those still held were lost: an interrupt came before anyone could close
        the lane. They are noted without code of ours, in which Python would drop the next one."""
        self.threads = (
            _start(f"{OWN_THREADS}out", self.out, Throttle(rate), self.into),
            _start(f"{OWN_THREADS}in", self.into, Throttle(rate), None),
        )

    def take(self, nbytes: int) -> int:
        """Take room in the file for a lane of `nbytes`. Raises `SpillError` if the disk is full."""
        self._find_lost()
        if self._leaving and not self.file.may_grow(nbytes):
            self.drain()  # or what comes later may find free room only in pieces
        offset = self.file.take_free(nbytes)
        if offset is not None:
            return offset
        self.drain()  # the room of lanes closed just now is freed by then
        if self._find_lost():  # their copies held them until now
            self.drain()
        return self.file.take(nbytes)

    def hold(self, room: FileRoom, offset: int, nbytes: int) -> ref[FileRoom]:
        """Note that `room` has taken `nbytes` at `offset`; returns the mark for `give_back`."""
        mark = ref(room, self._dead.append)
        self._held[mark] = offset, nbytes
        return mark

    def _find_lost(self) -> bool:
        """Give back the rooms that were lost; returns whether there were any."""
        lost = [mark for mark in self._died() if mark in self._held]
        for mark in lost:
            self.give_back(mark)
        return bool(lost)

    def _died(self) -> Iterator[ref[FileRoom]]:
        with suppress(IndexError):  # another thread may have taken the last one
            while True:
                yield self._dead.popleft()

    def give_back(self, mark: ref[FileRoom]) -> None:
        """Give a room back, if it is still held, once the copies issued so far are over."""
        if mark in self._held:  # it stays there until it is given: an interrupt may come
            self._leaving.add(mark)
            self.out.put(Barrier(partial(self._give, mark)))

    def _give(self, mark: ref[FileRoom]) -> None:
        held = self._held.pop(mark, None)
        if held is not None:
            self.file.give(*held)
        self._leaving.discard(mark)

    def check_process(self) -> None:
        """Raise StepError in a forked process, where a copy would never be done."""
        if os.getpid() != self.pid:
            raise StepError(reason=FORKED)

    def can_wait(self) -> bool:
        """Whether this thread can wait for a worker: it is neither a worker nor in a fork."""
        return threading.current_thread() not in self.threads and os.getpid() == self.pid

    def put(self, copy: CopyJob) -> None:
        """Give `copy` to the worker of its direction.

        Raises SpillError if the file is closed, and StepError in a forked process.
        """
        self.check_process()
        (self.out if copy.direction == "out" else self.into).put(copy)
        # Check only now: `close` may run at any moment, on another thread or on this one (a
        # finalizer, a signal handler). What is queued after that is not served.
        if self.closed:
            copy.call_off()
            raise self.file.error("the driver is closed")

    def drain(self) -> None:
        """Return once everything issued so far is done; at once if this thread cannot wait."""
        if self.can_wait():
            barrier = Barrier()
            self.out.put(barrier)
            if not self.closed:  # check only now, as in `put`
                with barrier.done:
                    pass

    def close(self) -> None:
        """Drop waiting copies, stop running ones early, end the workers and close the file."""
        if self.closed:
            return
        self.closed = True
        if os.getpid() != self.pid:
            self.file.close()  # a forked process has no workers
            return
        self.out.put(Barrier(self.file.close, last=True))
        if self.can_wait():  # a finalizer can run on any thread
            for thread in self.threads:
                thread.join()


def _start(name: str, queue: _Queue, throttle: Throttle, onward: _Queue | None) -> threading.Thread:
    # Daemons: a program that ends without closing its driver must not hang.
    thread = threading.Thread(target=_serve, args=(queue, throttle, onward), name=name, daemon=True)
    thread.start()
    return thread


class FileRoom:
    """The room of one lane in the spill file, until it is closed."""

    __slots__ = ("__weakref__", "_base", "_mark", "_open", "_spill", "file", "regions")

    def __init__(self, spill: Spill, regions: Mapping[int, Region], base: int, nbytes: int) -> None:
        self.file, self.regions = spill.file, regions
        self._spill, self._base = spill, base
        self._open = [True]
        """Empty once the lane is closed. Only one `pop` succeeds, whichever threads try."""
        self._mark = spill.hold(self, base, nbytes)

    @property
    def key(self) -> int:
        """What `CopySpan.lane` says of this lane."""
        return id(self)

    @property
    def on_copy(self) -> OnCopy | None:
        """Called with each finished copy; None if nothing records."""
        return None

    def offset(self, region: int) -> int:
        """Where `region` begins in the file."""
        return self._base + self.regions[region].offset

    def check_open(self) -> None:
        """Raise CancelledError if the lane or the file is closed."""
        if not self._open or self._spill.closed:
            raise dropped()

    def wait(self, handle: CopyJob) -> None:
        """Return once the copy is done.

        Raises `SpillError` if it failed or was dropped, and StepError in a forked process, or if
        the file was closed meanwhile.
        """
        self._spill.check_process()
        with handle.done:
            pass
        if self._spill.closed and isinstance(handle.error, CancelledError):
            raise StepError(reason=CLOSED) from handle.error
        if handle.error is not None:
            size = format_bytes(self.regions[handle.region].nbytes)
            place = f"region {handle.region} ({size} at file offset {self.offset(handle.region)})"
            reason = f"copy {handle.direction} of {place} failed: {words(handle.error)}"
            raise self.file.error(reason) from handle.error

    def close(self) -> None:
        """End the lane's copies, and give the room back once those that run are over."""
        try:
            self._open.pop()
        except IndexError:
            return
        try:
            self._end()
        finally:  # also after an interrupt
            self._spill.give_back(self._mark)

    def _end(self) -> None:
        """Do what the first `close` does before the room is given back."""
