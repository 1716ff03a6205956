"""call_wrapper: run the calls of a wrapped module, and warn if outcore can plan nothing."""

from __future__ import annotations

import inspect
import logging
import warnings
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from outcore.capture import must_run_uncompiled
from outcore.errors import MUCH_DIVISOR, InfeasibleError, NotEngagedError
from outcore.optimizers.of_model import offloadable
from outcore.runtime.backend import Backend
from outcore.units import format_bytes
from outcore.wrapping import compiled
from outcore.wrapping.compiled import (
    CompiledCalls,
    run_plain,
    users_frames,
    users_level,
)
from outcore.wrapping.frozen import WATCHED, requires_gradient
from outcore.wrapping.looking import Looking
from outcore.wrapping.notes import (
    ALONE,
    CUMULATIVE,
    OTHERS,
    PLAIN_SO_FAR,
    RAN_UNCOMPILED,
    STATE,
    UNCALLED,
    UNCOMPILED,
    UNSEEN,
    UNSEEN_PART,
    UNTRACED,
    listed,
)
from outcore.wrapping.outside_graphs import is_called_by_own, own, pieces, unseen
from outcore.wrapping.untraced import untraced
from outcore.wrapping.watches import EvalWatch, GradientWatch

M = TypeVar("M", bound=nn.Module)

log = logging.getLogger("outcore")

CALLS_TO_WAIT = 16
"""Calls after the first training call in which a model that brought no graph may yet be compiled in
parts. A step, with its backward, should end within so many."""

MOST_STARTS = 4
"""How often a wrapper starts over because torch stops compiling code that it compiled before. Some
models bring code that cannot be compiled in each step."""


