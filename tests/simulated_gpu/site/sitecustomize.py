"""sitecustomize: install the simulated GPU's kernels as soon as a Python process imports torch."""  # noqa: INP001 - found by its name

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

COMPUTES = os.environ.get("SIMULATED_GPU_COMPUTES", "1") != "0"


def _play_kernels(torch: Any) -> None:
    from tests.simulated_gpu.kernels import install  # noqa: PLC0415 - it imports torch

    torch._simulated_gpu = install()


def _leave_pages_untouched(pinned: Any) -> None:
    """Skip touching pinned memory if nothing is computed: pages never touched use no memory."""
    if not COMPUTES:
        pinned.touch = lambda _: None


AFTER: dict[str, Callable[[Any], None]] = {
    "torch": _play_kernels,
    "outcore.execute.pinned": _leave_pages_untouched,
}


class _Then(Loader):
    """Loads a module, and calls `then` with it."""

    def __init__(self, loader: Any, then: Callable[[Any], None]) -> None:
        self.loader, self.then = loader, then

    def create_module(self, spec: ModuleSpec) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self.loader.exec_module(module)
        self.then(module)


class _Watching(MetaPathFinder):
    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        then = AFTER.pop(name, None)
        if then is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None:
            spec.loader = _Then(spec.loader, then)
        return spec


sys.meta_path.insert(0, _Watching())
