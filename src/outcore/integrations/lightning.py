"""LightningCallback: outcore in the Trainer of Lightning.

Lightning calls `training_step` and never the LightningModule itself. If the LightningModule was
compiled in place, the compiled code would silently never run. So this callback wraps the modules
inside it, and raises an error for what would be ignored.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from outcore.errors import MissingPackageError, NotEngagedError, WrapError
from outcore.integrations.metrics import metrics
from outcore.integrations.state import Offloads, offload_state
from outcore.optimizers import is_offloaded, restore_optimizer
from outcore.runtime.settings.options import Keywords, checked_options
from outcore.wrapping import Session
from outcore.wrapping.call_wrapper import WRAPPERS

try:
    # One library under two names, each with its own classes.
    old = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    Callback: Any = import_module("pytorch_lightning" if old else "lightning.pytorch").Callback
except ImportError as error:
    raise MissingPackageError(
        package="lightning",
        extra="lightning",
        purpose="LightningCallback goes into the Trainer of Lightning",
    ) from error

if TYPE_CHECKING:
    from outcore.report import Report


FINDER = (
    "outcore: while BatchSizeFinder looks for a batch size, Lightning removes all callbacks, so it "
    "finds one for training without outcore. Leave LightningCallback out, and call outcore.wrap on "
    "the modules yourself (docs/integrations.md)"
)


class LightningCallback(Callback):  # type: ignore[misc]  # its base class is known only at run time
    """Keeps the training steps of a LightningModule inside a byte budget.

    >>> Trainer(..., callbacks=[LightningCallback(budget="12GiB")])            # doctest: +SKIP

    It wraps the modules that the LightningModule holds directly and that have parameters to train,
    or those named in `modules`, such as `("encoder", "head.last")`. Instead of a module that has no
    `forward`, such as a list, it wraps those inside.
    They share one budget. `options` are those of `outcore.Backend`; invalid ones raise what it
    raises, at once. `offload_optimizer`: also do `outcore.offload_optimizer` with the optimizers;
    its options, if it is a mapping. Budgets are separate.

    `session` is the `outcore.Session` that does the work, from the start of training; None before.
    Training the same modules again keeps the session and its plans. For other modules, the callback
    closes it and makes a new one.
    """

    def __init__(
        self,
        budget: str | float | None = None,
        *,
        modules: Sequence[str] = (),
        offload_optimizer: Offloads = False,
        **options: Unpack[Keywords],
    ) -> None:
        self._budget, self._options, self._offloads = budget, options, offload_optimizer
        checked_options({"budget": budget, **options})
        self.modules = (modules,) if isinstance(modules, str) else tuple(modules)
        self.session: Session | None = None
        self._before: int | None = None
        """Calls to graphs before this training; None once its first step has been checked."""
        self._skips = False
        """Whether the module's training step is replaced by one without gradients."""
        self._step: Any = None
        """The training step that it had itself, apart from its class; None if it had none."""

    def __getstate__(self) -> dict[str, Any]:
        """Without the session: its modules and threads are of this process."""
        return {**self.__dict__, "session": None, "_before": None, "_skips": False, "_step": None}

    def report(self) -> Report:
        """Like `Backend.report`. Raises WrapError before training."""
        if self.session is None:
            reason = "there is no report yet: it wraps the modules when training begins"
            raise WrapError(model=type(self).__name__, reason=reason)
        return self.session.report()

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Raise WrapError for what Lightning would not run, or if all is compiled already.

        Warns of a BatchSizeFinder.
        """
        if stage == "fit":
            _refuse(pl_module)
            if any(type(each).__name__ == "BatchSizeFinder" for each in trainer.callbacks):
                warnings.warn(FINDER, stacklevel=2)

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Wrap the modules, which `configure_model` has made by now. Raises WrapError."""
        chosen = [_named(pl_module, name) for name in self.modules]
        inside = chosen or list(_trained(pl_module))
        if not inside:
            reason = (
                "it holds no module with parameters to train: put what training_step calls into a "
                'module of its own, or name it, as in LightningCallback(modules=["net"])'
            )
            raise WrapError(model=type(pl_module).__name__, reason=reason)
        if self.session is None or set(self.session.wrapped) != set(inside):
            self.session = self._wrap(inside)
        self._before = self.session.calls

    def _wrap(self, modules: Sequence[nn.Module]) -> Session:
        """A new session for `modules`, after closing the previous one. Raises WrapError."""
        if self.session is not None:
            self.session.close()
        session = Session(self._budget, **self._options)
        try:
            for module in modules:
                session.wrap(module)
        except WrapError:
            session.close()
            raise
        return session

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Offload the state of the optimizers, if that was asked for.

        A checkpoint is loaded before that. Raises WrapError if it cannot be offloaded.
        """
        for optimizer in () if self._offloads is False else trainer.optimizers:
            offload_state(optimizer, self._offloads, self._options)

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Offload it again: as training ends, Lightning reads all of it.

        If it moved the model away from the device meanwhile, with the state, let that be.
        """
        device = trainer.strategy.root_device
        for optimizer in () if self._offloads is False else trainer.optimizers:
            groups = optimizer.param_groups
            if all(p.device == device for group in groups for p in group["params"]):
                offload_state(optimizer, self._offloads, self._options)
            elif is_offloaded(optimizer):
                restore_optimizer(optimizer)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """If Lightning calls no backward, let the training step keep nothing for it.

        That is so in the last epoch of StochasticWeightAveraging, for the statistics of batch norm.
        """
        if getattr(trainer.fit_loop, "_skip_backward", False) and not self._skips:
            self._step = vars(pl_module).get("training_step")
            pl_module.training_step = torch.no_grad()(pl_module.training_step)
            self._skips = True

    def on_train_epoch_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Undo what `on_train_batch_start` did."""
        self._end_skipping(pl_module)

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """Undo what `on_train_batch_start` did."""
        self._end_skipping(pl_module)

    def _end_skipping(self, pl_module: Any) -> None:
        if self._skips:
            del pl_module.training_step
            if self._step is not None:
                pl_module.training_step = self._step
            self._skips, self._step = False, None

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the metrics. Raises NotEngagedError if the first step ran no module through outcore.

        If it ran some but not all, a warning names the others; with `strict`, that raises too.
        """
        session = self.session
        if session is None:
            return
        if self._before is not None and not session.hopeful:
            self._look_for_work(session, pl_module, self._before)
            self._before = None
        if _logs_now(trainer):
            for name, value in metrics(session.report()).items():
                pl_module.log(name, float(value), on_step=True, on_epoch=False)

    def _look_for_work(self, session: Session, pl_module: nn.Module, before: int) -> None:
        for module in session.wrapped:  # this warns of those that train without being called
            WRAPPERS[module].stop_watching()
        if session.calls == before and not session.backend.notes:
            raise NotEngagedError(model=type(pl_module).__name__)
        idle = set(session.idle)
        if not idle:
            return
        names = [name for name, module in pl_module.named_modules() if module in idle]
        error = NotEngagedError(model=", ".join(names))
        if session.backend.options.strict:
            raise error
        warnings.warn(str(error), stacklevel=2)


