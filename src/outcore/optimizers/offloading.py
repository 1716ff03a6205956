"""offloading: put the state of an optimizer away, in place, and get it back."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from contextlib import suppress
from types import MethodType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import optim

from outcore.errors import BudgetError, StepError, WrapError
from outcore.execute import Driver, open_driver
from outcore.ir.hardware import Tier
from outcore.optimizers.checkpoints import Checkpoints
from outcore.optimizers.parameter_state import ParameterState
from outcore.optimizers.places import Outer
from outcore.optimizers.stepping import Stepping, is_hooked
from outcore.runtime.settings.options import Options, Settings, make_options, settings_for
from outcore.units import parse_size

OptimizerT = TypeVar("OptimizerT", bound=optim.Optimizer)

SLICE = "128MiB"
"""Large enough for links to run at full speed, and small beside a step's activations."""

MARK = "_wrapped_by_lr_sched"
"""An attribute of the `step` that torch's schedulers put into an optimizer."""

OURS = "_offloads"
"""An attribute of the function that `offload_optimizer` puts there."""


def offload_optimizer(
    optimizer: OptimizerT,
    *,
    slice_size: str | int | None = None,
    host_budget: str | float | None = None,
    disk_budget: str | float | None = None,
    spill_dir: str | os.PathLike[str] | None = None,
    link_limit: str | float | None = None,
) -> OptimizerT:
    """Keep the state of `optimizer` in a slower memory between its steps. Returns `optimizer`.

    It is changed in place. Each `step` brings the state to the device a slice at a time, updates
    that slice's parameters and moves its state away again, while the next slice comes. Parameters
    get the same bits as without. Optimizers that are not torch's own, and LBFGS, are run whole:
    their state comes as they read it, and goes after the step (but not tensors in lists).

    What is read from `optimizer.state` meanwhile comes back, and stays until the next step.
    `state_dict` has copies of all tensors, which do not follow later steps: on a GPU, those of
    large ones are in host memory.

    - `slice_size`: the state that is updated at a time: text or bytes; default: "128MiB". About
      three times as much is on the device during `step`, or three times the state of the largest
      parameter.
    - the other options are those of `Backend`. The state of a GPU's parameters goes to host memory,
      that of a CPU's to the disk. Budgets are this optimizer's own.

    What the slower memory has no room for stays on the device, with a warning. Only tensors of
    64 KiB or more are moved. A second call, without options, moves away what came back.

    Raises WrapError if it is not an optimizer of torch, if it is offloaded already and there are
    options, or if its parameters are on several devices, and BudgetError, OptionValueError or
    SpillError for options.
    """
    given = {
        "host_budget": host_budget,
        "disk_budget": disk_budget,
        "spill_dir": spill_dir,
        "link_limit": link_limit,
    }
    if is_offloaded(optimizer):
        if slice_size is not None or any(value is not None for value in given.values()):
            reason = "it is offloaded already; call outcore.restore_optimizer to change options"
            raise WrapError(model=type(optimizer).__name__, reason=reason)
        _OFFLOADED[optimizer].stepping.put_away(optimizer)
        return optimizer
    device = _device(optimizer)
    slice_bytes = _slice_bytes(SLICE if slice_size is None else slice_size)
    found = make_options(given)
    options = Options(budget=1, **{name: getattr(found, name) for name in given})
    offloaded = _Offloaded(optimizer, settings_for(options, device), device, slice_bytes)
    _OFFLOADED[optimizer] = offloaded
    offloaded.install(optimizer)
    offloaded.stepping.put_away(optimizer)
    return optimizer


def restore_optimizer(optimizer: OptimizerT) -> OptimizerT:
    """Undo `offload_optimizer`: bring the state back to the device. Returns `optimizer`.

    Raises WrapError if the state of `optimizer` is not offloaded, SpillError if a disk fails, and
    StepError on another CUDA stream than the one on which it was offloaded.
    """
    if not is_offloaded(optimizer):
        raise WrapError(model=type(optimizer).__name__, reason="its state is not offloaded")
    _OFFLOADED[optimizer].stepping.outer.check()
    for parameter, state in list(optimizer.state.items()):
        if isinstance(state, ParameterState):
            optimizer.state[parameter] = dict(state)
    _OFFLOADED.pop(optimizer).remove_from(optimizer)
    return optimizer


def is_offloaded(optimizer: optim.Optimizer) -> bool:
    """Whether `offload_optimizer` was called for `optimizer`, and not undone."""
    return optimizer in _OFFLOADED


