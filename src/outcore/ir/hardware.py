"""Hardware: memory tiers, the links between them, and rates for estimates."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

STAGING_BUFFERS = 4
"""Between a device and a disk, copies pass through so many host buffers of the largest one's size:
two in each direction, so that one is filled while the other is emptied."""

STAGING_PADDING_BYTES = 512
"""What each takes more, to lie where direct I/O can reach."""


def staging_bytes(largest_nbytes: int) -> int:
    """Host memory for copies to and from a disk, of which the largest has `largest_nbytes`."""
    return STAGING_BUFFERS * (largest_nbytes + STAGING_PADDING_BYTES) if largest_nbytes else 0


class Tier(Enum):
    """Where a slot lives. On a machine without a GPU, RAM is the device and disk the outer tier."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two tiers: `latency_seconds + nbytes / bytes_per_second`."""

    bytes_per_second: float
    latency_seconds: float = 0.0

    def seconds(self, nbytes: int) -> float:
        """Time to move `nbytes` when nothing else uses the link."""
        return self.latency_seconds + nbytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine as the planner sees it.

    `capacity_bytes` has one entry per tier that exists; `links` one per ordered pair of tiers that
    can exchange data. `duplex` says whether both directions run at full rate together.
    A slot takes its buffer's bytes rounded up to the tier's entry in `rounding_bytes`; one that a
    copy fills takes `fetch_padding_bytes` more on either side (direct I/O needs room to align).
    `flops_per_second` has one entry per dtype (`"float32"`); `memory_bytes_per_second` is the
    device's own bandwidth; both serve `estimate` only.
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
        """Bytes of `tier`; 0 where the machine has none."""
        return dict(self.capacity_bytes).get(tier, 0)

    def link(self, source: Tier, target: Tier) -> Link:
        """The link from `source` to `target`. Raises KeyError where there is none."""
        for start, stop, link in self.links:
            if (start, stop) == (source, target):
                return link
        raise KeyError(f"{self.name}: no link from {source.value} to {target.value}")

    def slot_bytes(self, tier: Tier, nbytes: int, *, copied: bool) -> int:
        """Bytes that a slot for `nbytes` of data takes in `tier`; `copied`: a copy fills it."""
        rounding = dict(self.rounding_bytes).get(tier, 1)
        padded = nbytes + (self.fetch_padding_bytes if copied else 0)
        return -(-padded // rounding) * rounding

    @property
    def outer(self) -> Tier:
        """The first tier below the device: HOST where there is one, else DISK."""
        return Tier.HOST if self.capacity(Tier.HOST) else Tier.DISK
