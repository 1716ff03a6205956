"""doors: outcore around a model, in place, and around a stretch of a notebook."""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any, Self, TypeVar, Unpack
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch
from torch import nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import OptimizedModule
from torch._dynamo.eval_frame import remove_from_cache
from torch._dynamo.utils import counters
from torch.fx import GraphModule

from outcore.aside import Aside, own, pieces
from outcore.capture import is_recurrent, recurrent_apart, runs_plainly
from outcore.errors import NotEngagedError, WrapError
from outcore.explain import Explanation
from outcore.report import Report
from outcore.runtime.backend import Backend
from outcore.runtime.options import Keywords

M = TypeVar("M", bound=nn.Module)
Call = Callable[..., Any]

PLAINLY = (
    "a call inside a transform (torch.func, forward-mode AD), a dispatch mode (one that counts "
    "FLOPs, fake tensors) or torch.jit.trace ran plainly: no budget holds there"
)

UNSEEN = (
    "a training call came to no graph: torch.compile runs it plainly, as it does past so many "
    "shapes of inputs, and no budget holds there. TORCH_LOGS=recompiles,graph_breaks says why"
)

UNSEEN_PART = (
    "a part of the model came with more shapes than torch.compile takes: where it comes with yet "
    "others it runs plainly, and no budget holds there. Pad its inputs to a few sizes; "
    "TORCH_LOGS=recompiles says what differs"
)

ASIDE = (
    "torch.compile takes nothing of what calls {names}: that runs plainly, and no budget holds "
    "there. TORCH_LOGS=graph_breaks says why"
)

ALONE = (
    "parts of the model are compiled by themselves, each a graph or more, for torch.compile takes "
    "nothing of what calls them: {names}. TORCH_LOGS=graph_breaks says why"
)

HOPE = 16
"""Calls in which a model that came to no graph may yet be compiled in parts: a step is to end."""

MOST_NAMED = 3
"""Modules that a note names; it counts the others."""

LOOKS = 2
"""Training steps whose backward tells what no graph has: the second, once more was compiled."""

LIMIT = "Dynamo recompile limit exceeded"
"""So begins what torch counts where it compiles a function for no more shapes."""

CALLERS = 7
"""From where a door warns to where its model is called."""

NOT_TRACED = str(Path(torch.__file__).parent), str(Path(__file__).parent)
"""Where code lies that torch never compiles by itself."""

MOST_SHAPES = 64
"""Shapes of inputs that a wrapped model is compiled for; with yet another it runs plainly.

Torch before 2.13 takes no limit from us: there it is torch._dynamo.config.recompile_limit, 8.
"""


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
    return _wrap(model, Backend(budget, **options), owns=True)


def unwrap(model: M) -> M:
    """Undo `wrap` for `model` and all modules inside: calls run plainly. Returns `model`.

    Backends that `wrap` made for them are closed (`Backend.close`); one of a session goes on until
    the session ends. Raises WrapError where nothing in `model` is wrapped.
    """
    wrapped = [module for module in model.modules() if module in _doors]
    if not wrapped:
        raise _nothing_in(model)
    for module in wrapped:
        _unwrap(module)
    return model


def handle(model: nn.Module) -> Backend:
    """The Backend of a wrapped model; where it is not wrapped itself, that of the modules inside.

    Raises WrapError where nothing in `model` is wrapped, or more than one Backend is inside.
    """
    if model in _doors:
        return _doors[model].backend
    inside = {_doors[module].backend for module in model.modules() if module in _doors}
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
        return [m for m in self._modules if m in _doors and _doors[m].backend is self.backend]

    @property
    def idle(self) -> list[nn.Module]:
        """Those of them that had no training call since they were wrapped."""
        return [module for module in self.wrapped if not _doors[module].trained]

    @property
    def hopeful(self) -> bool:
        """Whether some of them came to no graph, and may yet do so in parts."""
        return any(_doors[module].hope for module in self.wrapped)

    @property
    def calls(self) -> int:
        """Forward calls of graphs with a backward, so far."""
        return _calls(self.backend)

    def wrap(self, model: M) -> M:
        """As `outcore.wrap`, under this session's budget. Raises WrapError as that does.

        A budget that the model had gives way to it, and does not come back at the session's end.
        """
        _check(model)
        self._modules.add(_wrap(model, self.backend, owns=False))
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
            _unwrap(module)
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


