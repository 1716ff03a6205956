"""of_model: find a model's optimizers among the process's objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from outcore.optimizers.offloading import is_around_another, is_offloaded
from outcore.optimizers.parameter_state import ParameterState


def optimizers_of(
    model: nn.Module,
) -> Iterator[tuple[Optimizer, list[tuple[dict[str, Any], nn.Parameter]]]]:
    """The optimizers of the parameters that `model` trains, with these and their groups."""
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    for each in gc.get_objects():
        if issubclass(type(each), Optimizer) and not is_around_another(each):
            groups = getattr(each, "param_groups", ())  # its constructor may have raised an error
            own = [(g, p) for g in groups for p in g["params"] if id(p) in trained]
            if own:
                yield each, own


def state_bytes(state: Any) -> int:
    """Bytes of the tensors of one state that are here, without counts of steps.

    These have no dimensions.
    """
    leaves = tree_leaves(state.here() if isinstance(state, ParameterState) else state)
    return sum(t.nbytes for t in leaves if isinstance(t, torch.Tensor) and t.ndim)


def offloadable(model: nn.Module) -> tuple[list[str], int]:
    """The optimizers of `model` with a state that is not offloaded: classes, and bytes."""
    names, total = [], 0
    for optimizer, own in optimizers_of(model):
        nbytes = sum(state_bytes(optimizer.state.get(p, {})) for _, p in own)
        if nbytes and not is_offloaded(optimizer):
            names.append(type(optimizer).__name__)
            total += nbytes
    return names, total
