"""opening: open the driver for a device."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from outcore.errors import CaptureError, OptionValueError
from outcore.execute.cpu import CpuDriver
from outcore.execute.cuda import CudaDevice
from outcore.execute.driver import Driver
from outcore.execute.queued import QueuedDriver
from outcore.execute.torch_allocator import counts, settings


def open_driver(
    device: torch.device, spill_dir: Path, link_bytes_per_second: float | None
) -> Driver:
    """Open the driver for `device`: a GPU offloads to host memory, a CPU to `spill_dir`.

    A GPU also uses `spill_dir`, for what does not fit in host memory. `link_bytes_per_second` slows
    the links of a CPU down to that rate. Raises CaptureError for a device without a driver, or a
    GPU whose allocator does not count memory; OptionValueError if a rate is given for a GPU.
    """
    if device.type == "cpu":
        return CpuDriver(spill_dir, link_bytes_per_second)
    if device.type != "cuda":
        raise CaptureError(reason=f"no driver for a device of type {device.type} yet")
    if link_bytes_per_second is not None:
        raise OptionValueError(
            option="link_limit",
            value=f"{link_bytes_per_second:g} B/s",
            reason="it simulates a slower disk on a CPU; the links of a GPU cannot be slowed down",
        )
    if not counts():
        raise CaptureError(
            reason="torch's allocator does not report GPU memory as it is configured: unset "
            f"backend in {settings()[0]}, and PYTORCH_NO_CUDA_MEMORY_CACHING"
        )
    opened = CudaDevice(device)
    if opened.shares_memory:
        warnings.warn(
            "outcore: this GPU shares its memory with the CPU: nothing can be offloaded to the "
            'host. If the step does not fit, use policy="recompute-all"',
            stacklevel=2,
        )
    return QueuedDriver(opened, spill_dir)
