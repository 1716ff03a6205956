"""instruments: time steps on a device, and measure its memory."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import Protocol

import torch

from outcore.execute.malloc import own_malloc
from outcore.gauges import own_refusals

CLOCKS = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"


@dataclass(frozen=True, slots=True)
class Peaks:
    """The highest counts since the last reset; None if the device does not keep the count."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    retries: int | None = None
    """How often the allocator had to release all its free memory to serve a request."""
    refused: int | None = None
    """How often even that was not enough: cuDNN then silently uses a slower algorithm."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the device: all of it, and what this process has reserved now."""

    total_bytes: int
    reserved_bytes: int


class Instruments(Protocol):
    """One device, seen as a stopwatch and a memory meter."""

    device: torch.device

    def cap(self, nbytes: int) -> None:
        """Limit this process to `nbytes` of the device, if the device supports that."""
        ...

    def finish(self) -> None:
        """Wait until the device has nothing left to do."""
        ...

    def reset(self) -> None:
        """Reset the peaks."""
        ...

    def peaks(self) -> Peaks:
        """The peaks since the last reset."""
        ...

    def refused(self) -> int | None:
        """How many requests of this process were refused; None if the device does not count."""
        ...

    def memory(self) -> Memory | None:
        """The device's memory now; None if it is shared with the host."""
        ...

    def release(self) -> None:
        """Release what the allocator keeps for later."""
        ...

    def clocks(self) -> str | None:
        """Clocks, power, and what limits them now; None if nothing tells."""
        ...


class CudaInstruments:
    """A GPU. The counts are those of torch's allocator, for all its users in this process."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._retries = self._refused = 0

    def cap(self, nbytes: int) -> None:
        """Limit torch's allocator, which counts whole requests: stricter than a smaller GPU."""
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), self.device)

    def finish(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self.device)

    def reset(self) -> None:
        """Reset all counts."""
        torch.cuda.reset_peak_memory_stats(self.device)
        self._retries, self._refused = self._all("num_alloc_retries"), self.refused()

    def peaks(self) -> Peaks:
        """Peaks of blocks in use and of segments taken from the driver, and counts of failures."""
        return Peaks(
            torch.cuda.max_memory_allocated(self.device),
            torch.cuda.max_memory_reserved(self.device),
            self._all("num_alloc_retries") - self._retries,
            self.refused() - self._refused,
        )

    def refused(self) -> int:
        """Failed requests since the process began, without those of outcore that were tries."""
        return self._all("num_ooms") - own_refusals()

    def memory(self) -> Memory | None:
        """Memory of the whole GPU, and what torch's allocator has reserved."""
        total = torch.cuda.get_device_properties(self.device).total_memory
        return Memory(total, torch.cuda.memory_reserved(self.device))

    def release(self) -> None:
        """Release the segments without blocks in use."""
        torch.cuda.empty_cache()

    def clocks(self) -> str | None:
        """What nvidia-smi says of this GPU."""
        uuid = getattr(torch.cuda.get_device_properties(self.device), "uuid", None)
        command = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader"]
        if uuid is not None:
            command += ["--id", f"GPU-{uuid}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return f"{CLOCKS}: {done.stdout.strip()}"

    def _all(self, count: str) -> int:
        return int(torch.cuda.memory_stats(self.device).get(count, 0))


class CpuInstruments:
    """A CPU, with malloc tuned as for all others that are compared."""

    def __init__(self) -> None:
        own_malloc()
        self.device = torch.device("cpu")

    def cap(self, nbytes: int) -> None:
        """Do nothing: a process cannot be limited to a part of the memory for tensors."""

    def finish(self) -> None:
        """Do nothing: the host is the device."""

    def reset(self) -> None:
        """Do nothing: nothing is counted."""

    def peaks(self) -> Peaks:
        """Unknown; see `Trainer.metered_bytes`."""
        return Peaks()

    def refused(self) -> int | None:
        """None: nothing is counted."""
        return None

    def memory(self) -> Memory | None:
        """None: the memory is shared with the host."""
        return None

    def release(self) -> None:
        """Do nothing: malloc has been told what to keep."""

    def clocks(self) -> str | None:
        """None: nothing tells."""
        return None


def instruments(device: str) -> Instruments:
    """The instruments for a kind of device. RuntimeError if there is no such device."""
    return CudaInstruments() if device == "cuda" else CpuInstruments()
