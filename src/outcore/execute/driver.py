"""driver: the interface between generated code and a device, to copy to an outer tier and back.

The compute thread issues copies, and they run concurrently with it. Each direction is one queue:
copies out run in the order in which they were issued, and so do copies back. Only `wait` and
`after` order anything else: copies of different directions, or a copy and the compute thread.

    lane = driver.open_lane(regions)         # for one step, until its backward call is over
    out = lane.copy_out(tensor, 4)           # starts a copy to region 4
    lane.wait(out); del tensor               # the memory may be freed only after the wait
    tensor, back = lane.copy_in(4)           # allocates now; the bytes arrive later
    lane.wait(back)                          # `tensor` may be read only after the wait
    lane.close()                             # the next step may use the lane's outer memory
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch

from outcore.gauges import Clock, Ledger
from outcore.ir.hardware import Hardware, Tier

Direction: TypeAlias = Literal["out", "in"]
"""Out: away from the device. In: back to it."""

Handle: TypeAlias = Any
"""A copy in progress. A lane returns it, and its methods accept it; opaque to everything else."""


@dataclass(frozen=True, slots=True)
class Region:
    """A place in an outer tier for one storage, and the root tensor that lies in the storage.

    A buffer's root tensor is the one that its op returns, or that the caller passes.
    """

    offset: int
    """In bytes from the start of the lane's part of the tier."""
    nbytes: int
    """Size of the whole storage. The root tensor may leave gaps in it unused."""
    dtype: torch.dtype
    """Of the root tensor, as are `shape` and `stride`."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    tier: Tier = Tier.HOST
    """Which outer tier it is in, for drivers that have two."""
    start: int = 0
    """Where the root tensor begins in its storage, in elements."""

    @classmethod
    def of(cls, tensor: torch.Tensor, offset: int, tier: Tier) -> Region:
        """A place at `offset` for the storage of `tensor`, and for `tensor` as its root."""
        return cls(
            offset,
            tensor.untyped_storage().nbytes(),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tier,
            int(tensor.storage_offset()),
        )


class CopySpan(NamedTuple):
    """One finished copy."""

    direction: Direction
    region: int
    """The key of the region in `Driver.open_lane`."""
    start_seconds: float
    """By `time.perf_counter`, as is `stop_seconds`."""
    stop_seconds: float
    nbytes: int
    lane: int = 0
    """The `Lane.key` of its lane, which identifies the step."""


OnCopy: TypeAlias = Callable[[CopySpan], object]
"""Called with each finished copy, on a worker thread or by `drain`; `list.append` is enough."""


class Lane(Protocol):
    """The memory of one step in the outer tiers.

    Regions are named by their key in `Driver.open_lane`.
    """

    @property
    def key(self) -> int:
        """What `CopySpan.lane` says of this lane."""
        ...

    def copy_out(self, tensor: torch.Tensor, region: int, /, *after: Handle) -> Handle:
        """Start to copy the storage of `tensor` to `region`, once all of `after` are done."""
        ...

    def copy_in(self, region: int, /, *after: Handle) -> tuple[torch.Tensor, Handle]:
        """Allocate the root tensor of `region`; start to fill it once all of `after` are done."""
        ...

    def wait(self, handle: Handle, /) -> None:
        """Let computation continue only when the copy is done.

        Raises `SpillError` if the copy failed. On a CPU the calling thread waits. On a device with
        queues the compute queue does; the calling thread continues unless a copy from a disk
        precedes.
        """
        ...

    def discard(self, tensor: torch.Tensor, /) -> None:
        """Note that the bytes of `tensor` will not be read again.

        Only drivers for tests use this.
        """
        ...

    def close(self) -> None:
        """Release the lane's outer memory. Copies that nothing waited for may be dropped.

        Never raises. May be called more than once, and from any thread, also by a finalizer. Waits
        only for copies that have begun, because their memory would otherwise be given to others.
        """
        ...


class Generator(Protocol):
    """The random generator of the device."""

    def get_state(self) -> torch.Tensor:
        """Return the generator's current state."""
        ...

    def set_state(self, state: torch.Tensor) -> object:
        """Set the generator to `state`."""
        ...


