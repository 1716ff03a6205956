"""machine: describe the machine on which figures are taken. No host names, no paths."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.kit.machine import host
from benchmarks.kit.modes import spill_folder
from benchmarks.kit.worker import Worker
from outcore.execute import open_driver
from outcore.execute.arena import NoArena, own_arena
from outcore.execute.disk import SpillFile
from outcore.execute.malloc import own_malloc
from outcore.ir.hardware import Tier

ENOUGH_BYTES = 1 << 30
"""A budget so large that the link is measured with all sizes."""


def machine() -> dict[str, Any]:
    """Versions, processor, memory, malloc and disk. Takes about a second."""
    return host() | _in_a_worker()


def _in_a_worker() -> dict[str, Any]:
    """Parts that would change this process: malloc is tuned for good, a driver starts threads."""
    with Worker(_malloc_and_disk) as worker:
        return worker.ask(dict)


def _malloc_and_disk() -> dict[str, Any]:
    malloc = own_malloc()
    file = SpillFile(spill_folder())
    driver = open_driver(torch.device("cpu"), spill_folder(), None)
    hardware = driver.hardware({Tier.DEVICE: ENOUGH_BYTES, Tier.DISK: file.free_bytes()})
    arena = own_arena()
    out, back = hardware.link(Tier.DEVICE, Tier.DISK), hardware.link(Tier.DISK, Tier.DEVICE)
    return {
        "malloc": {"tuned": malloc.owned, **dict(malloc.settings)},
        "arena": f"none: {arena.reason}" if isinstance(arena, NoArena) else "yes",
        "disk": {
            "direct_io": file.direct,
            "write_bytes_per_second": round(out.bytes_per_second),
            "read_bytes_per_second": round(back.bytes_per_second),
            "duplex": hardware.duplex,
        },
    }
