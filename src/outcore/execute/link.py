"""link: one worker thread per direction moves bytes between memory and the spill file.

Each direction has one queue. What must happen after all copies issued so far (a lane's room is
free, the file may be closed) is a barrier that passes through both queues in turn. Whoever issues
one need not wait for it. Copies can be called off until a worker begins with them.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from queue import SimpleQueue
from typing import Final, Protocol, TypeAlias

import torch

from outcore.execute.disk import FILE_BLOCK_BYTES, SpillFile, new_bounce
from outcore.execute.driver import CopySpan, Direction, Recorder, Region
from outcore.execute.folders import in_memory
from outcore.gauges import OWN_THREADS

CHUNK_BYTES: Final = 8 << 20
"""One call to the kernel. Measured: from 4 MiB on, larger chunks are no faster."""

SPILLS_TO_MEMORY = (
    "outcore: the spill folder {folder} lies in memory, so what is offloaded there frees none; "
    "choose one on a disk with spill_dir or OUTCORE_SPILL_DIR"
)

_THROTTLED_CHUNK_SECONDS = 0.02
_THROTTLE_CREDIT_SECONDS = 0.05


class Throttle:
    """One direction of a link of `bytes_per_second`; None: as fast as it goes.

    Keeps the time at which an ideal link would have moved all bytes so far, and sleeps until then.
    A sleep that took too long is made up for, up to the credit; time without copies is not.
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

    def begin(self, ready_seconds: float) -> None:
        """Start a copy that could have started at `ready_seconds`, had the link been free."""
        self._due = max(self._due, ready_seconds)

    def moved(self, nbytes: int) -> None:
        """Count `nbytes`; return no sooner than the link would have moved them."""
        if self.bytes_per_second is None:
            return
        now = self._clock()
        self._due = max(self._due, now - _THROTTLE_CREDIT_SECONDS) + nbytes / self.bytes_per_second
        if self._due > now:
            self._sleep(self._due - now)


class Room(Protocol):
    """What a copy asks of the lane it belongs to."""

    @property
    def file(self) -> SpillFile:
        """The file that the lane's regions lie in."""
        ...

    @property
    def regions(self) -> Mapping[int, Region]:
        """The lane's regions by their keys."""
        ...

    @property
    def recorder(self) -> Recorder | None:
        """Who wants to hear of finished copies."""
        ...

    def offset(self, region: int) -> int:
        """Where `region` lies in the file."""
        ...

    def check_open(self) -> None:
        """Raise CancelledError where nobody can be interested in the copy any more."""
        ...


class Copy:
    """A copy issued: the job of a worker, and the handle that a lane gives out."""

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
    )

    def __init__(
        self,
        lane: Room,
        direction: Direction,
        region: int,
        address: int,
        kept: torch.Tensor | torch.UntypedStorage,
        after: tuple[Copy, ...],
    ) -> None:
        self.lane: Room | None = lane
        self.direction, self.region, self.address = direction, region, address
        self.kept: torch.Tensor | torch.UntypedStorage | None = kept
        """Keeps the memory at `address` alive until the copy is done."""
        self.after = after
        self.ready_seconds = time.perf_counter()
        """When it was issued; once done, when that was."""
        self.error: Exception | None = None
        self.done = threading.Lock()
        """Held until the copy is done."""
        self.done.acquire()
        self._unclaimed = [True]
        """Emptied by who runs it, or calls it off: one `pop` succeeds."""

    def run(self, bounce: memoryview, throttle: Throttle) -> None:
        """Copy, on a worker thread; what goes wrong is kept for whoever waits."""
        if not self._claimed():
            return
        try:
            self._move(bounce, throttle)
        except Exception as error:  # noqa: BLE001 - the lane's `wait` raises it
            self.error = error.with_traceback(None)  # its frames lead back here
        self._end()

    def call_off(self) -> None:
        """Do not copy, unless a worker has begun. Its memory is then free on this thread."""
        if self._claimed():
            self.error = dropped()
            self._end()

    def _claimed(self) -> bool:
        try:
            return self._unclaimed.pop()
        except IndexError:
            return False

    def _end(self) -> None:
        # Before `done`: from then on the compute thread counts on its `del` to free the memory.
        self.lane = self.kept = None
        self.after = ()
        self.ready_seconds = time.perf_counter()
        self.done.release()

    def _move(self, bounce: memoryview, throttle: Throttle) -> None:
        lane = self.lane
        assert lane is not None  # noqa: S101 - a copy runs once
        for earlier in self.after:
            with earlier.done:
                pass
            if earlier.error is not None:
                raise earlier.error
            self.ready_seconds = max(self.ready_seconds, earlier.ready_seconds)
        lane.check_open()
        start = time.perf_counter()
        throttle.begin(self.ready_seconds)
        call = lane.file.write if self.direction == "out" else lane.file.read
        nbytes, offset = lane.regions[self.region].nbytes, lane.offset(self.region)
        for moved in call(self.address, nbytes, offset, bounce, throttle.chunk_bytes):
            throttle.moved(moved)
            lane.check_open()
        if lane.recorder is not None:
            stop = time.perf_counter()
            span = CopySpan(self.direction, self.region, start, stop, nbytes, id(lane))
            lane.recorder(span)


