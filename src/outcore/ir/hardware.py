"""Hardware: memory tiers, the links between them, and rates for estimates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

STAGING_BUFFERS = 4
"""Host buffers that copies between a device and a disk pass through: two in each direction, so that
one is filled while the other is emptied. Each is as large as the largest buffer copied."""

STAGING_PADDING_BYTES = 512
"""What each of these buffers needs in addition, to be aligned for direct I/O."""


def staging_bytes(largest_nbytes: int) -> int:
    """Host memory for copies to and from a disk, if the largest copy has `largest_nbytes`."""
    return STAGING_BUFFERS * (largest_nbytes + STAGING_PADDING_BYTES) if largest_nbytes else 0


class Tier(Enum):
    """A kind of memory. Without a GPU, RAM is the device and the disk is the outer tier."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two tiers: a copy's time is its latency plus bytes by rate."""

    bytes_per_second: float
    latency_seconds: float = 0.0

    def seconds(self, nbytes: int) -> float:
        """The time to copy `nbytes` when nothing else uses the link."""
        return self.latency_seconds + nbytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine as the planner sees it.

    `capacity_bytes` has one entry per tier that exists. `links` has one per ordered pair of tiers
    that can exchange data. `duplex`: both directions run at full rate at the same time.
    `flops_per_second` has one entry per dtype (`"float32"`), and `memory_bytes_per_second` is the
    device's own bandwidth. These two serve estimates only. `op_overhead_seconds` is per op.
    `rounding_bytes`: a slot in that tier occupies a multiple of this. `fetch_padding_bytes`: a slot
    that a copy fills occupies this much more, in either tier (direct I/O needs room to align).
    """

    name: str
    capacity_bytes: tuple[tuple[Tier, int], ...]
    links: tuple[tuple[Tier, Tier, Link], ...]
    duplex: bool = True
    flops_per_second: tuple[tuple[str, float], ...] = ()
    memory_bytes_per_second: float = 0.0
    op_overhead_seconds: float = 0.0
    rounding_bytes: tuple[tuple[Tier, int], ...] = ()
    fetch_padding_bytes: int = 0

    def capacity(self, tier: Tier) -> int:
        """The size of `tier` in bytes; 0 if the machine has no such tier."""
        return dict(self.capacity_bytes).get(tier, 0)

    def link(self, source: Tier, target: Tier) -> Link:
        """The link from `source` to `target`. Raises KeyError if there is none."""
        for start, stop, link in self.links:
            if (start, stop) == (source, target):
                return link
        raise KeyError(f"{self.name}: no link from {source.value} to {target.value}")

    def with_slower_links(self, fraction: float) -> Hardware:
        """The same machine, with links whose rates are lower by `fraction`, from 0 to below 1."""
        part = 1 - fraction
        links = (
            (a, b, replace(x, bytes_per_second=part * x.bytes_per_second)) for a, b, x in self.links
        )
        return replace(self, links=tuple(links))

    def slot_bytes(self, tier: Tier, nbytes: int, *, copied: bool) -> int:
        """Bytes that a slot for `nbytes` of data occupies in `tier`. `copied`: a copy fills it."""
        rounding = dict(self.rounding_bytes).get(tier, 1)
        padded = nbytes + (self.fetch_padding_bytes if copied else 0)
        return -(-padded // rounding) * rounding

    @property
    def outer(self) -> Tier:
        """The first tier below the device: HOST if the machine has one, else DISK."""
        return Tier.HOST if self.capacity(Tier.HOST) else Tier.DISK
