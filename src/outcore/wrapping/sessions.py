"""sessions: wrap a model in place, or all models of a session under one budget."""

from __future__ import annotations

from types import TracebackType
from typing import Self, TypeVar, Unpack
from weakref import WeakSet

import torch
from torch import nn

from outcore.errors import NotEngagedError, WrapError
from outcore.explain import Explanation
from outcore.report import Report
from outcore.runtime.backend import Backend
from outcore.runtime.settings.options import Keywords
from outcore.wrapping.call_wrapper import (
    WRAPPERS,
    calls_of,
    install_wrapper,
    is_compiled,
    remove_wrapper,
)

M = TypeVar("M", bound=nn.Module)

CONTAINERS = nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict
"""torch's modules that hold others, and cannot be called."""


def wrap(model: M, budget: str | float | None = None, **options: Unpack[Keywords]) -> M:
    """Keep the training steps of `model` inside a byte budget. Returns `model`, changed in place.

    The object, its parameters and the names in its `state_dict` stay the same; only what a call
    runs is compiled. Copies and pickles of the model are not wrapped. `handle(model)` is its
    Backend. If training calls bring nothing to plan, outcore warns; with `strict`, it raises
    NotEngagedError.

    - `budget`: the most device bytes of a step: "12GiB", bytes, "80%", a fraction of the device, or
      "auto" (what is free for this process), the default on a GPU.
    - `options`: `policy`, `host_budget`, `disk_budget`, `spill_dir`, `link_limit`, `drift`, `plan`,
      `overrides`, `fuse` and `strict`, as `outcore.runtime.settings.options.Options` lists them.

    If the model is wrapped already, the new Backend replaces the old one, as if you unwrapped the
    model first. Wrapped modules inside run under the budget of `model` when `model` is called, and
    under their own when they are called directly.

    Wrap the module that your training loop calls. Under DistributedDataParallel and FSDP2, wrap the
    module inside before you hand it over (docs/several-devices.md).

    Raises WrapError if the model is compiled already, is TorchScript's, or is a container such as
    ModuleList, which cannot be called, and as `Backend` does for options.
    """
    _check(model)
    return install_wrapper(model, Backend(budget, **options), owns=True)


def unwrap(model: M) -> M:
    """Undo `wrap` for `model` and all modules inside: calls run uncompiled. Returns `model`.

    Backends that `wrap` made for them are closed (`Backend.close`). A session's Backend stays open
    until the session ends. Raises WrapError if nothing in `model` is wrapped.
    """
    wrapped = [module for module in model.modules() if module in WRAPPERS]
    if not wrapped:
        raise _nothing_in(model)
    for module in wrapped:
        remove_wrapper(module)
    return model


def handle(model: nn.Module) -> Backend:
    """Return the Backend of a wrapped model.

    If `model` is not wrapped itself, this is the Backend of the wrapped modules inside. Raises
    WrapError if nothing in `model` is wrapped, or if the modules inside have several Backends.
    """
    if model in WRAPPERS:
        return WRAPPERS[model].backend
    inside = {WRAPPERS[module].backend for module in model.modules() if module in WRAPPERS}
    if not inside:
        raise _nothing_in(model)
    if len(inside) > 1:
        reason = "it contains modules wrapped with different budgets; pass one of these modules"
        raise WrapError(model=type(model).__name__, reason=reason)
    return inside.pop()


class Session:
    """One budget for everything that is wrapped while the session is open, given back at its end.

    >>> with outcore.session(budget="12GiB") as ooc:             # doctest: +SKIP
    ...     model = ooc.wrap(model)
    ...     train(model)
    ...     print(ooc.report())

    `backend` also works with `torch.compile(..., backend=...)`. In a notebook, you can call
    `close()` instead of using `with`.
    """

    def __init__(self, budget: str | float | None = None, **options: Unpack[Keywords]) -> None:
        self.backend = Backend(budget, **options)
        self._modules: WeakSet[nn.Module] = WeakSet()

    @property
    def wrapped(self) -> list[nn.Module]:
        """The modules under its budget: wrapped by it, and not unwrapped or wrapped anew since."""
        return [m for m in self._modules if m in WRAPPERS and WRAPPERS[m].backend is self.backend]

    @property
    def idle(self) -> list[nn.Module]:
        """The wrapped modules that have had no training call since they were wrapped."""
        return [module for module in self.wrapped if not WRAPPERS[module].trained]

    @property
    def hopeful(self) -> bool:
        """Whether some of its modules brought no graph, but may yet be compiled in parts."""
        return any(WRAPPERS[module].calls_to_wait for module in self.wrapped)

    @property
    def calls(self) -> int:
        """How many forward calls with a backward its graphs have had."""
        return calls_of(self.backend)

    def wrap(self, model: M) -> M:
        """Wrap `model` as `outcore.wrap` does, under this session's budget.

        An earlier budget of the model is replaced, and does not return when the session ends.
        Raises WrapError as `outcore.wrap` does.
        """
        _check(model)
        self._modules.add(install_wrapper(model, self.backend, owns=False))
        return model

    def report(self, *, bound: bool = False) -> Report:
        """Return the report, as `Backend.report` does."""
        return self.backend.report(bound=bound)

    def explain(self, most: int | None = None) -> list[Explanation]:
        """Return explanations, as `Backend.explain` does."""
        return self.backend.explain(most)

    def close(self) -> None:
        """Unwrap what was wrapped, and give back what the budget's engine holds.

        If a result that has not been differentiated is still alive, this waits until it is freed.
        What torch compiled for `backend` runs in-core from now on.
        """
        for module in self.wrapped:
            remove_wrapper(module)
        self._modules.clear()
        self.backend.close()

    def __enter__(self) -> Self:
        """Return the session itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the session.

        Raises NotEngagedError if it is `strict`, nothing was planned and there was no other error.
        """
        names = [type(module).__name__ for module in self._modules]
        self.close()
        if kind is None and self.backend.options.strict and not self.backend.engaged:
            raise NotEngagedError(model=", ".join(names) or "this session")


def session(budget: str | float | None = None, **options: Unpack[Keywords]) -> Session:
    """Open a session: one budget for a part of a program or notebook.

    The options are those of `Backend`.
    """
    return Session(budget, **options)


def _check(model: nn.Module) -> None:
    """Raise WrapError if `model` cannot be wrapped."""
    if not isinstance(model, nn.Module):
        reason = "it is not a torch.nn.Module; wrap the model, not its training step"
        raise WrapError(model=type(model).__name__, reason=reason)
    name = type(model).__name__
    if is_compiled(model):
        reason = (
            "it is already compiled; leave out torch.compile or its compile(), and wrap the model "
            "itself: outcore compiles it"
        )
        raise WrapError(model=name, reason=reason)
    if isinstance(model, torch.jit.ScriptModule):
        reason = "TorchScript runs it, in one piece; wrap the model that it was made from"
        raise WrapError(model=name, reason=reason)
    if isinstance(model, CONTAINERS) and type(model).forward is nn.Module.forward:
        reason = (
            "it cannot be called; wrap the model that contains it, or its modules in one "
            "outcore.session"
        )
        raise WrapError(model=name, reason=reason)


def _nothing_in(model: nn.Module) -> WrapError:
    return WrapError(
        model=type(model).__name__, reason="neither it nor a module inside it is wrapped"
    )