class _Door:
    """What the calls of a wrapped module go through."""

    def __init__(
        self, model: nn.Module, backend: Backend, *, owns: bool, inner: bool = False
    ) -> None:
        self.backend, self.owns = backend, owns
        """`owns`: the Backend is for this module alone."""
        self.trained = inner
        """Whether a training call came back, of this module or the wrapped one it is inside of."""
        self._noted = False
        """Whether a call of this module brought the Backend a note."""
        self._told = inner
        """Whether it was said that its training calls bring nothing to plan."""
        self.hope = 0
        """In how many calls more there may yet be something to plan."""
        self._looks = 0 if inner else LOOKS
        if self._looks:
            backend.parameters.lookers.add(self)
        self._aside: Aside | None = None
        """What tells, after a training call, which of its parameters no graph has."""
        self._skipped = False
        """Whether torch tried in vain to compile some code of its calls until it was trained."""
        self.inner: WeakSet[nn.Module] = WeakSet()
        """Modules inside that are compiled by themselves, as the model is not."""
        self._model = ref(model)
        self._is_recurrent: bool | None = None
        """Whether graphs are to end at recurrent layers; None before the first call."""
        self._traced = FunctionType(_run.__code__.replace(), globals(), _run.__name__)
        self._run: Call = torch.compile(self._traced, backend=_Weakly(backend), **_apart())
        # What torch compiles is kept with the code, and holds the engine: it goes with the door.
        finalize(self, remove_from_cache, self._traced).atexit = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        assert model is not None  # noqa: S101 - it is being called
        if not torch.is_grad_enabled():
            # Nothing to plan: each of its shapes would be one of those that torch compiles.
            return self._plainly(model, args, kwargs)
        if runs_plainly():
            self._note_plainly(model)
            return self._plainly(model, args, kwargs)
        aside = self._aside
        if aside is not None and aside.used:
            self._aside, known = None, _known(model)
            plain = self._take_in(model, aside.end(model, known))
            if plain and not self._told:
                self._note_unseen(model, ASIDE.format(names=_listed(plain)))
        trained, seen, limits = self.trained, _seen(self.backend), _limits()
        run = self._run_compiled if trained else self._until_trained
        results = run(model, args, kwargs)
        self._look(model)
        if seen < _seen(self.backend):
            if limits < _limits():
                self._note_unseen(model, UNSEEN_PART)
        elif trained and model.training and not self._told:
            if not self.hope:
                self._note_unseen(model, UNSEEN)
            self.hope = max(0, self.hope - 1)
        return results

    def _look(self, model: nn.Module) -> None:
        """Have the backward of a training call tell what no graph has, some times."""
        if self._aside is not None:
            return
        if not self._looks:
            self.backend.parameters.lookers.discard(self)
        elif model.training:
            self._looks -= 1
            known = _known(model)
            if known is not None:
                aside = Aside(model, known, _compiled_by_others(model))
                self._aside = aside if aside.looks else None

    def stop_looking(self) -> None:
        """Leave no hooks on parameters."""
        self.backend.parameters.lookers.discard(self)
        aside, self._aside = self._aside, None
        if aside is not None:
            aside.stop()

    def _run_compiled(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._is_recurrent is None:
            self._is_recurrent = is_recurrent(model)
        traced = counters["frames"]["total"]
        try:
            with recurrent_apart() if self._is_recurrent else nullcontext():
                return self._run(model, _hooks(model), *args, **kwargs)
        except BaseException as error:
            if counters["frames"]["total"] > traced:
                self._trace_anew(error)
            raise

    def _trace_anew(self, error: BaseException) -> None:
        """Have torch compile what it was tracing when `error` came: else it never would again."""
        remove_from_cache(self._traced)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if not frame.f_code.co_filename.startswith(NOT_TRACED):
                reset_code(frame.f_code)

    def _take_in(self, model: nn.Module, plain: list[str]) -> list[str]:
        """Compile by themselves the modules that ran in no graph, at those paths.

        Not where torch was told to leave alone what calls them. Returns the paths of those that
        are not helped so.
        """
        self.hope = 0
        alone = pieces(model, plain) if self._skipped else {}
        alone = {name: module for name, module in alone.items() if module not in _doors}
        for module in alone.values():
            self.inner.add(_wrap(module, self.backend, owns=False, inner=True))
        if alone:
            self._note(model, ALONE.format(names=_listed(list(alone))), aloud=False)
        return [] if alone else plain

    def _note_plainly(self, model: nn.Module) -> None:
        """Before anything was trained otherwise, it may be that nothing ever will: say so aloud."""
        self._note(model, PLAINLY, aloud=model.training and not self.trained)

    def _note_unseen(self, model: nn.Module, text: str) -> None:
        if any(p.requires_grad for p in model.parameters()):
            self._note(model, text, aloud=True)

    def _note(self, model: nn.Module, text: str, *, aloud: bool) -> None:
        """Note it; `aloud`: warn the first time, or raise NotEngagedError where that is strict."""
        known = text in self.backend.notes
        if not known:
            self.backend.notes.append(text)
        if aloud and self.backend.options.strict:
            raise NotEngagedError(model=type(model).__name__, reason=text)
        if aloud and not known:
            warnings.warn(f"outcore: {text}", stacklevel=CALLERS)

    def _plainly(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.backend.engine is not None:
            self.backend.engine.close_step()  # else the meter would go on
        return _run(model, "", *args, **kwargs)

    def _until_trained(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run the module; where that was its first training call, see what it brought."""
        backend = self.backend
        calls, notes, skipped = _calls(backend), len(backend.notes), _skipped()
        results = self._run_compiled(model, args, kwargs)
        self._noted |= len(backend.notes) > notes
        self._skipped |= _skipped() > skipped
        if model.training:
            self.trained = True
            idle = _calls(backend) == calls
            parts = own(model, _compiled_by_others(model)) if idle and self._skipped else []
            self.hope = HOPE if pieces(model, parts) else 0
            self._told = idle and not self.hope
            if self._told and not self._noted:
                _nothing_to_do(model, strict=backend.options.strict)
        return results


class _Weakly:
    """A Backend as torch sees it, which keeps what it is given as a backend for ever."""

    __name__ = "outcore"

    def __init__(self, backend: Backend) -> None:
        self._backend = ref(backend)

    def __repr__(self) -> str:
        """As torch names it in what it says."""
        return self.__name__

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any]) -> Call:
        backend = self._backend()
        assert backend is not None  # noqa: S101 - the door that is being called has it
        return backend(module, example_inputs)


_doors: WeakKeyDictionary[nn.Module, _Door] = WeakKeyDictionary()
"""Of each module that is wrapped."""


def _seen(backend: Backend) -> int:
    """Calls of its graphs so far, planned or not."""
    return backend.plain_calls.number + _calls(backend)


def _limits() -> int:
    """How often torch compiled a function no more, as it had for so many shapes."""
    return sum(often for text, often in counters["unimplemented"].items() if text.startswith(LIMIT))


def _skipped() -> int:
    """How many pieces of code torch tried in vain to compile: breaks in loops, as a rule."""
    frames = counters["frames"]
    return frames["total"] - frames["ok"]


def _known(model: nn.Module) -> set[int] | None:
    """The ids of parameters that graphs have, under the budget of `model` or of what is inside.

    None where that is not known: FSDP gives graphs others than the model's, which are its parts.
    """
    if any(type(parameter) is not nn.Parameter for parameter in model.parameters()):
        return None
    backends = {_doors[module].backend for module in model.modules() if module in _doors}
    found = [backend.parameters.ids for backend in backends]
    sets = [each for each in found if each is not None]
    return set().union(*sets) if len(sets) == len(found) else None


def _compiled_by_others(model: nn.Module) -> list[str]:
    """Where modules inside are that somebody else has compiled."""
    return [path for path, module in model.named_modules() if path and _is_compiled(module)]


def _is_compiled(module: nn.Module) -> bool:
    set_ = module._compiled_call_impl is not None and module not in _doors  # noqa: SLF001 - what Module.compile sets
    return set_ or isinstance(module, OptimizedModule)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _calls(backend: Backend) -> int:
    return 0 if backend.engine is None else backend.engine.steps.calls


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        reason = "it is not a torch.nn.Module; wrap the model, not its step"
        raise WrapError(model=type(model).__name__, reason=reason)
    name = type(model).__name__
    if _is_compiled(model):
        reason = "it is compiled already; wrap the model that was given to torch.compile"
        raise WrapError(model=name, reason=reason)


def _nothing_in(model: nn.Module) -> WrapError:
    return WrapError(model=type(model).__name__, reason="nothing in it is wrapped")


def _apart() -> dict[str, Any]:
    """How torch is to compile what is wrapped: each shape by itself, and apart from other models.

    Before torch 2.13 it would do so eight times at most, for all models with parts of one class:
    there sizes are left to be symbolic (`capture.BySizes`), which counts once.
    """
    known = inspect.signature(torch.compile).parameters
    if "recompile_limit" not in known:
        return {}
    return {"dynamic": False, "isolate_recompiles": True, "recompile_limit": MOST_SHAPES}


def _run(self: nn.Module, hooks: str, /, *args: Any, **kwargs: Any) -> Any:
    """What is compiled of a module: torch's own (nn.Sequential, ...) it compiles only inside it.

    `hooks`: those of the module (`_hooks`), which are compiled with it. torch does not look whether
    there are others since, but does at an argument that is read.
    """
    str(hooks)
    return self._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch leaves it so


def _hooks(model: nn.Module) -> str:
    """The hooks that a call of `model` runs, by the numbers that torch gives them."""
    held = (
        model._forward_pre_hooks,  # noqa: SLF001 - torch has no other way to ask
        model._forward_hooks,  # noqa: SLF001 - as above
        model._backward_pre_hooks,  # noqa: SLF001 - as above
        model._backward_hooks,  # noqa: SLF001 - as above
    )
    return ";".join(",".join(map(str, each)) for each in held) if any(held) else ""


def _wrap(model: M, backend: Backend, *, owns: bool, inner: bool = False) -> M:
    before = _doors.get(model)
    if before is not None and before.backend is backend:
        return model
    if before is not None:
        _unwrap(model)
    door = _Door(model, backend, owns=owns, inner=inner)

    def call(*args: Any, **kwargs: Any) -> Any:
        return door(*args, **kwargs)

    # What calls it may be compiled itself, up to a graph break: torch would go on in the door.
    alone: Call = torch.compiler.disable(call)  # type: ignore[no-untyped-call]  # torch leaves it so
    model._compiled_call_impl = alone  # noqa: SLF001 - what Module.compile sets
    _doors[model] = door
    return model


def _unwrap(module: nn.Module) -> None:
    door = _doors.pop(module, None)
    if door is None:  # it went with the one around it
        return
    module._compiled_call_impl = None  # noqa: SLF001 - what Module.compile sets
    door.stop_looking()
    for inner in door.inner:
        if inner in _doors and _doors[inner].backend is door.backend:
            _unwrap(inner)
    if door.owns:
        door.backend.close()


def _nothing_to_do(model: nn.Module, *, strict: bool) -> None:
    """Say that a training call of `model` brought nothing to plan."""
    error = NotEngagedError(model=type(model).__name__)
    if strict:
        raise error
    warnings.warn(str(error), stacklevel=CALLERS)
