"""cpu: the driver for a CPU: RAM is the device, a file the outer tier, and two threads copy."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import torch

from outcore.errors import OutcoreError, SpillError, VerifyError
from outcore.execute.arena import Arena, own_arena
from outcore.execute.disk import (
    FILE_BLOCK_BYTES,
    MEMORY_ALIGNMENT_BYTES,
    region_nbytes,
)
from outcore.execute.driver import (
    EmptyLane,
    Lane,
    OnCopy,
    Region,
    lane_nbytes,
)
from outcore.execute.link import CopyJob, FileRoom, Spill
from outcore.execute.link_tables import fit_link, measure_link
from outcore.execute.malloc import ResidentLimit, own_malloc, resident_bytes, trim
from outcore.gauges import Ledger, WallClock
from outcore.ir.hardware import Hardware, Tier

COPY_IN_OVERHEAD_BYTES: Final = MEMORY_ALIGNMENT_BYTES
"""Extra device bytes of a tensor that is copied in, so that direct I/O can reach its storage."""

HOLES_DIVISOR: Final = 50
"""The arena may keep holes resident: its limit is the bound plus the bound over this. Measured on
ResNet-50: that costs 2 % of the step's time; a limit without room for holes costs 8 %."""


class LaneOwner(Protocol):
    """The part of a driver that a lane needs."""

    @property
    def on_copy(self) -> OnCopy | None:
        """Called with each finished copy; None if nothing records."""
        ...

    def check_resident(self) -> None:
        """Keep resident memory bounded. Called whenever a copy is issued."""
        ...


class CpuLane(FileRoom):
    """The room of one outstanding step in the file (`driver.Lane`)."""

    __slots__ = ("_copies", "_reads", "_residues", "_written", "driver")

    def __init__(
        self,
        driver: LaneOwner,
        spill: Spill,
        regions: Mapping[int, Region],
        base: int,
        nbytes: int,
    ) -> None:
        super().__init__(spill, regions, base, nbytes)
        self.driver = driver
        self._copies: deque[CopyJob] = deque()
        """Copies in order of issue. Those at the head may be done already."""
        self._reads: deque[CopyJob] = deque()
        """Copies in of which it is not known yet whether they failed, in order of issue."""
        self._written: dict[int, CopyJob] = {}
        """Region -> the last copy that was to write it."""
        self._residues: dict[int, int] = {}
        """Region -> address of the storage that was copied to it, modulo the alignment of
        memory."""

    @property
    def on_copy(self) -> OnCopy | None:
        """Called with each finished copy; None if nothing records."""
        return self.driver.on_copy

    def copy_out(self, tensor: torch.Tensor, region: int, *after: CopyJob) -> CopyJob:
        """Start to copy the storage of `tensor` to `region`, once all of `after` are done."""
        storage = tensor.untyped_storage()
        if storage.nbytes() < self.regions[region].nbytes:
            raise self._too_small(storage.nbytes(), region)
        self.driver.check_resident()
        address = storage.data_ptr()
        self._residues[region] = address % MEMORY_ALIGNMENT_BYTES
        copy = self._written[region] = CopyJob(self, "out", region, address, storage, after)
        self._issue(copy)
        return copy

    def copy_in(self, region: int, *after: CopyJob) -> tuple[torch.Tensor, CopyJob]:
        """Allocate the root tensor of `region`; start to fill it once all of `after` are done."""
        if region not in self._residues:
            raise VerifyError(noun="program", rule="written before read", where=f"region {region}")
        self.driver.check_resident()
        tensor = _empty(self.regions[region], self._residues[region])
        copy = CopyJob(self, "in", region, tensor.untyped_storage().data_ptr(), tensor, after)
        copy.written = self._written.get(region)
        self._reads.append(copy)
        self._issue(copy)
        return tensor, copy

    def wait(self, handle: CopyJob) -> None:
        """Return once the copy is done.

        Raises as `FileRoom.wait`, for copies in before it, too: programs leave out waits that a
        later one implies. Then those that were issued until now are given up.
        """
        try:
            super().wait(handle)
            while self._reads and self._reads[0].kept is None:
                super().wait(self._reads.popleft())
        except OutcoreError:
            self._reads.clear()
            raise

    def discard(self, tensor: torch.Tensor) -> None:
        """Do nothing: memory is freed with its last reference."""

    def _end(self) -> None:
        """Drop copies that have not begun, and wait for those that have.

        Running copies end soon. Their memory is free when this returns, so after a step is dropped,
        all of its memory can be used.
        """
        # Keep what the copies keep alive until they are over. Otherwise a worker may hold the last
        # reference, and free the memory on its own thread, which no meter sees.
        kept = [copy.kept for copy in self._copies]
        try:
            for copy in self._copies:
                copy.call_off()
            if self._spill.can_wait():
                for copy in self._copies:
                    with copy.done:
                        pass
        finally:  # also after an interrupt
            kept.clear()

    def _issue(self, copy: CopyJob) -> None:
        """Give `copy` to its worker. Raises SpillError if the driver is closed."""
        while self._copies and self._copies[0].kept is None:
            self._copies.popleft()
        self._copies.append(copy)
        self._spill.put(copy)

    def _too_small(self, nbytes: int, region: int) -> VerifyError:
        detail = f"{nbytes} bytes for a region of {self.regions[region].nbytes}"
        rule = "a storage has the bytes of its buffer"
        return VerifyError(noun="program", rule=rule, where=f"region {region}", detail=detail)


