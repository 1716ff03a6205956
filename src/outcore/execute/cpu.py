"""The CPU driver: RAM is the device, a file is the outer tier, two threads move the bytes.

Each direction has one worker thread and one queue. What must happen after all copies issued so far
(a lane's room is free, the file may be closed) is a barrier that passes through both queues in
turn. Whoever issues one need not wait for it, so a finaliser can close a lane on any thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from queue import SimpleQueue
from typing import Final, TypeAlias

import torch

from outcore.errors import SpillError, VerifyError
from outcore.execute.arena import Arena, own_arena
from outcore.execute.disk import (
    FILE_BLOCK_BYTES,
    MEMORY_ALIGNMENT_BYTES,
    SpillFile,
    new_bounce,
    region_nbytes,
    words,
)
from outcore.execute.driver import (
    CopySpan,
    Direction,
    EmptyLane,
    Lane,
    Recorder,
    Region,
    fit_link,
    lane_nbytes,
    measure_link,
)
from outcore.execute.malloc import ResidentLimit, own_malloc, resident_bytes, trim
from outcore.ir.hardware import Hardware, Tier
from outcore.units import format_bytes

COPY_IN_OVERHEAD_BYTES: Final = MEMORY_ALIGNMENT_BYTES
"""Device bytes that a tensor copied in takes besides its own, to lie where direct I/O can reach."""

CHUNK_BYTES: Final = 8 << 20
"""One call to the kernel. Measured: from 4 MiB on, larger chunks are no faster."""

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


class Copy:
    """A copy issued: the job of a worker, and the handle that a lane gives out."""

    __slots__ = (
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
        lane: CpuLane,
        direction: Direction,
        region: int,
        address: int,
        kept: torch.Tensor,
        after: tuple[Copy, ...],
    ) -> None:
        self.lane: CpuLane | None = lane
        self.direction, self.region, self.address = direction, region, address
        self.kept: torch.Tensor | None = kept
        """Keeps the memory at `address` alive until the copy is done."""
        self.after = after
        self.ready_seconds = time.perf_counter()
        """When it was issued; once done, when that was."""
        self.error: Exception | None = None
        self.done = threading.Lock()
        """Held until the copy is done."""
        self.done.acquire()

    def run(self, bounce: memoryview, throttle: Throttle) -> None:
        """Copy, on a worker thread; what goes wrong is kept for whoever waits."""
        try:
            self._move(bounce, throttle)
        except Exception as error:  # noqa: BLE001 - `CpuLane.wait` raises it
            self.error = error
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
        if lane.driver.recorder is not None:
            stop = time.perf_counter()
            lane.driver.recorder(CopySpan(self.direction, self.region, start, stop, nbytes))


class _Barrier:
    """Runs `action` once all that was issued before it is done. `last`: the workers end with it."""

    __slots__ = ("action", "done", "last")

    def __init__(self, action: Callable[[], None] | None = None, *, last: bool = False) -> None:
        self.action, self.last = action, last
        self.done = threading.Lock()
        self.done.acquire()

    def run(self) -> None:
        if self.action is not None:
            self.action()
        self.done.release()


_Queue: TypeAlias = SimpleQueue[Copy | _Barrier]


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


class _Spill:
    """What a driver has from its first copy on: the file and the workers."""

    def __init__(self, spill_dir: str | os.PathLike[str] | None, rate: float | None) -> None:
        self.file = SpillFile(spill_dir)
        self.closed = False
        self.pid = os.getpid()
        self.out: _Queue = SimpleQueue()
        self.into: _Queue = SimpleQueue()
        self.threads = (
            _start("outcore-out", self.out, Throttle(rate), self.into),
            _start("outcore-in", self.into, Throttle(rate), None),
        )

    def take(self, nbytes: int) -> int:
        """Room for a lane of `nbytes`. Raises `SpillError` where the disk is full."""
        offset = self.file.take_free(nbytes)
        if offset is not None:
            return offset
        self.drain()  # lanes closed a moment ago may still be on their way back
        return self.file.take(nbytes)

    def drain(self) -> None:
        """Return once everything issued so far is done."""
        if not self.closed:
            barrier = _Barrier()
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
        self.out.put(_Barrier(self.file.close, last=True))
        # A finaliser can run on any thread; a worker cannot wait for itself.
        if threading.current_thread() not in self.threads:
            for thread in self.threads:
                thread.join()


def _start(name: str, queue: _Queue, throttle: Throttle, onward: _Queue | None) -> threading.Thread:
    # A daemon: a program that ends without closing its driver must not hang.
    thread = threading.Thread(target=_serve, args=(queue, throttle, onward), name=name, daemon=True)
    thread.start()
    return thread


class CpuLane:
    """The room of one outstanding step in the file (`driver.Lane`)."""

    __slots__ = (
        "_base",
        "_into",
        "_open",
        "_out",
        "_residues",
        "_spill",
        "driver",
        "file",
        "regions",
    )

    def __init__(
        self,
        driver: CpuDriver,
        spill: _Spill,
        regions: Mapping[int, Region],
        base: int,
        nbytes: int,
    ) -> None:
        self.driver, self.file, self.regions = driver, spill.file, regions
        self._base, self._spill = base, spill
        self._out, self._into = spill.out.put, spill.into.put
        self._residues: dict[int, int] = {}
        """Region -> how far from an aligned address the storage lay that was copied to it."""
        self._open = [nbytes]
        """Emptied by `close`: one `pop` succeeds, whichever threads try."""

    def copy_out(self, tensor: torch.Tensor, region: int, *after: Copy) -> Copy:
        """Start copying the storage of `tensor` to `region` once all of `after` are done."""
        storage = tensor.untyped_storage()
        if storage.nbytes() < self.regions[region].nbytes:
            raise self._too_small(storage.nbytes(), region)
        self.driver.check_resident()
        address = storage.data_ptr()
        self._residues[region] = address % MEMORY_ALIGNMENT_BYTES
        copy = Copy(self, "out", region, address, tensor, after)
        self._issue(copy, self._out)
        return copy

    def copy_in(self, region: int, *after: Copy) -> tuple[torch.Tensor, Copy]:
        """Take memory for the root tensor of `region`; start filling it once `after` are done."""
        if region not in self._residues:
            raise VerifyError(noun="program", rule="written before read", where=f"region {region}")
        self.driver.check_resident()
        tensor = _empty(self.regions[region], self._residues[region])
        copy = Copy(self, "in", region, tensor.data_ptr(), tensor, after)
        self._issue(copy, self._into)
        return tensor, copy

    def wait(self, handle: Copy) -> None:
        """Return once the copy is done. Raises `SpillError` where it failed or was dropped."""
        with handle.done:
            pass
        if handle.error is not None:
            raise self._failed(handle, handle.error) from handle.error

    def discard(self, tensor: torch.Tensor) -> None:
        """Nothing to do: memory is given back by the last reference."""

    def close(self) -> None:
        """Give the room back once what runs has ended; what has not begun is dropped."""
        try:
            nbytes = self._open.pop()
        except IndexError:
            return
        base, file = self._base, self.file
        self._out(_Barrier(lambda: file.give(base, nbytes)))

    def offset(self, region: int) -> int:
        """Where `region` lies in the file."""
        return self._base + self.regions[region].offset

    def check_open(self) -> None:
        """Raise CancelledError where nobody can be interested in the copies of this lane."""
        if not self._open or self._spill.closed:
            raise CancelledError("it was dropped when its lane was closed")

    def _issue(self, copy: Copy, put: Callable[[Copy], None]) -> None:
        if self._spill.closed:
            raise self.file.error("the driver is closed")
        put(copy)

    def _failed(self, copy: Copy, error: Exception) -> SpillError:
        size = format_bytes(self.regions[copy.region].nbytes)
        place = f"region {copy.region} ({size} at file offset {self.offset(copy.region)})"
        return self.file.error(f"copy {copy.direction} of {place} failed: {words(error)}")

    def _too_small(self, nbytes: int, region: int) -> VerifyError:
        detail = f"{nbytes} bytes for a region of {self.regions[region].nbytes}"
        rule = "a storage has the bytes of its buffer"
        return VerifyError(noun="program", rule=rule, where=f"region {region}", detail=detail)


def _empty(region: Region, residue: int) -> torch.Tensor:
    """A root tensor whose storage has the region's bytes, and begins at an address of `residue`."""
    memory = torch.empty(region.nbytes + COPY_IN_OVERHEAD_BYTES, dtype=torch.uint8)
    start = (residue - memory.data_ptr()) % MEMORY_ALIGNMENT_BYTES
    # By way of numpy: a torch view would share the whole storage and have an offset in it.
    storage = torch.from_numpy(memory.numpy()[start : start + region.nbytes])
    return storage.view(region.dtype).as_strided(region.shape, region.stride)


