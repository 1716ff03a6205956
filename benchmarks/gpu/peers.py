"""peers: other ways to move saved tensors to host memory, as users do today."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from benchmarks.kit.modes import Call

STREAM_OFFLOADERS = (
    ("trl.models.activation_offloading", "OffloadActivations"),
    ("torchtune.training", "OffloadActivations"),
)
"""Module and class of saved-tensor hooks that use a copy stream per direction."""


@dataclass(frozen=True, slots=True)
class SaveOnCpu:
    """torch's own saved-tensor hooks: every saved tensor goes to host memory and comes back."""

    name: str = "save_on_cpu"

    def apply(self, module: nn.Module) -> tuple[Call, None]:
        """The module under the hooks. Host memory is pinned if there is a GPU."""
        return _under(partial(save_on_cpu, pin_memory=torch.cuda.is_available()), module), None


@dataclass(frozen=True, slots=True)
class StreamOffload:
    """Saved-tensor hooks with their own streams, from libraries that have them."""

    name: str = "stream offloading"

    def apply(self, module: nn.Module) -> tuple[Call, None]:
        """The module under the hooks. Raises ImportError if none of the libraries is installed."""
        return _under(_stream_offloader(), module), None


def _stream_offloader() -> Callable[[], Any]:
    for path, name in STREAM_OFFLOADERS:
        try:
            found: Callable[[], Any] = getattr(import_module(path), name)
        except ImportError:
            continue
        return found
    libraries = " or ".join(path.partition(".")[0] for path, _ in STREAM_OFFLOADERS)
    raise ImportError(f"needs {libraries}")


def _under(hooks: Callable[[], Any], module: nn.Module) -> Call:
    def call(*args: Any) -> Any:
        with hooks():
            return module(*args)

    return call
