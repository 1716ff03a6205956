"""Spill: the baseline that anybody can write: saved-tensor hooks that write tensors to files."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.kit.modes import Call, spill_folder
from outcore.units import parse_rate

MIN_BYTES = 64 * 2**10
"""Smaller tensors stay in memory, as with outcore's policies."""


class SpilledTensor:
    """A tensor in its own file, which is deleted together with this object."""

    def __init__(self, tensor: Tensor, path: Path, bytes_per_second: float | None) -> None:
        self.path, self.bytes_per_second = path, bytes_per_second
        self.dtype, self.shape = tensor.dtype, tensor.shape
        with self._at_most_at_the_rate(tensor.nbytes), path.open("wb", buffering=0) as file:
            _move(file.write, tensor.contiguous())

    def load(self) -> Tensor:
        """The tensor, read back into torch's memory."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        with self._at_most_at_the_rate(tensor.nbytes), self.path.open("rb", buffering=0) as file:
            _move(file.readinto, tensor)
        return tensor

    def __del__(self) -> None:
        self.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _at_most_at_the_rate(self, nbytes: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.bytes_per_second is not None:
            rest = nbytes / self.bytes_per_second - (time.perf_counter() - start)
            time.sleep(max(0.0, rest))


class SpillHooks:
    """Saved-tensor hooks that keep parameters and small tensors, and spill all others.

    `bytes_per_second` slows each copy down to that rate, like the throttle of outcore's driver.
    """

    def __init__(
        self, parameters: Iterable[Tensor], folder: Path, bytes_per_second: float | None = None
    ) -> None:
        self._kept = {p.untyped_storage().data_ptr() for p in parameters}
        self._folder = Path(tempfile.mkdtemp(prefix="spill-", dir=folder))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._bytes_per_second = bytes_per_second
        self._count = 0

    def hooks(self) -> saved_tensors_hooks:
        """The context in which the forward pass has to run."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | SpilledTensor:
        if tensor.nbytes < MIN_BYTES or tensor.untyped_storage().data_ptr() in self._kept:
            return tensor
        self._count += 1
        path = self._folder / str(self._count)
        return SpilledTensor(tensor, path, self._bytes_per_second)

    def _unpack(self, packed: Tensor | SpilledTensor) -> Tensor:
        return packed.load() if isinstance(packed, SpilledTensor) else packed


def _move(call: Callable[[memoryview], int | None], tensor: Tensor) -> None:
    """Write or read all bytes of a contiguous tensor; the kernel may stop early."""
    rest = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    while rest:
        moved = call(rest)
        if not moved:
            raise OSError("no progress")
        rest = rest[moved:]


@dataclass(frozen=True, slots=True)
class Spill:
    """Saved-tensor hooks that write each tensor to a file."""

    link_limit: str | None = None
    name: str = "saved_tensors_hooks to disk"

    def apply(self, module: nn.Module) -> tuple[Call, None]:
        """The module under the hooks."""
        rate = None if self.link_limit is None else parse_rate(self.link_limit)
        spill = SpillHooks(module.parameters(), spill_folder(), rate)

        def call(*args: Any) -> Any:
            with spill.hooks():
                return module(*args)

        return call, None
