"""frozen: notice which frozen modules a call runs as plain PyTorch although backward needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

WATCHED: WeakSet[nn.Module] = WeakSet()
"""Modules whose calls are noticed now."""


class PlainCalls:
    """Notices calls of modules by entry points, as a context.

    Calls that torch compiles do not go through the entry point, and backward needs a call if a
    result requires a gradient. Hooks on parameters, as for trained modules, would never run.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        """`modules`: path -> module. torch must not compile their calls by entry points."""
        self.used: set[str] = set()
        """The paths of those that were called."""
        self._modules = modules
        self._entry_points: dict[str, object] = {}

    def _install(self, path: str, module: nn.Module) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            results = module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # noqa: SLF001 - torch leaves it so
            if _asked(results):
                self.used.add(path)
            return results

        # Only the entry point itself is not compiled. What the module calls is, as without it.
        alone = torch.compiler.disable(call, recursive=False)  # type: ignore[no-untyped-call]  # torch leaves it so
        module._compiled_call_impl = self._entry_points[path] = alone  # noqa: SLF001 - what Module.compile sets
        WATCHED.add(module)

    def __enter__(self) -> Self:
        """Install the entry points."""
        for path, module in self._modules.items():
            self._install(path, module)
        return self

    def __exit__(self, *_: object) -> None:
        """Remove them, without a trace: torch's guards may look at the attributes of a module.

        If the call compiled or wrapped a module, that stays.
        """
        for path, module in self._modules.items():
            if vars(module).get("_compiled_call_impl") is self._entry_points[path]:
                del vars(module)["_compiled_call_impl"]
            WATCHED.discard(module)


def requires_gradient(results: Any) -> bool:
    """Whether any tensor in `results` requires a gradient."""
    return any(isinstance(r, torch.Tensor) and r.requires_grad for r in tree_leaves(results))


_asked: Callable[[Any], bool] = torch.compiler.disable(requires_gradient)  # type: ignore[no-untyped-call]  # torch leaves it so
"""The same in code that torch would compile: it would count as the model's."""
