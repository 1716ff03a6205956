"""A CUDA device as queues: torch's streams and events, and its caching allocator.

Nothing here waits for the device, but for `finish`, `attend`, `seconds` and `trim`.
"""

from __future__ import annotations

import os
import warnings
from contextlib import AbstractContextManager

import torch
from torch._C import _accelerator_setAllocatorSettings as set_allocator

from outcore.execute.pinned import pinned, shrink
from outcore.execute.segments import (
    EXPANDABLE,
    ROUNDING,
    asked,
    expanding,
    expands,
    rounds_up,
)

BLOCK_BYTES = 512
"""What torch's allocator rounds sizes up to, with segments that expand."""


class CudaDevice:
    """One GPU (`device.Device`), with a stream for copies in each direction."""

    rounding_bytes = BLOCK_BYTES

    def __init__(self, device: torch.device) -> None:
        given: int | None = device.index
        index = torch.cuda.current_device() if given is None else given
        self.device = torch.device("cuda", index)
        _set_allocator()
        properties = torch.cuda.get_device_properties(self.device)
        self.shares_memory = bool(getattr(properties, "is_integrated", False))
        # Copies are what the compute queue waits for: they go first where engines are shared.
        self.out = _stream(self.device)
        self.into = _stream(self.device)
        self.stage = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # as above
        self.generator = torch.cuda.default_generators[index]
        self.notes: tuple[str, ...] = ()

    def current(self) -> torch.cuda.Stream:
        """This thread's current stream."""
        return torch.cuda.current_stream(self.device)

    def on(self, queue: torch.cuda.Stream) -> AbstractContextManager[object]:
        """The stream as this thread's current one."""
        return torch.cuda.stream(queue)

    def event(self, *, timed: bool = False) -> torch.cuda.Event:
        """A CUDA event; a host that waits for it sleeps, unless it is timed."""
        return torch.cuda.Event(enable_timing=timed, blocking=not timed)  # type: ignore[no-untyped-call]  # torch has no types for it

    def record(self, event: torch.cuda.Event, queue: torch.cuda.Stream) -> None:
        """Record `event` on a stream."""
        event.record(queue)

    def wait(self, queue: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Let a stream wait for `event`."""
        queue.wait_event(event)

    def copy(self, queue: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """An asynchronous copy on a stream."""
        # Where a worker is on another device, leaving a stream alone would make a context there.
        with torch.cuda.device(self.device), torch.cuda.stream(queue):
            target.copy_(source, non_blocking=True)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory from torch's allocator, on the current stream."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it is on a GPU: attention in float32 gives its seeds on the host."""
        return tensor.is_cuda

    def share(self, tensor: torch.Tensor, queue: torch.cuda.Stream) -> None:
        """Record a stream that uses it; nothing where it was made on that."""
        tensor.record_stream(queue)

    def trim(self) -> None:
        """Empty the allocator's cache."""
        torch.cuda.empty_cache()

    def host(self, nbytes: int) -> torch.Tensor:
        """Registered host memory."""
        return pinned(nbytes, self.device, self._tell)

    def shrink(self, memory: torch.Tensor, nbytes: int) -> torch.Tensor:
        """The same pages, registered anew."""
        return shrink(memory, nbytes, self.device, self._tell)

    def _tell(self, refusal: str) -> None:
        warnings.warn(refusal, stacklevel=2)
        self.notes = tuple(dict.fromkeys((*self.notes, refusal.removeprefix("outcore: "))))

    def finish(self, queue: torch.cuda.Stream) -> None:
        """Wait on the host for a stream."""
        queue.synchronize()

    def attend(self, event: torch.cuda.Event) -> None:
        """Wait on the host for `event`."""
        event.synchronize()

    def come(self, event: torch.cuda.Event) -> bool:
        """Whether a stream has run what was before `event`."""
        return bool(event.query())  # type: ignore[no-untyped-call]  # as above

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        """Time between two events, in seconds; waits for the second."""
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e-3


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]  # as above


def _set_allocator() -> None:
    """Let segments grow, besides what the user has set, and tell what of that is in the way."""
    name, text = asked(os.environ)
    said = expands(text)
    if said is None:
        set_allocator(expanding(text))
    elif not said:
        warnings.warn(
            f"outcore: without {EXPANDABLE} in {name}, memory between tensors is lost, and a step "
            "may take more than is predicted",
            stacklevel=2,
        )
    if rounds_up(text):
        warnings.warn(
            f"outcore: with {ROUNDING} in {name}, blocks are larger than tensors, and a step may "
            "take more than is predicted",
            stacklevel=2,
        )
