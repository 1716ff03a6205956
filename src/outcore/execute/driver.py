"""What lowered code asks of a device: copies between device memory and an outer tier.

The compute thread calls; copies run beside it. One direction is one queue: copies away from the
device run in the order they were issued, and so do copies back. Between the two directions, and
between a copy and the compute thread, nothing is ordered but by `wait` and `after`.

    lane = driver.open_lane(regions)         # one outstanding step
    out = lane.copy_out(tensor, 4)           # starts
    lane.wait(out); del tensor               # only now may the memory go
    tensor, back = lane.copy_in(4)           # the memory is taken now, the bytes come later
    lane.wait(back)                          # only now may `tensor` be read
    lane.close()                             # the lane's outer memory serves the next step
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias

import torch

from outcore.gauges import Clock, Ledger
from outcore.ir.hardware import Hardware, Link, Tier

FORKED: Final = "this process was forked from the one that wrapped the model: wrap it again here"

Direction: TypeAlias = Literal["out", "in"]
"""Away from the device, or back."""

Handle: TypeAlias = Any
"""What a lane gives for a copy under way, to be handed back to the same lane; opaque to others."""

LinkTable: TypeAlias = tuple[tuple[int, float], ...]
"""Pairs (nbytes, seconds) of single copies in one direction, ascending."""

_PROBE_NBYTES = tuple(1 << shift for shift in range(16, 27, 2))
_PROBE_SECONDS = 0.1
_FEWEST_REPEATS, _MOST_REPEATS = 2, 5
_PROBE_PATIENCE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Region:
    """A place in the outer tier for one storage, and the root tensor that lies in the storage.

    `offset` is in bytes from the start of the lane's part of its tier; `nbytes` is the whole
    storage, of which the root tensor (`dtype`, `shape`, `stride`, `start`) may leave gaps unused.
    """

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    tier: Tier = Tier.HOST
    """Which outer tier it lies in, for drivers that have two."""
    start: int = 0
    """Where the root tensor begins in its storage, in elements."""


class CopySpan(NamedTuple):
    """One finished copy: its direction, region, times by `time.perf_counter`, and size.

    `lane` is the `id` of its lane, which tells steps apart while they are under way.
    """

    direction: Direction
    region: int
    start_seconds: float
    stop_seconds: float
    nbytes: int
    lane: int = 0


Recorder: TypeAlias = Callable[[CopySpan], object]
"""Takes each finished copy, on whichever thread ran it: `list.append` will do."""


class Lane(Protocol):
    """The outer memory of one outstanding step. Regions go by their key in `Driver.open_lane`."""

    def copy_out(self, tensor: torch.Tensor, region: int, /, *after: Handle) -> Handle:
        """Start copying the storage of `tensor` to `region` once all of `after` are done."""
        ...

    def copy_in(self, region: int, /, *after: Handle) -> tuple[torch.Tensor, Handle]:
        """Take memory for the root tensor of `region`; start filling it once `after` are done."""
        ...

    def wait(self, handle: Handle, /) -> None:
        """Return once the copy is done. Raises `SpillError` where it failed."""
        ...

    def discard(self, tensor: torch.Tensor, /) -> None:
        """Hear that the bytes of `tensor` will not be read again. Only drivers for tests care."""
        ...

    def close(self) -> None:
        """Give the lane back. Copies not waited for may be dropped.

        Never raises; from any thread, finalisers included; more than once. Waits for no more than
        copies that have begun, whose memory would be given to others.
        """
        ...


class Generator(Protocol):
    """The random generator of the device."""

    def get_state(self) -> torch.Tensor:
        """The generator's state now."""
        ...

    def set_state(self, state: torch.Tensor) -> object:
        """Put the generator back into `state`."""
        ...


class Driver(Protocol):
    """A device and its outer tier, for any number of Programs."""

    @property
    def generator(self) -> Generator:
        """The generator that the device's random ops draw from."""
        ...

    @property
    def clock(self) -> Clock:
        """The clock of the device's work."""
        ...

    def hardware(self, budgets: Mapping[Tier, int]) -> Hardware:
        """This device and its nearest outer tier: links as measured, capacities as given."""
        ...

    def wider_hardware(self, budgets: Mapping[Tier, int], /) -> Hardware | None:
        """The same with a tier beyond that, for what it has no room for; None where there is none.

        Raises `SpillError` where that is a disk that cannot be used.
        """
        ...

    def reserve(self, nbytes: Mapping[Tier, int]) -> None:
        """See to it that a lane that takes `nbytes` of each outer tier finds room.

        Raises `SpillError` (a disk) or `HostMemoryError` (a host) where none is left.
        """
        ...

    def open_lane(self, regions: Mapping[int, Region]) -> Lane:
        """A lane for one more outstanding step. Raises as `reserve` does."""
        ...

    def record(self, recorder: Recorder | None) -> None:
        """Report every copy issued from now on to `recorder`; None stops it."""
        ...

    def ledger(self) -> Ledger | None:
        """What the device's allocator has given out now, where it keeps count."""
        ...

    def bound_memory(self, held_bytes: int, most_bytes: int | None) -> None:
        """Keep what the process takes of the device near `most_bytes`, where the driver can.

        `held_bytes` are in tensors now; None: no bound, memory is kept for speed.
        """
        ...

    def disk_bytes_written(self) -> int:
        """What was written to a disk so far, to measure it included."""
        ...

    def notes(self) -> tuple[str, ...]:
        """What reports should tell of how the device fares; as a rule, nothing."""
        ...

    def drain(self) -> None:
        """Return once every copy issued so far is done. Does not raise for copies that failed."""
        ...

    def close(self) -> None:
        """Drop what is under way and give everything back. More than once is fine."""
        ...


