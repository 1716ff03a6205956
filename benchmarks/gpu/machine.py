"""machine: describe the machine on which figures are taken. No host names, no paths."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.gpu.scale import Scale
from benchmarks.kit.machine import host
from benchmarks.kit.planner import compile_planner
from benchmarks.kit.worker import Worker
from outcore.execute.torch_allocator import settings


def machine(scale: Scale) -> dict[str, Any]:
    """The host, and the GPU as torch and its driver name it.

    Also begins to compile the planner (`planner_compiled`), which may take half a minute.
    """
    found = host()
    if scale.device == "cuda":
        pool = ThreadPoolExecutor(1)
        _compiling.append(pool.submit(Worker, compile_planner))
        pool.shutdown(wait=False)
        with Worker(_gpu) as worker:  # this process must not use the device
            found |= worker.ask(dict)
    return found


_compiling: list[Future[Worker[None]]] = []


def planner_compiled() -> None:
    """Wait until the planner is compiled, if that has begun."""
    while _compiling:
        _compiling.pop().result().close()


def _gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "device": properties.name,
        "device_memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]  # torch has no types for it
        "driver": _driver(),
        "allocator": settings()[1],
        "c_compiler": has_compiler(),
    }


def has_compiler() -> bool:
    """Whether there is a C compiler, which Triton's kernels need too."""
    named = os.environ.get("CC"), "gcc", "clang"
    return any(shutil.which(name) for name in named if name)


def _driver() -> str | None:
    """The version of the kernel module, as the kernel reports it; None if it does not."""
    try:
        with open("/sys/module/nvidia/version", encoding="utf-8") as file:  # noqa: PTH123 - a file of the kernel
            return file.read().strip()
    except OSError:
        return None