class Driver(Protocol):
    """A device and its outer tiers, for any number of Programs."""

    @property
    def generator(self) -> Generator:
        """The generator that random ops on the device draw from."""
        ...

    @property
    def clock(self) -> Clock:
        """The clock that times work on the device."""
        ...

    def queue(self) -> object:
        """What this thread computes on now. Work that is given to equal ones is done in order."""
        ...

    def refuse_capture(self) -> None:
        """Raise StepError if what this thread computes is put into a CUDA graph instead of run."""
        ...

    def hardware(self, budgets: Mapping[Tier, int]) -> Hardware:
        """Describe this device and its nearest outer tier: measured links, given capacities."""
        ...

    def wider_hardware(self, budgets: Mapping[Tier, int], /) -> Hardware | None:
        """Describe the device, the nearest outer tier and the one behind it; None if there is none.

        Raises `SpillError` if that tier is a disk that cannot be used.
        """
        ...

    def limit(self, budgets: Mapping[Tier, int], /) -> None:
        """Let lanes take at most so many bytes of the outer tiers. `hardware` sets this, too."""
        ...

    def reserve(self, nbytes: Mapping[Tier, int], *, keep: bool = False) -> None:
        """Make sure that a lane can be opened that needs `nbytes` of each outer tier.

        Unused host memory is dropped, unless `keep` is set and there is room for both. Raises
        `SpillError` (disk) or `HostMemoryError` (host memory) if there is no room.
        """
        ...

    def try_reserve(self, nbytes: Mapping[Tier, int], /) -> bool:
        """Make room for one more lane that needs `nbytes` of each outer tier, if that is possible.

        Returns whether such a lane can be opened now.
        """
        ...

    def open_lane(self, regions: Mapping[int, Region]) -> Lane:
        """Open a lane for one more outstanding step. Raises as `reserve` does."""
        ...

    def record(self, on_copy: OnCopy | None) -> None:
        """Report every copy issued from now on to `on_copy`; None stops the reports."""
        ...

    def ledger(self) -> Ledger | None:
        """What the driver's own allocator holds now; None if it has none that counts."""
        ...

    def bound_memory(
        self, held_bytes: Callable[[], int], most_bytes: int | None, *, for_good: bool = True
    ) -> None:
        """Keep the device memory of the process near `most_bytes`, if the driver can.

        `held_bytes` counts what tensors hold, for drivers that ask. None for `most_bytes` removes
        the bound: freed memory is then kept for speed. `for_good` is False for steps of sizes that
        may never return.
        """
        ...

    def disk_bytes_written(self) -> int:
        """Bytes written to a disk so far, including those that measured it."""
        ...

    def notes(self) -> tuple[str, ...]:
        """Notes for reports about problems of the device; usually none."""
        ...

    def drain(self) -> None:
        """Return once every copy issued so far is done. Does not raise for copies that failed."""
        ...

    def close(self) -> None:
        """Drop what is in progress and release everything. May be called more than once."""
        ...


def lane_nbytes(regions: Mapping[int, Region], region_nbytes: Callable[[int], int]) -> int:
    """Bytes of a tier that a lane of `regions` needs, each rounded up by `region_nbytes`."""
    return max((r.offset + region_nbytes(r.nbytes) for r in regions.values()), default=0)


class EmptyLane:
    """The lane of a step that copies nothing: every region is a KeyError."""

    @property
    def key(self) -> int:
        """What `CopySpan.lane` says of this lane."""
        return id(self)

    def copy_out(self, *arguments: object) -> Handle:
        """Raise KeyError: there is no such region."""
        raise KeyError(arguments)

    def copy_in(self, *arguments: object) -> tuple[torch.Tensor, Handle]:
        """Raise KeyError: there is no such region."""
        raise KeyError(arguments)

    def wait(self, *_: object) -> None:
        """Do nothing."""

    def discard(self, *_: object) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
