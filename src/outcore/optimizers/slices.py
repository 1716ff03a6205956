"""slices: which parameters an optimizer can update by themselves, and in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
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

    def as_group(self) -> dict[str, Any]:
        """The group with no other parameters."""
        return {**self.group, "params": self.parameters}


def run_on(optimizer: optim.Optimizer, part: Slice, run: Callable[..., Any]) -> None:
    """Call `run`, a step, for the parameters of `part`.

    It gets another object with the same state and settings. So the optimizer is whole for others
    who look at it meanwhile, and after an interrupt. What `run` sets is set on the optimizer.
    """
    before = dict(vars(optimizer))
    view = object.__new__(type(optimizer))
    vars(view).update(before)
    view.param_groups = [part.as_group()]
    try:
        run(view)
    finally:
        after = {k: v for k, v in vars(view).items() if k != "param_groups"}
        vars(optimizer).update({k: v for k, v in after.items() if before.get(k, view) is not v})
        vars(view).clear()  # an error's traceback may keep it


def has_slices(optimizer: optim.Optimizer) -> bool:
    """Whether parts of the parameters can be updated one after the other.

    torch accepts a parameter twice. Its state would then be in two slices at a time.
    """
    times = Counter(id(p) for group in optimizer.param_groups for p in group["params"])
    return type(optimizer) in INDEPENDENT and all(number == 1 for number in times.values())


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
    """Bytes of the state, or of the parameter if that is more: updates make tensors of its size."""
    if not state:
        return STATES * parameter.nbytes
    return max(parameter.nbytes, state.nbytes if isinstance(state, ParameterState) else 0)