class _Offloaded:
    """What is installed on an optimizer."""

    def __init__(
        self,
        optimizer: optim.Optimizer,
        settings: Settings,
        device: torch.device,
        slice_bytes: int,
    ) -> None:
        self.driver: Driver = open_driver(
            device, settings.spill_dir, settings.link_bytes_per_second
        )
        budgets = {Tier.HOST: settings.host_budget_bytes, Tier.DISK: settings.disk_budget_bytes}
        self.driver.limit(budgets)
        tier = Tier.DISK if device.type == "cpu" else Tier.HOST
        self.stepping = Stepping(Outer(self.driver, tier), device, slice_bytes)
        run = torch.compiler.disable(self.stepping.step)  # type: ignore[no-untyped-call]  # torch leaves it so
        hooked = is_hooked(type(optimizer).step)
        step = optim.Optimizer.profile_hook_step(run) if hooked else run
        setattr(step, OURS, True)
        before = vars(optimizer).get("step")
        self._step = _Step(step, optimizer, before if hasattr(before, MARK) else None)
        self._remove_hooks: list[Callable[[], None]] = []

    def install(self, optimizer: optim.Optimizer) -> None:
        """Let the optimizer's step be ours, with its own hooks around it."""
        after = optimizer.register_step_post_hook(self.stepping.after_step)
        self._remove_hooks += [after.remove, Checkpoints(self.stepping).install(optimizer)]
        vars(optimizer)["step"] = self._step

    def remove_from(self, optimizer: optim.Optimizer) -> None:
        """Let the optimizer be as its class has it, and release memory and disk space."""
        self.stepping.ended = True  # whoever has put something around our step keeps calling it
        for remove in self._remove_hooks:
            remove()
        if vars(optimizer).get("step") is self._step:
            del vars(optimizer)["step"]
            if self._step.before is not None:
                vars(optimizer)["step"] = self._step.before
        self.driver.close()


_OFFLOADED: WeakKeyDictionary[optim.Optimizer, _Offloaded] = WeakKeyDictionary()
"""Optimizer -> what is installed on it."""


class _Step:
    """The `step` of one optimizer, like a bound method, but it does not keep the optimizer alive.

    torch's schedulers put their own function around `__func__`.
    """

    def __init__(
        self, function: Callable[..., Any], optimizer: optim.Optimizer, before: Any
    ) -> None:
        self.__func__ = function
        self._optimizer = ref(optimizer)
        self.before = before
        """What a scheduler had put there; None if none had."""
        if before is not None:
            setattr(self, MARK, True)
        plain = MethodType(type(optimizer).step, optimizer)
        self.__name__, self.__doc__ = getattr(plain, "__name__", "step"), plain.__doc__
        with suppress(TypeError, ValueError):  # of code that is not Python's
            self.__signature__ = inspect.signature(plain)  # torch's GradScaler looks at it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = self._optimizer()
        if optimizer is None:
            raise StepError(reason="the optimizer of this step is gone: keep a reference to it")
        if self.before is not None:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - what torch's schedulers check
        return self.__func__(optimizer, *args, **kwargs)


def _device(optimizer: object) -> torch.device:
    """The device of the parameters. Raises WrapError if `optimizer` cannot be offloaded."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, optim.Optimizer):
        reason = "it is not a torch.optim.Optimizer; pass the optimizer itself, not what holds it"
        raise WrapError(model=name, reason=reason)
    if is_around_another(optimizer):
        reason = "it is around another optimizer: pass that one, its attribute `optimizer`"
        raise WrapError(model=name, reason=reason)
    devices: set[torch.device]
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    found = ", ".join(sorted(map(str, devices)))
    if len(devices) != 1:
        reason = f"its parameters are on {found or 'no device'}; use one optimizer for each device"
        raise WrapError(model=name, reason=reason)
    if found.partition(":")[0] not in {"cpu", "cuda"}:
        raise WrapError(model=name, reason=f"outcore cannot move tensors of the device {found}")
    before = vars(optimizer).get("step")
    is_plain = before is None or getattr(before, "__func__", None) is type(optimizer).step
    if not (is_plain or _is_of_scheduler(before, optimizer)):
        reason = "its step was replaced by another function; offload it before that"
        raise WrapError(model=name, reason=reason)
    return devices.pop()


def is_around_another(optimizer: optim.Optimizer) -> bool:
    """Whether this is a wrapper that shows the state of the inner optimizer, like Accelerate's."""
    return isinstance(getattr(optimizer, "optimizer", None), optim.Optimizer)


def _is_of_scheduler(step: object, optimizer: optim.Optimizer) -> bool:
    """Whether `step` is what torch's schedulers put around the step of the optimizer's class.

    Or around one of ours, which was restored and does the same.
    """
    inner = getattr(step, "__wrapped__", None)
    return hasattr(step, MARK) and (inner is type(optimizer).step or hasattr(inner, OURS))


def _slice_bytes(given: str | int) -> int:
    try:
        return parse_size(given, None)
    except ValueError as error:
        raise BudgetError(option="slice_size", value=given, reason=str(error)) from error
