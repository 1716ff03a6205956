"""The CPU driver: RAM is the device, a file is the outer tier, two threads move the bytes."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import torch

from outcore.errors import SpillError, StepError, VerifyError
from outcore.execute.arena import Arena, own_arena
from outcore.execute.disk import (
    FILE_BLOCK_BYTES,
    MEMORY_ALIGNMENT_BYTES,
    region_nbytes,
    words,
)
from outcore.execute.driver import (
    FORKED,
    EmptyLane,
    Lane,
    Recorder,
    Region,
    fit_link,
    lane_nbytes,
    measure_link,
)
from outcore.execute.link import Barrier, Copy, Spill, dropped
from outcore.execute.malloc import ResidentLimit, own_malloc, resident_bytes, trim
from outcore.gauges import Ledger, WallClock
from outcore.ir.hardware import Hardware, Tier
from outcore.units import format_bytes

COPY_IN_OVERHEAD_BYTES: Final = MEMORY_ALIGNMENT_BYTES
"""Device bytes that a tensor copied in takes besides its own, to lie where direct I/O can reach."""

HOLES_DIVISOR: Final = 50
"""The arena keeps holes resident up to its limit over this. Measured on ResNet-50: that costs 2 %
of the step's time, and to keep none costs 8 %."""


class Watch(Protocol):
    """What a lane asks of its driver."""

    @property
    def recorder(self) -> Recorder | None:
        """Who wants to hear of finished copies."""
        ...

    def check_resident(self) -> None:
        """Keep resident memory bounded; called when a copy is issued."""
        ...


