"""TransformersCallback: outcore in the Trainer of Hugging Face's transformers.

`TrainingArguments(torch_compile_backend=...)` accepts only names that transformers lists. So this
callback wraps the model itself, in place, before the first step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, Unpack

from outcore.errors import MissingPackageError, WrapError
from outcore.integrations.metrics import metrics
from outcore.integrations.state import Offloads, offload_state
from outcore.runtime.settings.options import Keywords, checked_options
from outcore.wrapping import Session

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingPackageError(
        package="transformers",
        extra="transformers",
        purpose="TransformersCallback goes into the Trainer of transformers",
    ) from error

if TYPE_CHECKING:  # only for annotations
    from torch import nn

    from outcore.report import Report
    from outcore.runtime.backend import Backend


class TransformersCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not type-checked
    """Keeps the training steps of a Trainer inside a byte budget.

    >>> Trainer(..., callbacks=[TransformersCallback(budget="12GiB")])         # doctest: +SKIP

    `budget` and `options` are those of `outcore.Backend`; invalid ones raise what it raises, at
    once. Under a launcher, each process has this budget. `attach` lets reporters see the metrics.
    Training the same model again keeps its plans. For another model, the previous one is unwrapped.

    `offload_optimizer`: also do `outcore.offload_optimizer` with the optimizer of the Trainer; its
    options, if it is a mapping. Budgets are separate.
    """

    def __init__(
        self,
        budget: str | float | None = None,
        *,
        offload_optimizer: Offloads = False,
        **options: Unpack[Keywords],
    ) -> None:
        self._budget, self._options, self._offloads = budget, options, offload_optimizer
        checked_options({"budget": budget, **options})
        self._session: Session | None = None

    @property
    def backend(self) -> Backend | None:
        """The Backend of the model that was trained last; None before training."""
        return None if self._session is None else self._session.backend

    def attach(self, trainer: Any) -> Self:
        """Put this callback before all others of `trainer`, and return it.

        A Trainer passes its logs from one callback to the next: first those of `report_to`, then
        those given as `callbacks`. Only a callback that comes earlier can add to what they report.
        """
        callbacks: list[Any] = trainer.callback_handler.callbacks
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)
        return self

    def report(self) -> Report:
        """Like `Backend.report`. Raises WrapError before training."""
        if self.backend is None:
            reason = "there is no report yet: it wraps the model when training begins"
            raise WrapError(model=type(self).__name__, reason=reason)
        return self.backend.report()

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: nn.Module | None = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """Wrap the model, and offload the state of the optimizer if that was asked for.

        Raises WrapError if something else compiles or copies the model, or if the state cannot be
        offloaded.
        """
        session = self._session
        is_new = model is not None and (session is None or model not in session.wrapped)
        if model is not None and is_new:
            _refuse(args, model)
        if self._offloads is not False and optimizer is not None:
            self._offload(optimizer)
        if model is not None and is_new:
            self._wrap(model)

    def _wrap(self, model: nn.Module) -> None:
        session = self._session
        if session is not None:
            session.close()
        self._session = Session(self._budget, **self._options)
        self._session.wrap(model)

    def _offload(self, optimizer: Any) -> None:
        """Offload the state of the optimizer that is inside Accelerate's."""
        inner = getattr(optimizer, "optimizer", optimizer)
        offload_state(inner, self._offloads, self._options)
        if inner is not optimizer and getattr(optimizer, "scaler", None) is not None:
            # Accelerate's optimizer notes the inner one's `step` as it is made: let it look again.
            optimizer.__setstate__(optimizer.__getstate__())

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Add the metrics to the logs of training steps, and to the history."""
        if self.backend is None or not logs or "loss" not in logs:
            return  # logs of an evaluation, or the summary at the end
        found = metrics(self.backend.report())
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)


def _refuse(args: Any, model: nn.Module) -> None:
    name = type(model).__name__
    if getattr(args, "torch_compile", False):
        reason = "TrainingArguments(torch_compile=True) also compiles it: leave that out"
        raise WrapError(model=name, reason=reason)
    if getattr(args, "n_gpu", 1) > 1:
        reason = (
            f"the Trainer would copy it to {args.n_gpu} GPUs in each step, and copies are not "
            "planned: start one process per GPU with torchrun (docs/several-devices.md)"
        )
        raise WrapError(model=name, reason=reason)
