"""machine: what the figures were taken on. No names of hosts, no paths."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks.kit.modes import spill_folder
from benchmarks.kit.worker import Worker
from outcore import __version__
from outcore.execute import open_driver
from outcore.execute.arena import NoArena, own_arena
from outcore.execute.disk import SpillFile
from outcore.execute.malloc import own_malloc
from outcore.ir.hardware import Tier
from outcore.runtime.host import memory_limit_bytes

ENOUGH_BYTES = 1 << 30
"""A budget for which the link is measured with all sizes."""

PACKAGES = ("torch", "numpy", "transformers", "monai")


def machine() -> dict[str, Any]:
    """Versions, processor, memory, malloc and disk; takes about a second."""
    return {
        "versions": _versions(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": memory_limit_bytes(),
        "load_average": round(os.getloadavg()[0], 2),
        **_in_a_worker(),
    }


def _versions() -> dict[str, str]:
    found = {"outcore": __version__, "python": platform.python_version()}
    found["libc"] = " ".join(platform.libc_ver())
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123 - a file of the kernel's
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _in_a_worker() -> dict[str, Any]:
    """What changes the process that asks: malloc is tuned for good, a driver starts threads."""
    with Worker(_malloc_and_disk) as worker:
        return worker.ask(dict)


def _malloc_and_disk() -> dict[str, Any]:
    malloc = own_malloc()
    file = SpillFile(spill_folder())
    driver = open_driver(torch.device("cpu"), spill_folder(), None)
    hardware = driver.hardware({Tier.DEVICE: ENOUGH_BYTES, Tier.DISK: 0})
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
