"""opening: the driver for a device."""

from __future__ import annotations

from pathlib import Path

import torch

from outcore.errors import CaptureError
from outcore.execute.cpu import CpuDriver
from outcore.execute.driver import Driver


def open_driver(
    device: torch.device, spill_dir: Path, link_bytes_per_second: float | None
) -> Driver:
    """The driver of `device`, spilling to `spill_dir`; a rate given slows its links down to it.

    Raises CaptureError for a device that has no driver yet, SpillError for a folder that won't do.
    """
    if device.type != "cpu":
        raise CaptureError(reason=f"no driver for a device of type {device.type} yet")
    return CpuDriver(spill_dir, link_bytes_per_second)