class CallWrapper:
    """Runs the calls of one wrapped module.

    `inner`: the module is a part of a wrapped model that torch.compile did not compile as a whole.
    """

    def __init__(
        self, model: nn.Module, backend: Backend, *, owns: bool, inner: bool = False
    ) -> None:
        self.backend, self.owns = backend, owns
        """`owns`: the Backend serves this module alone, and is closed with it."""
        self.trained = inner
        """Whether a training call has returned, of this module or the wrapped model around it."""
        self._trains = _trains(model)
        """Whether it had parameters to train when it was wrapped."""
        self._to_make = -1
        """How many parameters of lazy layers were still to be made before the last call; -1: it is
        not known; 0: none, or no call makes them."""
        self._noted = False
        """Whether a call of this module added a note to the Backend."""
        self._told = inner
        """Whether it was reported that training calls bring nothing to plan."""
        self._uncovered = ""
        """What was last reported of parts that run as plain PyTorch; empty if nothing was."""
        self._untraced = ""
        """What is told of code that torch fails to trace; empty if there was none."""
        self.calls_to_wait = 0
        """In how many further calls there may yet be something to plan (`CALLS_TO_WAIT`)."""
        self._inner = inner
        self._starts_left = 0 if inner else MOST_STARTS
        self._looking = Looking(model, backend.parameters.lookers, _known, _compiled_by_others)
        """Finds the parts that no graph has, of a wrapped model, not of a part (`inner`)."""
        if not inner:
            self._looking.again()
        self._compiled = CompiledCalls(model, backend)
        self.inner: WeakSet[nn.Module] = WeakSet()
        """Modules inside that are compiled by themselves, because the model as a whole is not."""
        self._model = ref(model)
        self._uncalled = None if inner else GradientWatch(model, partial(_tell_uncalled, ref(self)))
        """Watches for gradients up to the first call."""
        self._in_eval = EvalWatch(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, compiled if there may be something to plan.

        Raises what the module raises.
        """
        model = self._model()
        assert model is not None  # noqa: S101 - it is being called
        if not torch.is_grad_enabled():
            # Nothing to plan, and it would count toward torch's limit on recompiles.
            return self._run_uncompiled(model, args, kwargs)
        self.stop_watching()
        if self._makes_parameters(model) or self._must_run_uncompiled(model):
            return self._run_uncompiled(model, args, kwargs)
        if self.trained and self._looking.found:
            self._take_found(model)
        trained, seen = self.trained, _seen(self.backend)
        limits, skipped, failed = compiled.limits(), compiled.skipped(), untraced()
        run = self._run_compiled if trained else self._until_trained
        results = run(model, args, kwargs)
        refused = limits < compiled.limits()
        if trained and self._starts_left and not refused and skipped < compiled.skipped():
            self._compiled.take_skipped(model)
            self._start_over(model)
            return results
        if seen < _seen(self.backend):
            if refused:
                self._note_unseen(model, results, UNSEEN_PART)
        elif trained and not (self._compiled.hopeless or failed < untraced()):
            self._count_idle(model, results)
        if not self._inner:
            self._looking.after_call(model, trained=self.trained)
        return results

    def _count_idle(self, model: nn.Module, results: Any) -> None:
        """Count a call that reached no graph, though torch failed at nothing as a whole."""
        if self._told or not self._is_training(model, results):
            return
        if not self.calls_to_wait:
            self._note_unseen(model, results, UNSEEN)
        self.calls_to_wait = max(0, self.calls_to_wait - 1)

    def _start_over(self, model: nn.Module) -> None:
        """Look for parts to compile: from now on torch runs code of the model uncompiled.

        Such as a loop in which something ends the graph, in a branch that no call took before. The
        next call shows which parameters the graphs that are left have.
        """
        self._starts_left -= 1
        alone = (m for m in model.modules() if m is not model and m in WRAPPERS)
        kept = {id(parameter) for module in alone for parameter in module.parameters()}
        self.backend.parameters.forget({id(p) for p in model.parameters()} - kept)
        self.calls_to_wait = CALLS_TO_WAIT
        self._looking.again()

    def stop_looking(self) -> None:
        """Remove the hooks on parameters."""
        self._looking.stop()
        self.stop_watching()
        self._in_eval.stop()

    def stop_watching(self) -> None:
        """Do not notice any more if the model trains without being called."""
        uncalled, self._uncalled = self._uncalled, None
        if uncalled is not None:
            uncalled.stop()

    def _is_training(self, model: nn.Module, results: Any) -> bool:
        """Whether a call with `results` is a training call: the mode may say so, or backward.

        A frozen model with such results is called for the gradients of its inputs.
        """
        if model.training or self._in_eval.trains:
            return True
        return not _trains(model) and requires_gradient(results)

    def tell_uncalled(self, parameter: int) -> None:
        """Warn that the model is not called, unless a graph has the parameter with this `id`."""
        self.stop_watching()
        model, known = self._model(), [w.backend.parameters.ids for w in WRAPPERS.values()]
        if model is not None and all(ids is not None and parameter not in ids for ids in known):
            self._note(model, UNCALLED.format(model=type(model).__name__), aloud=True)

    def _run_compiled(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run the module as torch compiles it; what it fails to trace runs uncompiled."""
        apart = self._compiled.fails_apart and not self._is_training(model, None)
        if self._compiled.hopeless or apart:
            self._note(model, self._untraced, aloud=True)
        if apart:
            return self._run_uncompiled(model, args, kwargs)
        results = self._run_noted(model, args, kwargs)
        if self._compiled.untraced:
            self._take_untraced(model, results)
        return results

    def _take_untraced(self, model: nn.Module, results: Any) -> None:
        """Tell of code that torch failed to trace; look for parts to compile if that stays so."""
        reason, name = self._compiled.untraced[0], type(model).__name__
        self._untraced = self._untraced or UNTRACED.format(model=name, reason=reason)
        self._compiled.take_untraced(training=self._is_training(model, results))
        if self._compiled.hopeless and self.trained and self._starts_left:
            self._start_over(model)
        self._note(model, self._untraced, aloud=True)

    def _run_noted(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run the module as torch compiles it. Of what is raised, InfeasibleError says it all."""
        skipped = compiled.skipped()
        try:
            if self._inner:
                return self._compiled(model, args, kwargs)
            with self._looking.in_call(model):
                return self._compiled(model, args, kwargs)
        except InfeasibleError as error:
            if compiled.skipped() > skipped:
                self._compiled.take_skipped(model)
            self._name_others(error)
            _name_state(model, error)
            cumulative = _cumulative(model)
            if cumulative:
                error.add_note(CUMULATIVE.format(names=listed(cumulative)))
            self._name_plain(model, error)
            if self._uncovered:
                error.add_note(f"outcore: {self._uncovered}")
            log.debug("outcore: no plan", exc_info=True)
            raise error.with_traceback(users_frames(error.__traceback__)) from error.__cause__

    def _name_others(self, error: InfeasibleError) -> None:
        """Add a note on models that train on this device under other budgets, if there are any."""
        engine = self.backend.engine
        engines = ((model, each.backend.engine) for model, each in WRAPPERS.items())
        others = [(m, e) for m, e in engines if e is not None and e is not engine]
        names = [type(m).__name__ for m, e in others if engine is None or e.device == engine.device]
        note = OTHERS.format(names=listed(sorted(names)))
        if names and note not in getattr(error, "__notes__", ()):
            error.add_note(note)

    def _name_plain(self, model: nn.Module, error: InfeasibleError) -> None:
        """Compile separately the parts that no graph has; note on `error` that this is new.

        They were unfrozen for this step, whose backward would have shown that they are used; or
        this is the first step.
        """
        known = _known(model)
        if self._inner or known is None or not self._compiled.skips:
            return
        plain = unseen(model, known, _compiled_by_others(model))
        plain += self._looking.take(model)
        if plain and not self._take_in(model, plain):
            error.add_note(PLAIN_SO_FAR.format(names=listed(list(pieces(model, plain)))))

    def _take_found(self, model: nn.Module) -> None:
        """Compile separately what the last backward reached in no graph, or warn about it."""
        plain = self._take_in(model, self._looking.take(model))
        if plain and not self._told:
            self._uncovered = UNCOMPILED.format(names=listed(plain))
            self._note(model, self._uncovered, aloud=True)

    def _take_in(self, model: nn.Module, plain: list[str]) -> list[str]:
        """Compile separately the modules at the paths `plain`, which ran in no graph.

        Returns the paths of modules that this does not help.
        """
        self.calls_to_wait = 0
        alone = pieces(model, self._meant(model, plain), WRAPPERS)
        for module in alone.values():
            self.inner.add(install_wrapper(module, self.backend, owns=False, inner=True))
        if alone:
            self._looking.again()  # something in a part may end its graph
            self._note(model, ALONE.format(names=listed(list(alone))), aloud=False)
        return [] if alone else plain

    def _meant(self, model: nn.Module, plain: list[str]) -> list[str]:
        """Those of the paths whose caller torch was meant to compile.

        All, if it failed to compile some code of the calls. If something ended graphs instead,
        those that torch's own code calls. Otherwise torch may have been told to leave the caller
        uncompiled.
        """
        skips, broke = self._compiled.skips, self._compiled.broke
        return [path for path in plain if skips or (broke and is_called_by_own(model, path))]

    def _must_run_uncompiled(self, model: nn.Module) -> bool:
        """Whether this call must run uncompiled. Warns if nothing was trained otherwise so far."""
        if not must_run_uncompiled():
            return False
        training = self._is_training(model, None)
        self._note(model, RAN_UNCOMPILED, aloud=training and not self.trained)
        return True

    def _makes_parameters(self, model: nn.Module) -> bool:
        """Whether lazy layers may make their parameters in this call, which runs uncompiled then.

        While torch compiles, it would do so in another order than they are called, and so of other
        random numbers.
        """
        if not self._to_make:
            return False
        now = sum(map(is_lazy, (*model.parameters(), *model.buffers())))
        makes = 0 < now != self._to_make  # otherwise the last call made none
        self._to_make = now if makes else 0
        return makes

    def _note_unseen(self, model: nn.Module, results: Any, text: str) -> None:
        """Warn about a call that no graph planned, if it has a backward."""
        if _trains(model) or requires_gradient(results):
            self._note(model, text, aloud=True)

    def _note(self, model: nn.Module, text: str, *, aloud: bool) -> None:
        """Record a note. `aloud`: warn the first time, or raise NotEngagedError if `strict`."""
        known = text in self.backend.notes
        if not known:
            self.backend.notes.append(text)
        if aloud and self.backend.options.strict:
            raise NotEngagedError(model=type(model).__name__, reason=text)
        if aloud and not known:
            warnings.warn(f"outcore: {text}", stacklevel=users_level())

    def _run_uncompiled(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.backend.engine is not None:
            self.backend.engine.close_step()  # otherwise the meter would keep running
        return run_plain(model, "", *args, **kwargs)

    def _until_trained(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run the module; after the first training call, check whether it brought anything."""
        backend = self.backend
        calls, notes, skipped = calls_of(backend), len(backend.notes), compiled.skipped()
        results = self._run_compiled(model, args, kwargs)
        self._noted |= len(backend.notes) > notes
        if compiled.skipped() > skipped:
            self._compiled.take_skipped(model)
        idle = calls_of(backend) == calls
        # Frozen for a while, as by Lightning's `toggle_optimizer`: that is no training call.
        is_frozen = idle and self._trains and not _trains(model)
        if not self._is_training(model, results):
            self._in_eval.start(model)
        elif not is_frozen:
            self._in_eval.stop()
            self.trained = True
            tried = idle and (self._compiled.skips or self._compiled.broke)
            parts = own(model, _compiled_by_others(model)) if tried else []
            self.calls_to_wait = CALLS_TO_WAIT if pieces(model, self._meant(model, parts)) else 0
            self._told = idle and not self.calls_to_wait
            if self._told and not self._noted:
                _nothing_to_do(model, strict=backend.options.strict)
        return results


ENTRY = nn.Module._wrapped_call_impl.__code__  # noqa: SLF001 - what calls `_compiled_call_impl`

WRAPPERS: WeakKeyDictionary[nn.Module, CallWrapper] = WeakKeyDictionary()
"""Wrapped module -> its wrapper."""


def _tell_uncalled(wrapper: ref[CallWrapper], parameter: int) -> None:
    """`CallWrapper.tell_uncalled`; hooks of parameters outlive wrappers."""
    found = wrapper()
    if found is not None:
        found.tell_uncalled(parameter)


def _seen(backend: Backend) -> int:
    """How many calls the Backend's graphs have had, planned or not."""
    return backend.plain_calls.number + calls_of(backend)


def _trains(model: nn.Module) -> bool:
    """Whether `model` has parameters to train."""
    return any(p.requires_grad for p in model.parameters())


def _name_state(model: nn.Module, error: InfeasibleError) -> None:
    """Add a note if the state of optimizers is much of what the budget would have to hold."""
    names, nbytes = offloadable(model) if error.tier == "device" else ([], 0)
    if names and nbytes * MUCH_DIVISOR >= error.floor_bytes:
        error.add_note(STATE.format(names=listed(names), size=format_bytes(nbytes)))


def _cumulative(model: nn.Module) -> list[str]:
    """The paths of batch norms that train with averages over all steps so far."""
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        and module.training
        and module.momentum is None
        and module.num_batches_tracked is not None
    ]


def _known(model: nn.Module) -> set[int] | None:
    """Ids of the parameters that graphs have, for the budgets of `model` and what is inside.

    None if that is not known: FSDP passes graphs other parameters than the model's, which are only
    parts.
    """
    if any(type(parameter) is not nn.Parameter for parameter in model.parameters()):
        return None
    backends = {WRAPPERS[module].backend for module in model.modules() if module in WRAPPERS}
    found = [backend.parameters.ids for backend in backends]
    sets = [each for each in found if each is not None]
    return set().union(*sets) if len(sets) == len(found) else None


def _compiled_by_others(model: nn.Module) -> list[str]:
    """Return the paths of modules inside `model` that someone else has compiled."""
    return [path for path, module in model.named_modules() if path and is_compiled(module)]


def is_compiled(module: nn.Module) -> bool:
    """Whether someone else has compiled the module."""
    set_ = module._compiled_call_impl is not None  # noqa: SLF001 - what Module.compile sets
    by_us = module in WRAPPERS or module in WATCHED
    return (set_ and not by_us) or isinstance(module, OptimizedModule)


def calls_of(backend: Backend) -> int:
    """How many forward calls with a backward the Backend's graphs have had."""
    return 0 if backend.engine is None else backend.engine.steps.calls


def install_wrapper(model: M, backend: Backend, *, owns: bool, inner: bool = False) -> M:
    """Let calls of `model` go through a new wrapper; an earlier wrapper is removed."""
    before = WRAPPERS.get(model)
    if before is not None and before.backend is backend:
        return model
    if before is not None:
        remove_wrapper(model)
    wrapper = CallWrapper(model, backend, owns=owns, inner=inner)
    model._compiled_call_impl = _ThroughWrapper(wrapper)  # noqa: SLF001 - what Module.compile sets
    WRAPPERS[model] = wrapper
    return model


class _ThroughWrapper:
    """Calls a wrapped model. Deep copies and pickles of the model have none.

    Copies that took over all attributes, as replicas of DataParallel do, run as plain PyTorch.
    """

    def __init__(self, wrapper: CallWrapper) -> None:
        self.wrapper = wrapper

    # The caller may be compiled itself, up to a graph break: torch would then trace the wrapper.
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it so
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        called = _called()
        if (
            called is not None
            and called not in WRAPPERS
            and vars(called).get("_compiled_call_impl") is self
        ):
            return run_plain(called, "", *args, **kwargs)
        return self.wrapper(*args, **kwargs)

    def __deepcopy__(self, _: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _called() -> nn.Module | None:
    """The module that is being called; torch does not pass it. None: it was not called as one."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not ENTRY:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def remove_wrapper(module: nn.Module) -> None:
    """Let calls of `module` run uncompiled, also of the modules inside that its wrapper wrapped."""
    wrapper = WRAPPERS.pop(module, None)
    if wrapper is None:  # it was removed together with the one around it
        return
    vars(module).pop("_compiled_call_impl", None)  # TorchScript reads what an instance has
    wrapper.stop_looking()
    for inner in wrapper.inner:
        if inner in WRAPPERS and WRAPPERS[inner].backend is wrapper.backend:
            remove_wrapper(inner)
    if wrapper.owns:
        wrapper.backend.close()


def _nothing_to_do(model: nn.Module, *, strict: bool) -> None:
    """Warn that a training call of `model` brought nothing to plan; raise if `strict`."""
    error = NotEngagedError(model=type(model).__name__)
    if strict:
        raise error
    warnings.warn(str(error), stacklevel=users_level())
