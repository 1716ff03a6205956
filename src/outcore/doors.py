"""doors: outcore around a model, in place, and around a stretch of a notebook."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch._dynamo import OptimizedModule

from outcore.errors import NotEngagedError, WrapError
from outcore.explain import Explanation
from outcore.report import Report
from outcore.runtime.backend import Backend

M = TypeVar("M", bound=nn.Module)
Call = Callable[..., Any]

MOST_SHAPES = 64
"""Shapes of inputs that a wrapped model is compiled for; with yet another it runs plainly."""

_backends: WeakKeyDictionary[nn.Module, Backend] = WeakKeyDictionary()
"""Of each module that is wrapped."""


def wrap(model: M, budget: str | float | None = None, **options: Any) -> M:
    """Keep the training steps of `model` inside a byte budget. Returns `model`, changed in place.

    The object stays the same and so do its parameters and the names of its `state_dict`; only what
    a call of it runs is compiled. Copies and pickles of it are plain. `budget` and `options` are
    those of `Backend`, and `handle(model)` is the Backend. Where the first training call brings it
    nothing to do, a warning says so; with `strict` that is a NotEngagedError.

    Wrap what is called in the training loop, or, under DistributedDataParallel and FSDP2, the
    module inside, before it is handed over (docs/several-devices.md).

    Raises WrapError for what is compiled already, and as `Backend` does for options.
    """
    _check(model)
    return _wrap(model, Backend(budget, **options))


def unwrap(model: M) -> M:
    """Undo `wrap`: calls run plainly from now on. Returns `model`. Raises WrapError as `handle`."""
    wrapped = _wrapped(model)
    del _backends[wrapped]
    wrapped._compiled_call_impl = None  # noqa: SLF001 - what Module.compile sets
    return model


def handle(model: nn.Module) -> Backend:
    """The Backend of a wrapped model, or of the one wrapped module inside of it.

    Raises WrapError where nothing in `model` is wrapped, or more than one Backend is there.
    """
    return _backends[_wrapped(model)]


class Session:
    """One budget for all that is wrapped while it is open, given back at its end.

    >>> with outcore.session(budget="12GiB") as ooc:             # doctest: +SKIP
    ...     model = ooc.wrap(model)
    ...     train(model)
    ...     print(ooc.report())

    `backend` serves `torch.compile(..., backend=...)` too. A notebook may go without `with`, and
    call `close()`.
    """

    def __init__(self, budget: str | float | None = None, **options: Any) -> None:
        self.backend = Backend(budget, **options)
        self._modules: WeakSet[nn.Module] = WeakSet()

    def wrap(self, model: M) -> M:
        """As `outcore.wrap`, under this session's budget. Raises WrapError as that does."""
        _check(model)
        self._modules.add(_wrap(model, self.backend))
        return model

    def report(self, *, bound: bool = False) -> Report:
        """As `Backend.report`."""
        return self.backend.report(bound=bound)

    def explain(self, most: int | None = None) -> list[Explanation]:
        """As `Backend.explain`."""
        return self.backend.explain(most)

    def close(self) -> None:
        """Unwrap what was wrapped, and give back what the budget's engine holds.

        That waits for the garbage collector where a result is still alive that has not been
        differentiated. What torch compiled for `backend` runs in-core from now on.
        """
        for module in self._modules:
            if _backends.get(module) is self.backend:
                unwrap(module)
        self._modules.clear()
        self.backend.close()

    def __enter__(self) -> Self:
        """The session itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close. Raises NotEngagedError where it is strict, and nothing went wrong or ran."""
        wrapped = [type(module).__name__ for module in self._modules]
        self.close()
        if kind is None and self.backend.options.strict and not self.backend.engaged:
            raise NotEngagedError(model=", ".join(wrapped) or "this session")


def session(budget: str | float | None = None, **options: Any) -> Session:
    """One budget for a stretch of a program or a notebook. Options are those of `Backend`."""
    return Session(budget, **options)


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        reason = "it is no torch.nn.Module; wrap the model, not its step"
        raise WrapError(model=type(model).__name__, reason=reason)
    name = type(model).__name__
    if isinstance(model, OptimizedModule) or (
        model._compiled_call_impl is not None and model not in _backends  # noqa: SLF001 - as above
    ):
        reason = "it is compiled already; wrap the model that was given to torch.compile"
        raise WrapError(model=name, reason=reason)


def _apart() -> dict[str, Any]:
    """How torch is to compile what is wrapped: each shape by itself, and apart from other models.

    Otherwise a batch of another size makes sizes symbolic, which cannot be planned; and all that is
    wrapped would share torch's limit of eight compilations, past which nothing is compiled. (Torch
    before 2.13 has that limit all the same.)
    """
    known = inspect.signature(torch.compile).parameters
    wanted: dict[str, Any] = {"isolate_recompiles": True, "recompile_limit": MOST_SHAPES}
    return {"dynamic": False, **{name: wanted[name] for name in wanted if name in known}}


def _run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What is compiled of a module: torch's own (nn.Sequential, ...) it compiles only inside it."""
    return self._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch leaves it so


def _wrap(model: M, backend: Backend) -> M:
    run: Call = torch.compile(_run, backend=backend, **_apart())
    own = ref(model)

    def call(*args: Any, **kwargs: Any) -> Any:
        return run(own(), *args, **kwargs)

    def first_call(*args: Any, **kwargs: Any) -> Any:
        watched = model.training and torch.is_grad_enabled()
        results = call(*args, **kwargs)
        if watched:
            model._compiled_call_impl = call  # noqa: SLF001 - as above
            _look_for_work(model, backend)
        return results

    model._compiled_call_impl = first_call  # noqa: SLF001 - what Module.compile sets
    _backends[model] = backend
    return model


def _look_for_work(model: nn.Module, backend: Backend) -> None:
    """Say where a training call of `model` brought nothing to plan, unless that has been said."""
    if backend.engaged or backend.notes:
        return
    error = NotEngagedError(model=type(model).__name__)
    if backend.options.strict:
        raise error
    warnings.warn(str(error), stacklevel=3)


def _wrapped(model: nn.Module) -> nn.Module:
    inside = [module for module in model.modules() if module in _backends]
    if len({id(_backends[module]) for module in inside}) == 1:
        return inside[0]
    name = type(model).__name__
    reason = "it has modules wrapped with different budgets; ask for one of them"
    raise WrapError(model=name, reason=reason if inside else "nothing in it is wrapped")
