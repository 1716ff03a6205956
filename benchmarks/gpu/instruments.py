"""Instruments: what has to be asked of a device to time a step and to weigh it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from outcore.execute.malloc import own_malloc


@dataclass(frozen=True, slots=True)
class Peaks:
    """The most memory since it was reset; None where the device keeps no such count."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None


class Instruments(Protocol):
    """One device, as a stopwatch and a scale."""

    device: torch.device
    total_bytes: int | None
    """Of the device; None where its memory is everybody's."""

    def cap(self, nbytes: int) -> None:
        """Let this process take no more than `nbytes` of the device, where it can be held to it."""
        ...

    def finish(self) -> None:
        """Wait until the device has nothing left to do."""
        ...

    def reset(self) -> None:
        """Let the peaks begin anew."""
        ...

    def peaks(self) -> Peaks:
        """The most memory since then."""
        ...


class CudaInstruments:
    """A GPU. The counts are those of torch's allocator, whoever calls it."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.device)
        self.total_bytes: int | None = properties.total_memory

    def cap(self, nbytes: int) -> None:
        """By torch's allocator, which then fails as on a smaller GPU."""
        assert self.total_bytes is not None
        fraction = min(1.0, nbytes / self.total_bytes)
        torch.cuda.set_per_process_memory_fraction(fraction, self.device)

    def finish(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self.device)

    def reset(self) -> None:
        """Both counts."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peaks(self) -> Peaks:
        """Of blocks in use, and of segments taken from the driver."""
        allocated = torch.cuda.max_memory_allocated(self.device)
        return Peaks(allocated, torch.cuda.max_memory_reserved(self.device))


class CpuInstruments:
    """A CPU, with malloc tuned as for everybody else who is compared."""

    def __init__(self) -> None:
        own_malloc()
        self.device = torch.device("cpu")
        self.total_bytes: int | None = None

    def cap(self, nbytes: int) -> None:
        """Nothing: a process cannot be held to a part of the memory for tensors."""

    def finish(self) -> None:
        """Nothing: the host is the device."""

    def reset(self) -> None:
        """Nothing is counted."""

    def peaks(self) -> Peaks:
        """Unknown: see `Trainer.metered_bytes`."""
        return Peaks()


def instruments(device: str) -> Instruments:
    """Those of a kind of device. RuntimeError where there is none of it."""
    return CudaInstruments() if device == "cuda" else CpuInstruments()
