"""this_machine: measure this machine's rates and return it as a Preset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

from outcore.estimate import Efficiency
from outcore.execute import open_driver
from outcore.execute.disk import SpillFile
from outcore.execute.folders import spill_folder
from outcore.ir.hardware import Hardware, Tier
from outcore.presets import Preset
from outcore.runtime.limits.host import available_bytes, memory_limit_bytes

SIDE = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the matrices that are multiplied, by type of device."""

COPIED_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}
"""Bytes that are copied within the device's memory: more than its caches hold."""

PLANES, PIXELS = 64, 56
"""The timed convolution: 3x3, with `PLANES` planes in and out, on squares of side `PIXELS`."""

LEAST_SECONDS = 0.2
"""How long each rate is measured at least."""


def this_machine() -> Preset:
    """The current GPU and its host, or the CPU and a disk; takes a few seconds.

    Rates are those that torch reaches in products of large matrices and in copies. Efficiencies are
    relative to these: that of convolutions is measured, attention counts as matrix products. Raises
    SpillError if the disk is needed and no file can be made in the spill folder.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = spill_folder()
    rates = {name: _product_rate(device, dtype) for name, dtype in _dtypes(device).items()}
    convolution = _convolution_rate(device) / rates["float32"]
    hardware = replace(
        _linked(device, folder),
        name="this-machine",
        flops_per_second=tuple(rates.items()),
        memory_bytes_per_second=_copy_rate(device),
        op_overhead_seconds=_launch_seconds(device),
    )
    efficiency = Efficiency(convolution=convolution, matmul=1.0, attention=1.0, memory=1.0)
    summary = f"this machine: {_name(device)}, measured now"
    return Preset(hardware, efficiency, summary, {"everything": "measured"})


def _linked(device: torch.device, folder: Path) -> Hardware:
    """The tiers, and their links as measured by the driver."""
    driver = open_driver(device, folder, None)
    try:
        return driver.hardware(_capacities(device, folder))
    finally:
        driver.close()


def _capacities(device: torch.device, folder: Path) -> Mapping[Tier, int]:
    if device.type == "cuda":
        return {Tier.DEVICE: torch.cuda.mem_get_info()[0], Tier.HOST: available_bytes()}
    file = SpillFile(folder)
    try:
        free = file.free_bytes()
    finally:
        file.close()
    return {Tier.DEVICE: memory_limit_bytes(), Tier.DISK: free}


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def _dtypes(device: torch.device) -> dict[str, torch.dtype]:
    found = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return found | ({"float16": torch.float16} if device.type == "cuda" else {})


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    side = SIDE[device.type]
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * side**3 / _seconds("a @ b", a=a, b=b)


def _convolution_rate(device: torch.device) -> float:
    samples = SIDE[device.type] // PLANES
    x = torch.randn(samples, PLANES, PIXELS, PIXELS, device=device)
    w = torch.randn(PLANES, PLANES, 3, 3, device=device)
    took = _seconds("torch.nn.functional.conv2d(x, w, padding=1)", x=x, w=w)
    return 2.0 * x.numel() * PLANES * 9 / took


def _copy_rate(device: torch.device) -> float:
    source = torch.zeros(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2.0 * source.nbytes / _seconds("target.copy_(source)", source=source, target=target)


def _launch_seconds(device: torch.device) -> float:
    return _seconds("x + 1", x=torch.zeros(1, device=device))


def _seconds(statement: str, **names: torch.Tensor) -> float:
    """Median seconds of a statement; waits for the device."""
    timer = Timer(statement, globals=names, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=LEAST_SECONDS).median)