class CpuLane:
    """The room of one outstanding step in the file (`driver.Lane`)."""

    __slots__ = (
        "_base",
        "_copies",
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
        driver: Watch,
        spill: Spill,
        regions: Mapping[int, Region],
        base: int,
        nbytes: int,
    ) -> None:
        self.driver, self.file, self.regions = driver, spill.file, regions
        self._base, self._spill = base, spill
        self._out, self._into = spill.out.put, spill.into.put
        self._copies: deque[Copy] = deque()
        """In order; those at its head may be done."""
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
        copy = Copy(self, "out", region, address, storage, after)
        self._issue(copy, self._out)
        return copy

    def copy_in(self, region: int, *after: Copy) -> tuple[torch.Tensor, Copy]:
        """Take memory for the root tensor of `region`; start filling it once `after` are done."""
        if region not in self._residues:
            raise VerifyError(noun="program", rule="written before read", where=f"region {region}")
        self.driver.check_resident()
        tensor = _empty(self.regions[region], self._residues[region])
        copy = Copy(self, "in", region, tensor.untyped_storage().data_ptr(), tensor, after)
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
        """Drop what has not begun, wait for what has, which ends soon; give the room back.

        Memory is then free at once: whoever dropped a step may count on all of it.
        """
        try:
            nbytes = self._open.pop()
        except IndexError:
            return
        base, file = self._base, self.file
        # A worker would free what it holds last, where no meter sees that: kept until it is over.
        kept = [copy.kept for copy in self._copies]
        try:
            for copy in self._copies:
                copy.call_off()
            if self._spill.can_wait():
                for copy in self._copies:
                    with copy.done:
                        pass
        finally:  # an interrupt too
            kept.clear()
            self._out(Barrier(lambda: file.give(base, nbytes)))

    @property
    def recorder(self) -> Recorder | None:
        """Who wants to hear of finished copies."""
        return self.driver.recorder

    def offset(self, region: int) -> int:
        """Where `region` lies in the file."""
        return self._base + self.regions[region].offset

    def check_open(self) -> None:
        """Raise CancelledError where nobody can be interested in the copies of this lane."""
        if not self._open or self._spill.closed:
            raise dropped()

    def _issue(self, copy: Copy, put: Callable[[Copy], None]) -> None:
        if self._spill.closed:
            raise self.file.error("the driver is closed")
        while self._copies and self._copies[0].kept is None:
            self._copies.popleft()
        self._copies.append(copy)
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
    """A root tensor whose storage has the region's bytes, and begins at an address of `residue`.

    In the arena it does so by itself, and then fits the hole that the original left.
    """
    # At least a byte: a view of nothing has no stride.
    memory = torch.empty(region.nbytes or 1, dtype=torch.uint8, device="cpu")
    if memory.data_ptr() % MEMORY_ALIGNMENT_BYTES != residue:
        del memory  # first: the plan has room for one
        nbytes = region.nbytes + COPY_IN_OVERHEAD_BYTES
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    start = (residue - memory.data_ptr()) % MEMORY_ALIGNMENT_BYTES
    # By way of numpy: a torch view would share the whole storage and have an offset in it.
    storage = torch.from_numpy(memory.numpy()[start : start + region.nbytes])
    return storage.view(region.dtype).as_strided(region.shape, region.stride, region.start)


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
        self.clock = WallClock()
        self.malloc = own_malloc()
        self.arena = own_arena()
        self.recorder: Recorder | None = None
        self._resident_limit: ResidentLimit | None = None
        self._unbound: weakref.finalize[[], CpuDriver] | None = None
        """Lifts the arena's limit, where this driver set it."""
        self._spill_dir, self._rate = spill_dir, link_bytes_per_second
        self._spill: Spill | None = None
        self._finalizer: weakref.finalize[[], CpuDriver] | None = None
        self._closed = False
        self._lock = threading.Lock()

    def hardware(self, budgets: Mapping[Tier, int]) -> Hardware:
        """RAM and disk with links as measured now (a fraction of a second).

        No disk where it has no budget. Raises SpillError where it cannot be used.
        """
        budget_bytes = budgets[Tier.DEVICE]
        if not budgets[Tier.DISK]:
            return Hardware("this-machine", ((Tier.DEVICE, budget_bytes),), links=())
        # The trial needs memory too, twice its largest size, and disk space for one of each size.
        largest = min(budget_bytes // 16, budgets[Tier.DISK] // 2)
        tables = measure_link(self, largest_nbytes=largest)
        return Hardware(
            name="this-machine",
            capacity_bytes=((Tier.DEVICE, budget_bytes), (Tier.DISK, budgets[Tier.DISK])),
            links=(
                (Tier.DEVICE, Tier.DISK, fit_link(tables.copy_out)),
                (Tier.DISK, Tier.DEVICE, fit_link(tables.copy_in)),
            ),
            duplex=tables.duplex,
            rounding_bytes=((Tier.DISK, FILE_BLOCK_BYTES),),
            fetch_padding_bytes=COPY_IN_OVERHEAD_BYTES,
        )

    def wider_hardware(self, _budgets: Mapping[Tier, int]) -> Hardware | None:
        """None: there is nothing beyond the disk."""
        return None

    def reserve(self, nbytes: Mapping[Tier, int]) -> None:
        """Take the disk space of a lane now. Raises `SpillError` where it is full."""
        room = region_nbytes(nbytes.get(Tier.DISK, 0))
        if room:
            spill = self._ready()
            spill.file.give(spill.take(room), room)

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

    def ledger(self) -> Ledger | None:
        """What the arena holds; None where there is none."""
        if not isinstance(self.arena, Arena):
            return None
        now = self.arena.figures()
        return Ledger(now.live_bytes, now.start, now.stop)

    def bound_memory(self, held_bytes: int, most_bytes: int | None) -> None:
        """Bound resident memory by `most_bytes` and what the process takes besides its tensors.

        Where there is no arena, and resident memory cannot be read, there is no bound.
        """
        if isinstance(self.arena, Arena):
            self._bound_arena(self.arena, most_bytes)
            return
        if most_bytes is None:
            self.limit_resident(None)
            return
        trim()
        with contextlib.suppress(OSError):
            external = max(0, resident_bytes() - held_bytes)
            self.limit_resident(external + most_bytes)

    def _bound_arena(self, arena: Arena, nbytes: int | None) -> None:
        if self._unbound is not None:
            self._unbound()
        if nbytes is None:
            return
        self._unbound = _limit(self, arena, nbytes + nbytes // HOLES_DIVISOR)
        arena.trim()
        trim()

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

    def disk_bytes_written(self) -> int:
        """What was written to the file so far, to measure the disk included."""
        return 0 if self._spill is None else self._spill.file.written_bytes

    def notes(self) -> tuple[str, ...]:
        """Nothing."""
        return ()

    def drain(self) -> None:
        """Return once every copy issued so far is done."""
        if self._spill is not None:
            self._spill.drain()

    def close(self) -> None:
        """Drop what is under way, end the threads, give the disk space back."""
        self._closed = True
        if self._finalizer is not None:
            self._finalizer()
        if isinstance(self.arena, Arena):
            self.arena.trim()

    def _ready(self) -> Spill:
        with self._lock:
            if self._spill is None and not self._closed:
                self._spill = Spill(self._spill_dir, self._rate)
                self._finalizer = weakref.finalize(self, self._spill.close)
        if self._spill is None or self._closed:
            directory = str(self._spill_dir or "")
            raise SpillError(directory=directory, reason="the driver is closed")
        if self._spill.pid != os.getpid():
            raise StepError(reason=FORKED)
        return self._spill


_limits: list[object] = []
"""What stands for the arena's limit, which is the process's: at most one, the latest."""


def _limit(driver: CpuDriver, arena: Arena, nbytes: int) -> weakref.finalize[[], CpuDriver]:
    """Limit the arena until this is called, `driver` is collected, or another limit is set."""
    mine = object()
    _limits[:] = [mine]
    arena.limit(nbytes)

    def lift() -> None:
        if mine in _limits:
            _limits.clear()
            arena.limit(None)

    lifting = weakref.finalize(driver, lift)
    lifting.atexit = False
    return lifting
