"""optimizers: what the optimizers of a model hold, or will hold."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from outcore.optimizers import is_offloaded
from outcore.optimizers.of_model import optimizers_of, state_bytes
from outcore.preflight.step import no_memory

SOME = {bool: False, int: 1, float: 0.5}
"""A value for each type of number that an optimizer's step may read."""

OF_NO_MATTER = ("foreach", "fused", "capturable")
"""Options that say only how a step is computed, which does not change what is held."""

LOOSE = ("params", "lr")
"""Arguments to leave out: `params` is no option; `lr` does not matter, and may be a tensor."""

LATEST = 2
"""Tensors that L-BFGS keeps in addition to its history: a direction and a gradient."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """What the optimizers of a model hold after a step."""

    names: tuple[str, ...]
    """Class names of the optimizers."""
    nbytes: int
    """Bytes of their states."""
    unknown: tuple[str, ...] = ()
    """Optimizers for which only what they hold already is counted."""


def held_for(model: nn.Module) -> OptimizerState:
    """The optimizers of a model's parameters, and the bytes of their states.

    Optimizers of torch are measured without memory; those that are offloaded hold what they hold
    now. outcore does not call the code of others: it counts what they hold, which is everything
    only if each parameter has its state already.
    """
    names, unknown, total = [], [], 0
    for optimizer, own in optimizers_of(model):
        name = type(optimizer).__name__
        nbytes, is_all = _bytes(optimizer, own)
        names.append(name)
        unknown += [] if is_all else [name]
        total += nbytes
    return OptimizerState(tuple(names), total, tuple(unknown))


def _bytes(
    optimizer: Optimizer, own: list[tuple[dict[str, Any], nn.Parameter]]
) -> tuple[int, bool]:
    """Bytes of the states, and whether that is all that there will be."""
    there = [state_bytes(optimizer.state.get(p, {})) for _, p in own]
    if isinstance(optimizer, LBFGS):  # its one state, at its first parameter, is for all of them
        history = own[0][0]["history_size"]
        return max(sum(there), (2 * history + LATEST) * sum(p.nbytes for _, p in own)), True
    if is_offloaded(optimizer):
        return sum(there), True
    kind = next((k for k in type(optimizer).__mro__ if _is_torchs(k)), None)
    expected = None if kind is None else _expected(kind, own)
    if expected is None:
        return sum(there), all(p in optimizer.state for _, p in own)
    return sum(map(max, there, expected)), True


def _is_torchs(kind: type) -> bool:
    package = kind.__module__.split(".")[:2]
    return package == ["torch", "optim"] and kind is not Optimizer


def _expected(kind: type, own: Iterable[tuple[dict[str, Any], nn.Parameter]]) -> list[int] | None:
    """Bytes of each parameter's state after a step; None if a step cannot be measured."""
    known: dict[Any, int | None] = {}
    found = []
    for group, parameter in own:
        key = id(group), parameter.shape, parameter.dtype
        if key not in known:
            known[key] = _measured(kind, group, parameter)
        nbytes = known[key]
        if nbytes is None:
            return None
        found.append(nbytes)
    return found


def _measured(kind: type, group: dict[str, Any], like: nn.Parameter) -> int | None:
    """Bytes of one state, from a step without memory; the gradient is dense, or else sparse."""
    names = signature(kind).parameters
    options = {name: group[name] for name in names if name in group and name not in LOOSE}
    options |= dict.fromkeys((name for name in OF_NO_MATTER if name in names), False)
    for layout in (torch.strided, torch.sparse_coo):
        with suppress(Exception), no_memory(), SomeNumbers():  # a step may raise anything
            parameter = nn.Parameter(torch.empty(like.shape, dtype=like.dtype, device="cpu"))
            parameter.grad = torch.zeros_like(parameter, layout=layout)
            optimizer = kind([parameter], **options)
            optimizer.step()
            return state_bytes(optimizer.state[parameter])
    return None


class SomeNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Gives some number for each value that is read from a tensor without numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return one of `SOME` if a number is read."""
        if func is torch.ops.aten._local_scalar_dense.default:  # noqa: SLF001 - what `item` calls
            dtype = args[0].dtype
            return SOME[bool if dtype == torch.bool else float if dtype.is_floating_point else int]
        return func(*args, **(kwargs or {}))
