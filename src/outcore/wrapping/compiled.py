"""compiled: run the calls of one module as torch compiles them, and count what it did not."""

from __future__ import annotations

import contextlib
import inspect
import os
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any
from weakref import WeakSet, finalize, ref

import torch
from torch import nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import convert_frame
from torch._dynamo.eval_frame import remove_from_cache
from torch._dynamo.utils import counters
from torch.fx import GraphModule
from torch.nn.modules import module as _module

from outcore.capture import (
    is_recurrent,
    noticing_changes,
    own_globals,
    recurrent_apart,
    without_function_modes,
)
from outcore.errors import StepError
from outcore.runtime.backend import Backend
from outcore.wrapping.meta_tensors import MetaTensors
from outcore.wrapping.untraced import Untraced, noting_untraced, untraced

Call = Callable[..., Any]

LIMIT = "Dynamo recompile limit exceeded"
"""Prefix of torch's counter for functions that it compiles no more."""

TOLD = "torch.compiler.disable"
"""Part of torch's reasons for graph breaks that it was told to make."""

TRACER = convert_frame.__file__
"""The file of torch's code that traces a function."""

MOST_FAILURES = 3
"""After so many training calls in a row in which torch fails to trace code, it tries no more."""

TORCH = f"{Path(torch.__file__).parent}{os.sep}"

NOT_TRACED = TORCH, f"{Path(__file__).parents[1]}{os.sep}"
"""Folders of code that torch never compiles by itself."""

MOST_COMPILED = 64
"""How often torch compiles a function of a wrapped model: other sizes do not count, other constants
do. Calls that differ further run uncompiled.

With torch 2.12 it is the limit for all models with parts of one class together. torch 2.11 cannot
be told of it: there it is torch._dynamo.config.recompile_limit, 8.
"""

SKIPPED: WeakSet[type[nn.Module]] = WeakSet()
"""Classes of models with code that torch failed to compile: before torch 2.13 it tries only once
for all instances of a class."""


