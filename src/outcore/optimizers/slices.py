"""slices: which parameters an optimizer can update by themselves, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import optim

from outcore.optimizers.parameter_state import ParameterState

INDEPENDENT = frozenset(
    getattr(optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam"),
        *("RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
    )
)
"""Optimizers whose update of a parameter depends on nothing but its gradient and state, and its
group's settings. Not their subclasses, which may do more."""

STATES = 2
"""How many tensors of a parameter's size its state is taken to have before it exists."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Parameters of one group that are updated together."""

    group: dict[str, Any]
    parameters: list[torch.Tensor]


def slices(optimizer: optim.Optimizer, most_bytes: int) -> Iterator[Slice]:
    """Parameters with gradients, such that the state of each slice has at most `most_bytes`.

    Or it is the state of a single parameter.
    """
    for group in optimizer.param_groups:
        parameters: list[torch.Tensor] = []
        total = 0
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            nbytes = _nbytes(parameter, optimizer.state.get(parameter))
            if parameters and total + nbytes > most_bytes:
                yield Slice(group, parameters)
                parameters, total = [], 0
            parameters.append(parameter)
            total += nbytes
        if parameters:
            yield Slice(group, parameters)


def _nbytes(parameter: torch.Tensor, state: Mapping[str, Any] | None) -> int:
    known = state.nbytes if isinstance(state, ParameterState) else 0
    return known or STATES * parameter.nbytes


@contextmanager
def only(optimizer: optim.Optimizer, part: Slice) -> Iterator[None]:
    """In this context, `optimizer` has no other parameters than those of `part`."""
    groups = optimizer.param_groups
    try:
        optimizer.param_groups = [{**part.group, "params": part.parameters}]
        yield
    finally:
        optimizer.param_groups = groups