class CpuDriver:
    """RAM as the device, a file in `spill_dir` as the outer tier (`driver.Driver`).

    `link_bytes_per_second` slows each direction down to that rate; None: as fast as the disk. The
    file and the threads are made when first needed, which is when a `spill_dir` that is missing,
    unwritable or full raises `SpillError`. Closed when collected, or at the end of the program.
    """

    def __init__(
        self,
        spill_dir: str | os.PathLike[str] | None = None,
        link_bytes_per_second: float | None = None,
    ) -> None:
        self.generator = torch.default_generator
        self.malloc = own_malloc()
        self.arena = own_arena()
        self.recorder: Recorder | None = None
        self._resident_limit: ResidentLimit | None = None
        self._spill_dir, self._rate = spill_dir, link_bytes_per_second
        self._spill: _Spill | None = None
        self._finalizer: weakref.finalize[[], CpuDriver] | None = None
        self._closed = False
        self._lock = threading.Lock()

    def hardware(self, budget_bytes: int, disk_budget_bytes: int) -> Hardware:
        """RAM and disk with links as measured now (a fraction of a second)."""
        # The trial needs memory too: twice its largest size.
        tables = measure_link(self, largest_nbytes=budget_bytes // 16)
        return Hardware(
            name="this-machine",
            capacity_bytes=((Tier.DEVICE, budget_bytes), (Tier.DISK, disk_budget_bytes)),
            links=(
                (Tier.DEVICE, Tier.DISK, fit_link(tables.copy_out)),
                (Tier.DISK, Tier.DEVICE, fit_link(tables.copy_in)),
            ),
            duplex=tables.duplex,
            rounding_bytes=((Tier.DISK, FILE_BLOCK_BYTES),),
            fetch_padding_bytes=COPY_IN_OVERHEAD_BYTES,
        )

    def reserve(self, nbytes: int) -> None:
        """Take the disk space of a lane of `nbytes` now. Raises `SpillError` where it is full."""
        if nbytes:
            spill = self._ready()
            nbytes = region_nbytes(nbytes)
            spill.file.give(spill.take(nbytes), nbytes)

    def open_lane(self, regions: Mapping[int, Region]) -> Lane:
        """A lane of `regions`, at offsets that are multiples of `FILE_BLOCK_BYTES`.

        Raises `SpillError` where the disk has no room for one more.
        """
        if not regions:
            return EmptyLane()
        spill = self._ready()
        nbytes = max(FILE_BLOCK_BYTES, lane_nbytes(regions, region_nbytes))
        return CpuLane(self, spill, regions, spill.take(nbytes), nbytes)

    def record(self, recorder: Recorder | None) -> None:
        """Report every copy from now on to `recorder`, called on the worker threads."""
        self.recorder = recorder

    def bound_memory(self, held_bytes: int, budget_bytes: int | None) -> None:
        """Bound resident memory by the budget and what the process takes besides its tensors.

        The arena does so by itself: it only has to forget what was in use before. Where there is no
        arena, and resident memory cannot be read, there is no bound.
        """
        if budget_bytes is None:
            self.limit_resident(None)
            return
        trim()
        if isinstance(self.arena, Arena):
            self.arena.trim()
            return
        with contextlib.suppress(OSError):
            besides = max(0, resident_bytes() - held_bytes)
            self.limit_resident(besides + budget_bytes)

    def limit_resident(self, nbytes: int | None) -> None:
        """Give free memory back whenever a copy is issued with more than `nbytes` resident.

        Of the whole process, by way of `malloc_trim`; None: keep it for speed (see `malloc.py`).
        Raises OSError where resident memory cannot be read.
        """
        self._resident_limit = None if nbytes is None else ResidentLimit(nbytes)

    def check_resident(self) -> None:
        """Give free memory back if there is a limit and it is passed."""
        if self._resident_limit is not None:
            self._resident_limit.check()

    def drain(self) -> None:
        """Return once every copy issued so far is done."""
        if self._spill is not None:
            self._spill.drain()

    def close(self) -> None:
        """Drop what is under way, end the threads, give the disk space back."""
        self._closed = True
        if self._finalizer is not None:
            self._finalizer()

    def _ready(self) -> _Spill:
        with self._lock:
            if self._spill is None and not self._closed:
                self._spill = _Spill(self._spill_dir, self._rate)
                self._finalizer = weakref.finalize(self, self._spill.close)
        if self._spill is None or self._closed:
            directory = str(self._spill_dir or "")
            raise SpillError(directory=directory, reason="the driver is closed")
        if self._spill.pid != os.getpid():
            raise self._spill.file.error("the driver belongs to the process that forked this one")
        return self._spill