def _refuse(pl_module: nn.Module) -> None:
    name = type(pl_module).__name__
    if pl_module._compiled_call_impl is not None:  # noqa: SLF001 - what Module.compile sets
        reason = (
            "Lightning calls training_step and never the LightningModule itself, so compile() or "
            "outcore.wrap() has no effect on it: leave that out, LightningCallback wraps the "
            "modules inside"
        )
        raise WrapError(model=name, reason=reason)
    if getattr(pl_module, "_compiler_ctx", None) is not None:
        reason = "it is already compiled with torch.compile: leave out that or LightningCallback"
        raise WrapError(model=name, reason=reason)


def _named(pl_module: nn.Module, name: str) -> nn.Module:
    """The module of this name inside `pl_module`. Raises WrapError if there is none."""
    try:
        return pl_module.get_submodule(name)
    except AttributeError as error:
        near = get_close_matches(name, [n for n, _ in pl_module.named_modules()], 1)
        meant = f": did you mean {near[0]!r}?" if near else ""
        reason = f"it has no module named {name!r} (LightningCallback(modules=...)){meant}"
        raise WrapError(model=type(pl_module).__name__, reason=reason) from error


def _trained(module: nn.Module) -> Iterator[nn.Module]:
    """The direct children with parameters to train; of those that cannot be called, theirs."""
    for child in module.children():
        if not any(p.requires_grad for p in child.parameters()):
            continue
        if _can_be_called(child):
            yield child
        else:
            yield from _trained(child)


def _can_be_called(module: nn.Module) -> bool:
    """Whether it has a `forward`, which lists, dicts and mere holders of modules do not."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _logs_now(trainer: Any) -> bool:
    """Whether loggers record this step. If not, no report is made, which takes milliseconds."""
    connector = getattr(trainer, "_logger_connector", None)
    return bool(getattr(connector, "should_update_logs", True))
