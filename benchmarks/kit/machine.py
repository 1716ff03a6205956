"""machine: describe the machine on which figures are taken: versions, processor, memory."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import outcore
from outcore import __version__
from outcore.jit import COMPILED
from outcore.runtime.limits.host import memory_limit_bytes

PACKAGES = ("torch", "numpy", "scipy", "numba", "transformers", "monai")


def host() -> dict[str, Any]:
    """The description. It contains no host names and no paths."""
    return {
        "versions": _versions(),
        "source": _source(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "planner_compiled": COMPILED,
        "memory_bytes": memory_limit_bytes(),
        "load_average": round(os.getloadavg()[0], 2),
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


def _source() -> str:
    """A digest of the sources of outcore and of the benchmarks."""
    found = hashlib.sha256()
    for folder in (Path(outcore.__file__).parent, Path(__file__).parents[1]):
        for file in sorted(folder.rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()[:12]


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123 - a file of the kernel
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