def _empty(region: Region, residue: int) -> torch.Tensor:
    """Allocate the root tensor of `region`; its storage begins at an address of the given residue.

    The storage has exactly the region's bytes. Memory from the arena has that residue without extra
    bytes, and so fits the hole that the original left.
    """
    # At least one byte: a view of nothing has no stride.
    memory = torch.empty(region.nbytes or 1, dtype=torch.uint8, device="cpu")
    if memory.data_ptr() % MEMORY_ALIGNMENT_BYTES != residue:
        del memory  # free it first: the plan has room for one
        nbytes = region.nbytes + COPY_IN_OVERHEAD_BYTES
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    start = (residue - memory.data_ptr()) % MEMORY_ALIGNMENT_BYTES
    # Slice with NumPy: a view by torch would share the whole storage, at an offset.
    flat = torch.from_numpy(memory.numpy()[start : start + region.nbytes])
    # No view of `flat`: nothing else should refer to the storage.
    root = torch.empty(0, dtype=region.dtype, device="cpu")
    return root.set_(flat.untyped_storage(), region.start, region.shape, region.stride)


class CpuDriver:
    """RAM as the device, a file in `spill_dir` as the outer tier (`driver.Driver`).

    `link_bytes_per_second` slows each direction down to that rate; None: as fast as the disk. The
    file and the threads are made when they are first needed. A `spill_dir` that is missing,
    unwritable or full raises `SpillError` then. The driver is closed when it is collected, or when
    the program ends.
    """

    def __init__(
        self,
        spill_dir: str | os.PathLike[str] | None = None,
        link_bytes_per_second: float | None = None,
    ) -> None:
        self.generator = torch.default_generator
        self.clock = WallClock()
        own_malloc()
        self.arena = own_arena()
        """The allocator that serves torch's CPU tensors, or why there is none."""
        self.on_copy: OnCopy | None = None
        self._resident_limit: ResidentLimit | None = None
        """Bounds resident memory if there is no arena; None: no bound."""
        self._unbound: weakref.finalize[[], CpuDriver] | None = None
        """Removes the arena's limit, if this driver set it."""
        self._spill_dir, self._rate = spill_dir, link_bytes_per_second
        self._disk_budget_bytes: int | None = None
        self._spill: Spill | None = None
        self._finalizer: weakref.finalize[[], CpuDriver] | None = None
        """Closes `_spill` when the driver is collected."""
        self._closed = False
        self._lock = threading.Lock()

    def queue(self) -> object:
        """Return None: work is done as it is given."""
        return None

    def refuse_capture(self) -> None:
        """Do nothing: what is computed here is in no graph."""

    def hardware(self, budgets: Mapping[Tier, int]) -> Hardware:
        """Describe RAM and disk, with their links as measured now (a fraction of a second).

        There is no disk if it has no budget. Raises SpillError if the disk cannot be used.
        """
        budget_bytes = budgets[Tier.DEVICE]
        if not budgets[Tier.DISK]:
            return Hardware("this-machine", ((Tier.DEVICE, budget_bytes),), links=())
        self.limit(budgets)
        # The trial also needs memory, twice its largest size, and disk space for one copy of each
        # size.
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
        """Return None: there is no tier behind the disk."""
        return None

    def limit(self, budgets: Mapping[Tier, int], /) -> None:
        """Let the file have at most so many bytes."""
        self._disk_budget_bytes = budgets.get(Tier.DISK)

    def reserve(self, nbytes: Mapping[Tier, int], *, keep: bool = False) -> None:  # noqa: ARG002 - there is no host memory to keep
        """Take the disk space of a lane now. Raises `SpillError` if the disk is full."""
        room = region_nbytes(nbytes.get(Tier.DISK, 0))
        if room:
            spill = self._ready()
            spill.file.give(spill.take(room), room)

    def try_reserve(self, nbytes: Mapping[Tier, int], /) -> bool:
        """Make room for a lane on the disk. Returns whether there is room."""
        try:
            self.reserve(nbytes)
        except SpillError:
            return False
        return True

    def open_lane(self, regions: Mapping[int, Region]) -> Lane:
        """Open a lane of `regions`, whose offsets are multiples of `FILE_BLOCK_BYTES`.

        Raises `SpillError` if the disk has no room for it.
        """
        if not regions:
            return EmptyLane()
        spill = self._ready()
        nbytes = max(FILE_BLOCK_BYTES, lane_nbytes(regions, region_nbytes))
        return CpuLane(self, spill, regions, spill.take(nbytes), nbytes)

    def record(self, on_copy: OnCopy | None) -> None:
        """Report every copy issued from now on to `on_copy`, which the worker threads call."""
        self.drain()
        self.on_copy = on_copy

    def ledger(self) -> Ledger | None:
        """What the arena holds now; None if there is no arena."""
        arena = self.arena
        if not isinstance(arena, Arena):
            return None
        now = arena.figures()
        return Ledger(now.live_bytes, now.start, now.stop, arena.outside_bytes, arena.peak_bytes)

    def bound_memory(
        self, held_bytes: Callable[[], int], most_bytes: int | None, *, for_good: bool = True
    ) -> None:
        """Bound resident memory by `most_bytes`, whether it is for good or not.

        With an arena, the bound applies to the arena's memory, with some room for holes
        (`HOLES_DIVISOR`). Otherwise it applies to the whole process, and what the process holds
        besides its tensors is added. If there is no arena and resident memory cannot be read, there
        is no bound.
        """
        del for_good
        if isinstance(self.arena, Arena):
            self._bound_arena(self.arena, most_bytes)
            return
        if most_bytes is None:
            self.limit_resident(None)
            return
        trim()
        with contextlib.suppress(OSError):
            external = max(0, resident_bytes() - held_bytes())
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
        """Return free memory to the system if more than `nbytes` are resident as a copy is issued.

        This applies to the whole process, and uses `malloc_trim`. None: keep free memory for speed
        (see `malloc.py`). Raises OSError if resident memory cannot be read.
        """
        self._resident_limit = None if nbytes is None else ResidentLimit(nbytes)

    def check_resident(self) -> None:
        """Return free memory to the system if resident memory exceeds the limit."""
        if self._resident_limit is not None:
            self._resident_limit.check()

    def disk_bytes_written(self) -> int:
        """Bytes written to the file so far, including those that measured the disk."""
        return 0 if self._spill is None else self._spill.file.written_bytes

    def notes(self) -> tuple[str, ...]:
        """Return no notes."""
        return ()

    def drain(self) -> None:
        """Return once every copy issued so far is done."""
        if self._spill is not None:
            self._spill.drain()

    def close(self) -> None:
        """Drop copies in progress, end the threads and release the disk space."""
        self._closed = True
        if self._finalizer is not None:
            self._finalizer()
        if isinstance(self.arena, Arena):
            self.arena.trim()

    def _ready(self) -> Spill:
        """Return the spill file and its workers, made if needed.

        Raises SpillError if the driver is closed, and StepError in a forked process.
        """
        with self._lock:
            if self._spill is None and not self._closed:
                self._spill = Spill(self._spill_dir, self._rate)
                self._finalizer = weakref.finalize(self, self._spill.close)
        if self._spill is None or self._closed:
            directory = str(self._spill_dir or "")
            raise SpillError(directory=directory, reason="the driver is closed")
        self._spill.check_process()
        self._spill.file.budget_bytes = self._disk_budget_bytes
        return self._spill


_limits: list[object] = []
"""A mark of the arena's current limit. There is one arena per process, so at most one mark."""


def _limit(driver: CpuDriver, arena: Arena, nbytes: int) -> weakref.finalize[[], CpuDriver]:
    """Limit the arena to `nbytes`.

    Calling what this returns lifts the limit, unless a later one replaced it. The limit is also
    lifted when `driver` is collected.
    """
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
