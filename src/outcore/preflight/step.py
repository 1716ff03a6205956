"""step: describe one training step of a user's model, and trace it without running it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from outcore.capture import trace, trace_as_run
from outcore.errors import CaptureError, OutcoreError
from outcore.ir.trace import Role, Trace
from outcore.preflight.lines import line_of

FEW = 4096
SEQUENCES = (
    torch.ops.aten.linspace.default,
    torch.ops.aten.arange.default,
    torch.ops.aten.arange.start,
    torch.ops.aten.arange.start_step,
)

LOG = logging.getLogger(FakeTensorMode.__module__)
LOGGED = "failed while attempting to run meta"
"""How torch's log line, with a traceback, of each error in an op without numbers begins."""

NEEDS_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException)


@dataclass(frozen=True, slots=True)
class Step:
    """A call whose results are differentiated, or whose `loss` is, if there is one."""

    call: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Traced:
    """The Trace of a step; `note` says how training would differ from it, and is empty if not."""

    trace: Trace
    note: str = ""
    unused_bytes: int = 0
    """Parameters and buffers of the modules that the step does not use: they need memory too."""


def no_memory() -> FakeTensorMode:
    """The mode in which tensors are made without memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


class FewNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Inside that mode: gives short sequences of numbers on the host their values after all.

    Many models are made by code like `[rate.item() for rate in torch.linspace(0, 0.1, 12)]`.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.mode = mode

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The result with its values, if `func` is one of `SEQUENCES` and the result is short."""
        found = func(*args, **(kwargs or {}))
        if func not in SEQUENCES or found.device.type != "cpu" or found.numel() > FEW:
            return found
        with unset_fake_temporarily():
            numbers = func(*args, **(kwargs or {}))
        return self.mode.fake_tensor_converter.from_real_tensor(
            self.mode, numbers, make_constant=True
        )


@contextmanager
def unlogged() -> Iterator[None]:
    """Keep torch from logging errors in ops without numbers: they are raised, and shown, anyway."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(LOGGED)

    LOG.addFilter(is_wanted)
    try:
        yield
    finally:
        LOG.removeFilter(is_wanted)


def traced(step: Step, mode: FakeTensorMode) -> Traced:
    """The Trace of a step, which is not run. Its tensors may be real or of `mode`.

    Raises CaptureError, or whatever the step raises if it needs values that are not computed.
    """
    call, loss = step.call, step.loss or loss_of
    owner = nn.ModuleList(modules_of(call))
    args, kwargs = tree_map(lambda leaf: _stand_in(leaf, mode), (step.args, dict(step.kwargs)))

    def whole(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return loss(call(*args, **kwargs))

    with ExitStack() as stack:
        stack.enter_context(unlogged())
        stack.enter_context(stand_ins(owner, mode))
        stack.enter_context(mode)
        try:
            found, note = trace(whole, args, kwargs), ""
        except Exception as error:  # noqa: BLE001 - there is another way, whose error is raised if it fails too
            followed = error
            found, note = trace_as_run(whole, owner, args, kwargs), _note(followed)
        return Traced(found, note, _unused_bytes(owner, found))


def _unused_bytes(owner: nn.Module, trace: Trace) -> int:
    tensors = (t for t in (*owner.parameters(), *owner.buffers()) if t.layout is torch.strided)
    storages = [tensor.untyped_storage() for tensor in tensors]
    held = {storage._cdata: storage.nbytes() for storage in storages}  # noqa: SLF001 - what tells storages apart
    inputs = {trace.values[value].buffer for value in trace.inputs}
    states = (b for b in trace.buffers if b.id in inputs and b.role in (Role.PARAM, Role.STATE))
    return max(0, sum(held.values()) - sum(buffer.nbytes for buffer in states))


def _note(followed: Exception) -> str:
    """How training handles a step that torch's compiler cannot follow, or not as one graph."""
    cause = followed.__cause__
    if isinstance(followed, OutcoreError) and (cause is None or isinstance(cause, OutcoreError)):
        return f"outcore runs the step in-core: {why(followed)}"
    where = line_of(followed) or why(followed)
    return f"torch.compile splits the step (graph break) at {where}; outcore plans each part"


def why(error: BaseException) -> str:
    """An error's message in one line."""
    if isinstance(error, OutcoreError):
        return str(error)
    if isinstance(error, NEEDS_NUMBERS):
        return "the code reads tensor values, which do not exist during tracing"
    said = (str(error).strip() or "nothing").splitlines()[0]
    return f"{type(error).__name__}: {said}"


def loss_of(found: Any) -> Any:
    """What is differentiated without a loss function: the output's loss, or all of the output."""
    loss = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    if isinstance(found, torch.Tensor):
        return found
    return [
        leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]


def modules_of(call: Callable[..., Any]) -> list[nn.Module]:
    """The modules that a call is, or that a function refers to by name."""
    if isinstance(call, OptimizedModule):
        return [call._orig_mod]  # noqa: SLF001 - what torch.compile was given
    if isinstance(call, nn.Module):
        return [call]
    function = inspect.unwrap(getattr(call, "func", call))  # a partial has one
    owner = [getattr(function, "__self__", None)]
    if not inspect.isfunction(function) and not inspect.ismethod(function):
        return [each for each in owner if isinstance(each, nn.Module)]
    named = inspect.getclosurevars(function)
    found = [*owner, *named.nonlocals.values(), *named.globals.values()]
    modules = {id(each): each for each in found if isinstance(each, nn.Module)}
    return list(modules.values())


@contextmanager
def stand_ins(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Replace the tensors that the modules hold by tensors without memory, until the end."""
    before: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    try:
        for module in model.modules():
            for names in (module._parameters, module._buffers, vars(module)):  # noqa: SLF001 - setattr would call the model's own code
                for name, value in list(names.items()):
                    if isinstance(value, torch.Tensor):
                        before.append((names, name, value))
                        names[name] = _stand_in(value, mode)
        yield
    finally:
        for names, name, value in reversed(before):
            names[name] = value


def _stand_in(leaf: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if isinstance(leaf, FakeTensor):
        return leaf
    if type(leaf) not in (torch.Tensor, nn.Parameter):
        raise CaptureError(reason=f"a tensor of type {type(leaf).__name__}")
    return mode.from_tensor(leaf)
