"""Scale: the device and the size of the GPU benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is run."""

    device: str
    """`cuda`, or `cpu` to try everything without a GPU."""
    small: bool
    """Whether to use tiny networks."""
    cap_bytes: int
    """Device memory for a process, where no share of the peak is set; 0: a share everywhere."""
    host_bytes: int | None
    """outcore's `host_budget`; None means what it finds to be free."""
    batches: tuple[int, ...]
    """Batches of ResNet-50: the first is compared with all peers, the others with few. If `small`,
    the first is also that of the other networks."""
    rounds: int
    steps: int
    """Steps in a row in each turn, between which the host does not wait."""


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
    cap_bytes=0,  # a share of the peak everywhere: the peak of a tiny network is not known
    host_bytes=None,
    batches=(32, 16),
    rounds=3,
    steps=1,
)

SMALL_ON_GPU = replace(SMALL, batches=(256, 128))
"""torch's allocator reserves pages of 20 MiB, and the libraries keep some 70 MiB: under a share of
what a smaller batch needs, nothing runs."""
