"""optimizers: what the optimizers of a model hold, found among the objects of the process."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

COPIES = {
    "SGD": 1,  # its momentum; without, none
    "Adagrad": 1,
    "ASGD": 1,
    "RMSprop": 1,
    "Lion": 1,
    "Adadelta": 2,
    "Adam": 2,
    "Adamax": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Rprop": 2,
}
"""Tensors as large as a parameter that an optimizer keeps for it, by class."""


def held_for(model: nn.Module) -> tuple[str, int]:
    """The names of the optimizers of a model's parameters, and the bytes of their states.

    Those that they will have once they have stepped, as far as the class is known.
    """
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    names, total = [], 0
    for each in gc.get_objects():
        if issubclass(type(each), Optimizer) and not _is_around_another(each):
            nbytes = _bytes(each, trained)
            if nbytes is not None:
                names.append(type(each).__name__)
                total += nbytes
    return ", ".join(names), total


def _is_around_another(optimizer: Optimizer) -> bool:
    """Such as Accelerate's, which is one by class and shows the state of the one inside."""
    return isinstance(getattr(optimizer, "optimizer", None), Optimizer)


def _bytes(optimizer: Optimizer, trained: set[int]) -> int | None:
    """Bytes of states; None where it trains none of these parameters."""
    expected, there, found = 0, 0, False
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in trained:
                continue
            found = True
            expected += _copies(optimizer, group) * parameter.untyped_storage().nbytes()
            state = optimizer.state.get(parameter, {})
            there += sum(
                value.untyped_storage().nbytes()
                for value in state.values()
                if isinstance(value, torch.Tensor) and value.numel() == parameter.numel()
            )
    return max(expected, there) if found else None


def _copies(optimizer: Optimizer, group: dict[str, Any]) -> int:
    kinds = [kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in COPIES]
    if not kinds or (kinds[0] == "SGD" and not group.get("momentum")):
        return 0
    return COPIES[kinds[0]] + bool(group.get("amsgrad"))
