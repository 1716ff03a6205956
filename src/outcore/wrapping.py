"""wrapping: outcore around a model, in place, and around a stretch of a notebook."""

from __future__ import annotations

from types import TracebackType
from typing import Self, TypeVar, Unpack
from weakref import WeakSet

from torch import nn

from outcore.call_wrapper import WRAPPERS, calls_of, install_wrapper, is_compiled, remove_wrapper
from outcore.errors import NotEngagedError, WrapError
from outcore.explain import Explanation
from outcore.report import Report
from outcore.runtime.backend import Backend
from outcore.runtime.options import Keywords

M = TypeVar("M", bound=nn.Module)


def wrap(model: M, budget: str | float | None = None, **options: Unpack[Keywords]) -> M:
    """Keep the training steps of `model` inside a byte budget. Returns `model`, changed in place.

    The object stays the same and so do its parameters and the names of its `state_dict`; only what
    a call of it runs is compiled. Copies and pickles of it are plain. `budget` and `options` are
    those of `Backend`, and `handle(model)` is the Backend. Where training calls bring it nothing to
    do, a warning says so; with `strict` that is a NotEngagedError.

    A model that is wrapped already gets the new Backend in place of the one it had, as if it were
    unwrapped first. Modules inside that are wrapped run under the budget of `model` in its calls,
    and under their own where they are called by themselves.

    Wrap what is called in the training loop, or, under DistributedDataParallel and FSDP2, the
    module inside, before it is handed over (docs/several-devices.md).

    Raises WrapError for what is compiled already, and as `Backend` does for options.
    """
    _check(model)
    return install_wrapper(model, Backend(budget, **options), owns=True)


def unwrap(model: M) -> M:
    """Undo `wrap` for `model` and all modules inside: calls run plainly. Returns `model`.

    Backends that `wrap` made for them are closed (`Backend.close`); one of a session goes on until
    the session ends. Raises WrapError where nothing in `model` is wrapped.
    """
    wrapped = [module for module in model.modules() if module in WRAPPERS]
    if not wrapped:
        raise _nothing_in(model)
    for module in wrapped:
        remove_wrapper(module)
    return model


def handle(model: nn.Module) -> Backend:
    """The Backend of a wrapped model; where it is not wrapped itself, that of the modules inside.

    Raises WrapError where nothing in `model` is wrapped, or more than one Backend is inside.
    """
    if model in WRAPPERS:
        return WRAPPERS[model].backend
    inside = {WRAPPERS[module].backend for module in model.modules() if module in WRAPPERS}
    if not inside:
        raise _nothing_in(model)
    if len(inside) > 1:
        reason = "it has modules wrapped with different budgets; ask for one of them"
        raise WrapError(model=type(model).__name__, reason=reason)
    return inside.pop()


class Session:
    """One budget for all that is wrapped while it is open, given back at its end.

    >>> with outcore.session(budget="12GiB") as ooc:             # doctest: +SKIP
    ...     model = ooc.wrap(model)
    ...     train(model)
    ...     print(ooc.report())

    `backend` serves `torch.compile(..., backend=...)` too. A notebook may go without `with`, and
    call `close()`.
    """

    def __init__(self, budget: str | float | None = None, **options: Unpack[Keywords]) -> None:
        self.backend = Backend(budget, **options)
        self._modules: WeakSet[nn.Module] = WeakSet()

    @property
    def wrapped(self) -> list[nn.Module]:
        """The modules under its budget: wrapped in it, and neither unwrapped nor replaced since."""
        return [m for m in self._modules if m in WRAPPERS and WRAPPERS[m].backend is self.backend]

    @property
    def idle(self) -> list[nn.Module]:
        """Those of them that had no training call since they were wrapped."""
        return [module for module in self.wrapped if not WRAPPERS[module].trained]

    @property
    def hopeful(self) -> bool:
        """Whether some of them came to no graph, and may yet do so in parts."""
        return any(WRAPPERS[module].hope for module in self.wrapped)

    @property
    def calls(self) -> int:
        """Forward calls of graphs with a backward, so far."""
        return calls_of(self.backend)

    def wrap(self, model: M) -> M:
        """As `outcore.wrap`, under this session's budget. Raises WrapError as that does.

        A budget that the model had gives way to it, and does not come back at the session's end.
        """
        _check(model)
        self._modules.add(install_wrapper(model, self.backend, owns=False))
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
        for module in self.wrapped:
            remove_wrapper(module)
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
        names = [type(module).__name__ for module in self._modules]
        self.close()
        if kind is None and self.backend.options.strict and not self.backend.engaged:
            raise NotEngagedError(model=", ".join(names) or "this session")


def session(budget: str | float | None = None, **options: Unpack[Keywords]) -> Session:
    """One budget for a stretch of a program or a notebook. Options are those of `Backend`."""
    return Session(budget, **options)


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        reason = "it is not a torch.nn.Module; wrap the model, not its step"
        raise WrapError(model=type(model).__name__, reason=reason)
    name = type(model).__name__
    if is_compiled(model):
        reason = "it is compiled already; wrap the model that was given to torch.compile"
        raise WrapError(model=name, reason=reason)


def _nothing_in(model: nn.Module) -> WrapError:
    return WrapError(model=type(model).__name__, reason="nothing in it is wrapped")
