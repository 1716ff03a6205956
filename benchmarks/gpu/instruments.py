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
    retries: int | None = None
    """How often the allocator had to give all its free memory back to serve a request."""
    refused: int | None = None
    """How often not even that was enough: cuDNN then takes a slower way, without a word."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Of the device: all of it, and what this process has taken now."""

    total_bytes: int
    reserved_bytes: int


class Instruments(Protocol):
    """One device, as a stopwatch and a scale."""

    device: torch.device

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

    def refused(self) -> int | None:
        """How often in all a request was, in this process; None where nobody counts."""
        ...

    def memory(self) -> Memory | None:
        """Now; None where the device's memory is everybody's."""
        ...

    def release(self) -> None:
        """Give back what the allocator keeps for later."""
        ...


class CudaInstruments:
    """A GPU. The counts are those of torch's allocator, whoever calls it."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._retries = self._refused = 0

    def cap(self, nbytes: int) -> None:
        """By torch's allocator, which counts a request whole: it is stricter than a smaller GPU."""
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), self.device)

    def finish(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self.device)

    def reset(self) -> None:
        """All counts."""
        torch.cuda.reset_peak_memory_stats(self.device)
        self._retries, self._refused = self._all("num_alloc_retries"), self.refused()

    def peaks(self) -> Peaks:
        """Of blocks in use, and of segments taken from the driver."""
        return Peaks(
            torch.cuda.max_memory_allocated(self.device),
            torch.cuda.max_memory_reserved(self.device),
            self._all("num_alloc_retries") - self._retries,
            self.refused() - self._refused,
        )

    def refused(self) -> int:
        """Since the process began."""
        return self._all("num_ooms")

    def memory(self) -> Memory | None:
        """Of the whole GPU, and of torch's allocator."""
        total = torch.cuda.get_device_properties(self.device).total_memory
        return Memory(total, torch.cuda.memory_reserved(self.device))

    def release(self) -> None:
        """The segments without blocks in use."""
        torch.cuda.empty_cache()

    def _all(self, count: str) -> int:
        return int(torch.cuda.memory_stats(self.device).get(count, 0))


class CpuInstruments:
    """A CPU, with malloc tuned as for everybody else who is compared."""

    def __init__(self) -> None:
        own_malloc()
        self.device = torch.device("cpu")

    def cap(self, nbytes: int) -> None:
        """Nothing: a process cannot be held to a part of the memory for tensors."""

    def finish(self) -> None:
        """Nothing: the host is the device."""

    def reset(self) -> None:
        """Nothing is counted."""

    def peaks(self) -> Peaks:
        """Unknown: see `Trainer.metered_bytes`."""
        return Peaks()

    def refused(self) -> int | None:
        """None: nobody counts."""
        return None

    def memory(self) -> Memory | None:
        """None: everybody's."""
        return None

    def release(self) -> None:
        """Nothing: malloc was told what to keep."""


def instruments(device: str) -> Instruments:
    """Those of a kind of device. RuntimeError where there is none of it."""
    return CudaInstruments() if device == "cuda" else CpuInstruments()
