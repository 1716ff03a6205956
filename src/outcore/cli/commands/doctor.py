"""outcore doctor: show what this machine offers."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from outcore import __version__
from outcore.ir.hardware import Hardware, Tier
from outcore.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:  # loads torch
    from outcore.execute.queued import QueuedDriver

WIDTH = 16
GPU_TRIAL_BYTES = 2 << 30
"""Host memory given for the trial of the link: enough to measure copies of every size."""


def doctor(
    *,
    spill_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="OUTCORE_SPILL_DIR",
            help="The folder to test (default: that of temporary files).",
        ),
    ] = None,
) -> None:
    """Show versions, devices, memory, and the links to disk and GPU as measured."""
    console = Console()
    for finding in (_versions(), _devices(), _memory(), _disk(spill_dir), _gpu()):
        for name, text in finding:
            line = f"{name:<{WIDTH}}{text}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def _versions() -> Iterator[tuple[str, str]]:
    import torch  # noqa: PLC0415 - takes seconds to load; only where it is used

    cuda = torch.version.cuda
    yield "outcore", __version__
    yield "Python", f"{platform.python_version()}, {platform.system()} {platform.release()}"
    yield "torch", f"{torch.__version__}, {f'built for CUDA {cuda}' if cuda else 'CPU build'}"


def _devices() -> Iterator[tuple[str, str]]:
    import torch  # noqa: PLC0415 - as above

    yield "cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads in torch"
    if not torch.cuda.is_available():
        yield "cuda", "none"
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        size = format_bytes(device.total_memory)
        yield f"cuda:{number}", f"{device.name}, {size}"


def _memory() -> Iterator[tuple[str, str]]:
    from outcore.execute.arena import NoArena, own_arena  # noqa: PLC0415 - loads torch
    from outcore.execute.malloc import own_malloc  # noqa: PLC0415 - loads torch
    from outcore.runtime.limits.host import memory_limit_bytes  # noqa: PLC0415 - loads torch

    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    usable = memory_limit_bytes()
    limit = "" if usable == machine else f", of which a cgroup allows {format_bytes(usable)}"
    yield "memory", f"{format_bytes(machine)}{limit}"
    malloc = own_malloc()
    settings = ", ".join(f"{name}={value}" for name, value in malloc.settings)
    yield "malloc", f"tuned ({settings})" if malloc.owned else f"left alone: {malloc.reason}"
    arena = own_arena()
    yield "arena", f"none: {arena.reason}" if isinstance(arena, NoArena) else "yes"


def _disk(spill_dir: Path | None) -> Iterator[tuple[str, str]]:
    """Rows on the disk. Raises SpillError if no spill file can be made in `spill_dir`."""
    import torch  # noqa: PLC0415 - as above

    from outcore.execute import open_driver  # noqa: PLC0415 - loads torch
    from outcore.execute.disk import SpillFile  # noqa: PLC0415 - loads torch
    from outcore.execute.folders import in_memory, spill_folder  # noqa: PLC0415 - loads torch
    from outcore.runtime.limits.host import memory_limit_bytes  # noqa: PLC0415 - loads torch

    folder = spill_dir or spill_folder()
    file = SpillFile(folder)
    vain = ", in memory: offloading there frees no memory" if in_memory(folder) else ""
    free = file.free_bytes()
    yield "spill directory", f"{folder}, {format_bytes(free)} free{vain}"
    yield "direct I/O", "yes" if file.direct else "no: copies pass through the page cache"
    file.close()
    if not free:
        yield "link to disk", "none: it is full"
        return
    driver = open_driver(torch.device("cpu"), folder, None)
    with warnings.catch_warnings(action="ignore"):  # the rows above already show it
        hardware = driver.hardware({Tier.DEVICE: memory_limit_bytes(), Tier.DISK: free})
    driver.close()
    yield from _links(hardware, Tier.DISK)


def _gpu() -> Iterator[tuple[str, str]]:
    """Rows on the link between the current GPU and the host; none without a GPU."""
    import torch  # noqa: PLC0415 - as above

    from outcore.execute.cuda import CudaDevice  # noqa: PLC0415 - loads torch
    from outcore.execute.queued import QueuedDriver  # noqa: PLC0415 - loads torch

    if torch.cuda.is_available():
        driver = QueuedDriver(CudaDevice(torch.device("cuda")))
        yield from host_links(driver, torch.cuda.mem_get_info()[0])
        driver.close()


def host_links(driver: QueuedDriver, free_bytes: int) -> Iterator[tuple[str, str]]:
    """Rows on the links of a device with `free_bytes` free, and their rates during compute."""
    hardware = driver.hardware({Tier.DEVICE: free_bytes, Tier.HOST: GPU_TRIAL_BYTES})
    if driver.links is None:
        yield "link to host", "none: the GPU shares the memory of the CPU"
        return
    yield from _links(hardware, Tier.HOST)
    out, back = driver.links.busy_out, driver.links.busy_in
    yield "while computing", f"{out:.0%} of the rate away, {back:.0%} back (in the rates above)"


def _links(hardware: Hardware, outer: Tier) -> Iterator[tuple[str, str]]:
    for name, ends in (("to", (Tier.DEVICE, outer)), ("from", (outer, Tier.DEVICE))):
        link = hardware.link(*ends)
        rate, latency = format_rate(link.bytes_per_second), format_seconds(link.latency_seconds)
        yield f"link {name} {outer.value}", f"{rate}, {latency} latency"
    yield "both directions", "at full rate together" if hardware.duplex else "share one rate"