class CompiledCalls:
    """The calls of one module, compiled by torch for a Backend."""

    def __init__(self, model: nn.Module, backend: Backend) -> None:
        self.skipped = type(model) in SKIPPED
        """Whether torch failed to compile code of the calls."""
        self.broke = False
        """Whether something ended a graph in the calls that was not meant to (`broken`)."""
        self._untraced = Untraced(again=False, handled=None)
        """What torch failed to trace in the last call."""
        self.hopeless = False
        """Whether torch is not to try again to trace such code (`take_untraced`)."""
        self._ran = False
        """Whether torch has traced all of a call that came to its end."""
        self._failures = 0
        """Training calls in a row in which torch failed to trace code."""
        self._failures_apart = 0
        """Other calls in which it did."""
        self._metas = MetaTensors()
        self._is_recurrent: bool | None = None
        """Whether graphs should end at recurrent layers; None before the first call."""
        self._forwards: list[tuple[Callable[[], object], object]] = []
        """What the model's class had as `forward` in some call, and the code of that."""
        self._traced = FunctionType(run_plain.__code__.replace(), globals(), run_plain.__name__)
        weakly = _Weakly(backend)
        self._run: Call = torch.compile(self._traced, backend=weakly, **_apart())
        # torch keeps what it compiled with the code, and that holds the engine. So it is removed
        # when this dies. What it compiled of other functions, as after a graph break, it may leave
        # in the globals of the model's module forever. So that is emptied.
        finalize(self, remove_from_cache, self._traced).atexit = False
        finalize(self, weakly.take_back).atexit = False

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run the module, with recurrent layers kept out of graphs. Raises what it raises.

        What torch fails to trace runs uncompiled, also if the code or the inputs are wrong.
        """
        if self._is_recurrent is None:
            self._is_recurrent = is_recurrent(model)
        before, breaks, skips = traced(), 0 if self.broke else broken(), skipped()
        given, named, taken = self._metas.taken_out(model, args, kwargs)
        apart = recurrent_apart() if self._is_recurrent else contextlib.nullcontext()
        with noting_untraced(again=self._ran and not self.hopeless) as noted:
            try:
                with apart, noticing_changes(), own_globals():
                    results = self._run(model, self._guarded(model), *given, **named)
            except BaseException as error:
                if isinstance(error, AttributeError):
                    self._metas.tell(error, model, taken)
                if skipped() > skips or noted.given_up:
                    self._trace_anew(error)
                raise
            finally:
                if not self.broke and traced() > before:
                    self.broke = broken() > breaks
        self._untraced = noted
        if not self.untraced:
            self._ran, self._failures = True, 0
        return self._metas.put_back(results, taken)

    def _guarded(self, model: nn.Module) -> str:
        """What torch should compile a call anew for, and does not check by itself."""
        number, hooks = self._number(_forward_of(type(model))), _hooks(model)
        return f"{number}:{hooks}" if number else hooks

    def _number(self, forward: Any) -> int:
        """A number for each `forward` that the model's class has had, and for its code."""
        code = getattr(inspect.unwrap(forward), "__code__", None)
        for number, (known, known_code) in enumerate(self._forwards):
            if known() is forward and known_code is code:
                return number
        try:
            held: Callable[[], object] = ref(forward)  # it may hold the model
        except TypeError:
            held = partial(_same, forward)
        self._forwards.append((held, code))
        return len(self._forwards) - 1

    def take_skipped(self, model: nn.Module) -> None:
        """Note that torch failed to compile code of a call."""
        self.skipped = True
        SKIPPED.add(type(model))

    @property
    def untraced(self) -> Sequence[str]:
        """Why torch failed to trace code of the last call; empty if it did not."""
        return self._untraced.reasons

    @property
    def fails_apart(self) -> bool:
        """Whether torch failed to trace code of several calls that were no training calls."""
        return self._failures_apart >= MOST_FAILURES

    @property
    def skips(self) -> bool:
        """Whether torch failed to compile code of the calls."""
        return self.skipped or self.hopeless

    def take_untraced(self, *, training: bool) -> None:
        """Choose whether torch is to try again what it failed to trace in the last call.

        To try takes long. So if it has traced no call so far, or none of the last few training
        calls, it is not to. Otherwise calls as a whole are tried again.
        """
        if training:
            self._failures += 1
            self.hopeless |= not self._ran or self._failures >= MOST_FAILURES
        else:
            self._failures_apart += 1
        if self._untraced.given_up and not self.hopeless:
            reset_code(self._traced.__code__)

    def _trace_anew(self, error: BaseException) -> None:
        """Make torch forget the code that ran uncompiled when `error` was raised.

        As an exception was in its way, torch would never try to compile that code again, and would
        not run what it compiled of it before. If it was tracing the code, it keeps that.
        """
        for frame, _ in traceback.walk_tb(error.__traceback__):
            code = frame.f_code
            if code.co_filename == TRACER:
                break
            if code is self._traced.__code__ or not code.co_filename.startswith(NOT_TRACED):
                reset_code(code)


def _forward_of(kind: type[nn.Module]) -> Any:
    """What a class of modules has as `forward`; a descriptor would be another object each time."""
    return next(vars(each)["forward"] for each in kind.__mro__ if "forward" in vars(each))


def _same(given: object) -> object:
    return given


class _Lent:
    """The call of a compiled graph, as torch has it."""

    __slots__ = "__weakref__", "_module", "call"
    # torch would copy a `__dict__`, and so keep the call

    def __init__(self, call: Call, module: GraphModule | None) -> None:
        """`module`: the graph, if torch may call it for other models, too."""
        self.call, self._module = call, module

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def take_back(self) -> None:
        """From now on, run the graph as plain PyTorch, if it is called at all."""
        self.call = _gone
        if self._module is not None:
            _ = self._module.code  # now, as a lazy module would call itself, with all hooks
            self.call = partial(_run_traced, self._module)
            for each in self._module.modules():
                for node in each.graph.nodes if isinstance(each, GraphModule) else ():
                    node.meta.clear()


def _run_traced(module: GraphModule, *args: Any) -> Any:
    """Run a graph that has what the caller's modes and the hooks of all modules do already."""
    with without_function_modes():
        return module.forward(*args)


def _gone(*_: Any) -> Any:
    raise StepError(
        reason="torch compiled this for another model, which was deleted or unwrapped since: call "
        "torch._dynamo.reset(), or let torch compile"
    )