def dropped() -> CancelledError:
    """The error of a copy that nobody can be interested in any more."""
    return CancelledError("it was dropped when its lane was closed")


class Barrier:
    """Runs `action` once all that was issued before it is done. `last`: the workers end with it."""

    __slots__ = ("action", "done", "last")

    def __init__(self, action: Callable[[], None] | None = None, *, last: bool = False) -> None:
        self.action, self.last = action, last
        self.done = threading.Lock()
        self.done.acquire()

    def run(self) -> None:
        """Act, and let go who waits."""
        if self.action is not None:
            self.action()
        self.done.release()


_Queue: TypeAlias = SimpleQueue[Copy | Barrier]


def _serve(queue: _Queue, throttle: Throttle, onward: _Queue | None) -> None:
    """Run what comes, in order. Barriers go `onward`; on the last worker they run."""
    bounce = new_bounce()
    last = False
    while not last:
        job = queue.get()
        if isinstance(job, Copy):
            job.run(bounce, throttle)
        else:
            last = job.last
            job.run() if onward is None else onward.put(job)
        del job  # while waiting, hold nothing: an error's traceback leads to the driver


class Spill:
    """What a driver has from its first copy on: the file and the workers."""

    def __init__(self, spill_dir: str | os.PathLike[str] | None, rate: float | None) -> None:
        self.file = SpillFile(spill_dir)
        if in_memory(self.file.directory):
            warnings.warn(SPILLS_TO_MEMORY.format(folder=self.file.directory), stacklevel=2)
        self.closed = False
        self.pid = os.getpid()
        self.out: _Queue = SimpleQueue()
        self.into: _Queue = SimpleQueue()
        self.threads = (
            _start(f"{OWN_THREADS}out", self.out, Throttle(rate), self.into),
            _start(f"{OWN_THREADS}in", self.into, Throttle(rate), None),
        )

    def take(self, nbytes: int) -> int:
        """Room for a lane of `nbytes`. Raises `SpillError` where the disk is full."""
        offset = self.file.take_free(nbytes)
        if offset is not None:
            return offset
        self.drain()  # lanes closed a moment ago may still be on their way back
        return self.file.take(nbytes)

    def can_wait(self) -> bool:
        """Whether this thread can wait for a worker: none can for itself, nor in a fork."""
        return threading.current_thread() not in self.threads and os.getpid() == self.pid

    def drain(self) -> None:
        """Return once everything issued so far is done."""
        if not self.closed:
            barrier = Barrier()
            self.out.put(barrier)
            with barrier.done:
                pass

    def close(self) -> None:
        """Drop what waits, give up what runs, end the workers, close the file."""
        if self.closed:
            return
        self.closed = True
        if os.getpid() != self.pid:
            self.file.close()  # in a forked process, which has no such threads
            return
        self.out.put(Barrier(self.file.close, last=True))
        if self.can_wait():  # a finaliser can run on any thread
            for thread in self.threads:
                thread.join()


def _start(name: str, queue: _Queue, throttle: Throttle, onward: _Queue | None) -> threading.Thread:
    # A daemon: a program that ends without closing its driver must not hang.
    thread = threading.Thread(target=_serve, args=(queue, throttle, onward), name=name, daemon=True)
    thread.start()
    return thread
