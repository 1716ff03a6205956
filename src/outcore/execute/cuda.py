"""CudaDevice: a GPU as a device with queues: torch's streams, events and caching allocator.

Only `finish`, `wait_on_host`, `seconds` and `trim` wait for the device.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager

import torch

from outcore.execute.pinned import pinned, shrink
from outcore.execute.torch_allocator import expand

BLOCK_BYTES = 512
"""torch's allocator rounds sizes up to this, with expandable segments."""


class CudaDevice:
    """One GPU (`device.Device`), with a stream for copies in each direction."""

    rounding_bytes = BLOCK_BYTES

    def __init__(self, device: torch.device) -> None:
        given: int | None = device.index
        index = torch.cuda.current_device() if given is None else given
        self.device = torch.device("cuda", index)
        expand(self.device)
        properties = torch.cuda.get_device_properties(self.device)
        self.shares_memory = bool(getattr(properties, "is_integrated", False))
        # The compute queue waits for copies, so their streams have priority if engines are shared.
        self.out = _stream(self.device)
        self.into = _stream(self.device)
        self.stage = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch has no types for it
        self.generator = torch.cuda.default_generators[index]
        self.notes: tuple[str, ...] = ()

    def current(self) -> torch.cuda.Stream:
        """This thread's current stream."""
        return torch.cuda.current_stream(self.device)

    def is_capturing(self) -> bool:
        """Whether a CUDA graph captures this thread's current stream."""
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()

    def on(self, queue: torch.cuda.Stream) -> AbstractContextManager[object]:
        """Make the stream this thread's current one."""
        return torch.cuda.stream(queue)

    def event(self, *, timed: bool = False) -> torch.cuda.Event:
        """Make a CUDA event. A host that waits for it sleeps, unless the event is timed."""
        return torch.cuda.Event(enable_timing=timed, blocking=not timed)  # type: ignore[no-untyped-call]  # as above

    def record(self, event: torch.cuda.Event, queue: torch.cuda.Stream) -> None:
        """Record `event` on a stream."""
        event.record(queue)

    def wait(self, queue: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Let a stream wait for `event`."""
        queue.wait_event(event)

    def copy(self, queue: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy asynchronously on a stream."""
        # If a worker thread is on another device, leaving the stream context alone would make a
        # context there.
        with torch.cuda.device(self.device), torch.cuda.stream(queue):
            target.copy_(source, non_blocking=True)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocate from torch's allocator, on the current stream.

        Under `use_deterministic_algorithms`, `torch.empty` would fill the memory by a kernel.
        Otherwise it is better: if the allocator has to wait, other threads of Python go on.
        """
        if not torch.are_deterministic_algorithms_enabled():
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        memory = torch.UntypedStorage(nbytes, device=self.device)  # type: ignore[no-untyped-call]  # torch leaves it so
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(memory)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on a GPU: attention in float32 returns its seeds on the host."""
        return tensor.is_cuda

    def share(self, tensor: torch.Tensor, queue: torch.cuda.Stream) -> None:
        """Record a stream that uses the tensor; no effect if the tensor was made on that stream."""
        tensor.record_stream(queue)

    def trim(self) -> None:
        """Empty the allocator's cache."""
        torch.cuda.empty_cache()

    def retries(self) -> int:
        """The count of torch's allocator."""
        counts = torch.cuda.memory_stats_as_nested_dict(self.device)
        return int(counts.get("num_alloc_retries", 0))

    def host(self, nbytes: int) -> torch.Tensor:
        """Allocate registered host memory."""
        return pinned(nbytes, self.device, self._tell)

    def shrink(self, memory: torch.Tensor, nbytes: int) -> torch.Tensor:
        """Keep the first pages of registered host memory, registered again."""
        return shrink(memory, nbytes, self.device, self._tell)

    def _tell(self, refusal: str) -> None:
        """Warn about host memory that could not be locked, and note it for reports."""
        warnings.warn(refusal, stacklevel=2)
        self.notes = tuple(dict.fromkeys((*self.notes, refusal.removeprefix("outcore: "))))

    def finish(self, queue: torch.cuda.Stream) -> None:
        """Wait on the host for a stream."""
        queue.synchronize()

    def wait_on_host(self, event: torch.cuda.Event) -> None:
        """Wait on the host for `event`."""
        event.synchronize()

    def come(self, event: torch.cuda.Event) -> bool:
        """Whether the stream has run what precedes `event`."""
        return bool(event.query())  # type: ignore[no-untyped-call]  # as above

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        """Time between two events, in seconds. Waits for the second one."""
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e-3


def _stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of high priority, for copies."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]  # as above