def lane_nbytes(regions: Mapping[int, Region], region_nbytes: Callable[[int], int]) -> int:
    """Bytes of the outer tier that a lane of `regions` takes, each rounded by `region_nbytes`."""
    return max((r.offset + region_nbytes(r.nbytes) for r in regions.values()), default=0)


class EmptyLane:
    """The lane of a step that copies nothing: every region is a KeyError."""

    def copy_out(self, *arguments: object) -> Handle:
        """Raise KeyError: there is no such region."""
        raise KeyError(arguments)

    def copy_in(self, *arguments: object) -> tuple[torch.Tensor, Handle]:
        """Raise KeyError: there is no such region."""
        raise KeyError(arguments)

    def wait(self, *_: object) -> None:
        """There is nothing to wait for."""

    def discard(self, *_: object) -> None:
        """There is nothing to do."""

    def close(self) -> None:
        """There is nothing to give back."""


class OpensLanes(Protocol):
    """What copies can be timed through."""

    def open_lane(self, regions: Mapping[int, Region]) -> Lane:
        """A lane of `regions`."""
        ...


class LinkTables(NamedTuple):
    """A link as measured: each direction alone, and whether both run at full rate together."""

    copy_out: LinkTable
    copy_in: LinkTable
    duplex: bool


def measure_link(driver: OpensLanes, largest_nbytes: int = _PROBE_NBYTES[-1]) -> LinkTables:
    """Time single copies of 64 KiB to 64 MiB, or to `largest_nbytes`, in both directions.

    Takes a second or two: larger sizes are left out once a copy takes 0.2 s. The first copy to a
    place counts only where there is no time for another: a disk takes several times as long for it
    as for those that later steps make. Raises `SpillError` where the outer tier has no room to try.
    """
    sizes = [n for n in _PROBE_NBYTES if n <= largest_nbytes] or [_PROBE_NBYTES[0]]
    lane = driver.open_lane(
        {n: Region(sum(sizes[:i]), n, torch.uint8, (n,), (1,)) for i, n in enumerate(sizes)}
    )
    copy_out: list[tuple[int, float]] = []
    copy_in: list[tuple[int, float]] = []
    try:
        for nbytes in sizes:
            probe = _Probe(lane, nbytes)
            copy_out.append((nbytes, _median_seconds(probe.copy_out)))
            copy_in.append((nbytes, _median_seconds(probe.copy_in)))
            if max(copy_out[-1][1], copy_in[-1][1]) > _PROBE_PATIENCE_SECONDS:
                break
        alone = copy_out[-1][1], copy_in[-1][1]
        # Halfway between the time of the slower one and that of one after the other.
        duplex = _median_seconds(probe.copy_both) < (max(alone) + sum(alone)) / 2
    finally:
        lane.close()
    return LinkTables(tuple(copy_out), tuple(copy_in), duplex)


def fit_link(table: LinkTable) -> Link:
    """The latency and the rate nearest to `table` by least squares of the relative errors."""
    weights = [1 / seconds**2 for _, seconds in table]
    total = sum(weights)
    mean_nbytes = sum(w * n for w, (n, _) in zip(weights, table, strict=True)) / total
    mean_seconds = sum(w * s for w, (_, s) in zip(weights, table, strict=True)) / total
    rows = [
        (w, n - mean_nbytes, s - mean_seconds) for w, (n, s) in zip(weights, table, strict=True)
    ]
    variance = sum(w * n * n for w, n, _ in rows)
    slope = sum(w * n * s for w, n, s in rows) / variance if variance else 0.0
    latency = mean_seconds - slope * mean_nbytes
    if slope <= 0 or latency < 0:  # noise, or one size only: no latency to be told from the rate
        return Link(sum(n / s for n, s in table) / len(table))
    return Link(1 / slope, latency)


class _Probe:
    """Copies of `nbytes` through the region of that key."""

    def __init__(self, lane: Lane, nbytes: int) -> None:
        self.lane, self.region = lane, nbytes
        self.source = torch.ones(nbytes, dtype=torch.uint8, device="cpu")

    def copy_out(self) -> None:
        self.lane.wait(self.lane.copy_out(self.source, self.region))

    def copy_in(self) -> None:
        self.lane.wait(self.lane.copy_in(self.region)[1])

    def copy_both(self) -> None:
        away = self.lane.copy_out(self.source, self.region)
        _, back = self.lane.copy_in(self.region)
        self.lane.wait(away)
        self.lane.wait(back)


def _median_seconds(copy: Callable[[], None]) -> float:
    """Median time of `copy`, called until it has had its share of time; the first is warm-up."""
    first = _seconds(copy)
    times: list[float] = []
    while first < _PROBE_PATIENCE_SECONDS and (
        len(times) < _FEWEST_REPEATS
        or (len(times) < _MOST_REPEATS and first + sum(times) < _PROBE_SECONDS)
    ):
        times.append(_seconds(copy))
    return statistics.median(times or [first])


def _seconds(copy: Callable[[], None]) -> float:
    start = time.perf_counter()
    copy()
    return time.perf_counter() - start