class _Weakly:
    """A Backend as torch sees it: torch keeps backends forever, so this holds it only weakly.

    Of the graphs that it compiles, torch may keep every one forever, too.
    """

    __name__ = "outcore"

    def __init__(self, backend: Backend) -> None:
        self._backend = ref(backend)
        self._lent: WeakSet[_Lent] = WeakSet()

    def __repr__(self) -> str:
        """Return the name that torch shows in its messages."""
        return self.__name__

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any]) -> Call:
        backend = self._backend()
        assert backend is not None  # noqa: S101 - the wrapper that is being called holds it
        # Before torch 2.13, calls that may not compile run what was compiled for any model.
        lent = _Lent(backend(module, example_inputs), None if _apart() else module)
        self._lent.add(lent)
        return lent

    def take_back(self) -> None:
        """Drop what was compiled. A backward call that is still to come has what it needs."""
        for lent in self._lent:
            lent.take_back()


def users_frames(found: TracebackType | None) -> TracebackType | None:
    """A traceback without frames of torch and of this package: they hold the step's tensors."""
    if found is None:
        return None
    inner = users_frames(found.tb_next)
    if found.tb_frame.f_code.co_filename.startswith((*NOT_TRACED, contextlib.__file__)):
        return inner
    return TracebackType(inner, found.tb_frame, found.tb_lasti, found.tb_lineno)


def users_level() -> int:
    """The `stacklevel` of a warning, given where this is called, that names the user's code."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(NOT_TRACED):
        frame, level = frame.f_back, level + 1
    return level


def limits() -> int:
    """How many times torch refused to compile a function once more."""
    return sum(often for text, often in counters["unimplemented"].items() if text.startswith(LIMIT))


def traced() -> int:
    """How many pieces of code torch has tried to compile."""
    return counters["frames"]["total"]


def broken() -> int:
    """How many graph breaks torch has met, without those that it was told to make."""
    breaks = counters["graph_break"].items()
    return sum(often for reason, often in breaks if TOLD not in reason)


def skipped() -> int:
    """How many pieces of code torch failed to compile, usually for a graph break in a loop.

    Without those that it failed to trace.
    """
    frames = counters["frames"]
    return frames["total"] - frames["ok"] - untraced()


def _apart() -> dict[str, Any]:
    """Return options for torch.compile: recompiles count apart from those of other models.

    Before torch 2.13, they count for all models with parts of one class (`MOST_COMPILED`).
    """
    wanted = {"isolate_recompiles": True, "recompile_limit": MOST_COMPILED}
    known = inspect.signature(torch.compile).parameters
    return {name: value for name, value in wanted.items() if name in known}


def run_plain(self: nn.Module, guarded: str, /, *args: Any, **kwargs: Any) -> Any:
    """Run a module: torch compiles this function, but no module of torch.nn by itself.

    `guarded`: the `forward` of the module's class, and the module's hooks, which are compiled with
    it. torch checks an argument that is read, but never whether a class was given another
    `forward`, and before 2.13 not whether hooks were added later (`noticing_changes`).
    """
    len(guarded)  # torch 2.14 does not check the argument of `str`
    return self._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch leaves it so


HOOKS_OF_ALL = (
    _module._global_forward_pre_hooks,  # noqa: SLF001 - torch has no other way to ask
    _module._global_forward_hooks,  # noqa: SLF001 - as above
    _module._global_backward_pre_hooks,  # noqa: SLF001 - as above
    _module._global_backward_hooks,  # noqa: SLF001 - as above
)


def _hooks(model: nn.Module) -> str:
    """Return the hooks that a call of `model` runs, by the ids that torch gives them.

    They include those that were registered for all modules.
    """
    held = (
        *HOOKS_OF_ALL,
        model._forward_pre_hooks,  # noqa: SLF001 - torch has no other way to ask
        model._forward_hooks,  # noqa: SLF001 - as above
        model._backward_pre_hooks,  # noqa: SLF001 - as above
        model._backward_hooks,  # noqa: SLF001 - as above
    )
    return ";".join(",".join(map(str, each)) for each in held) if any(held) else ""
