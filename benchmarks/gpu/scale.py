"""Scale: on what device the benchmarks of a GPU are run, and how large."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is run."""

    device: str
    """`cuda`, or `cpu` to see without a GPU that all of this works."""
    small: bool
    """Tiny networks."""
    cap_bytes: int
    """What a process may take of the device where a benchmark names no share of the peak."""
    host_bytes: int | None
    """outcore's `host_budget`; None: what it finds to be free."""
    batches: tuple[int, ...]
    """Of ResNet-50: the first is compared with all peers, the others with few."""
    rounds: int
    steps: int
    """Steps in a row of each turn, without a wait of the host between them."""


FULL = Scale(
    device="cuda",
    small=False,
    cap_bytes=16 * GIB,
    host_bytes=None,
    batches=(640, 256, 384, 512, 128, 1440),
    rounds=5,
    steps=2,
)

SMALL = Scale(
    device="cuda",
    small=True,
    cap_bytes=0,  # by a share of the peak everywhere: nobody knows what a tiny network takes
    host_bytes=None,
    batches=(32, 16),
    rounds=3,
    steps=1,
)
