"""Read by each Python that is started for the simulated GPU: once torch is in, so are kernels."""  # noqa: INP001 - found by its name

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


class _Installing(Loader):
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self.loader.exec_module(module)
        from tests.simulated_gpu.kernels import install  # noqa: PLC0415 - it imports torch

        module._simulated_gpu = install()


class _Watching(MetaPathFinder):
    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            spec.loader = _Installing(spec.loader)
        return spec


sys.meta_path.insert(0, _Watching())
