"""checkpoints: save and load the state of an optimizer that is away, a part at a time.

torch would copy all of a loaded state to the device before anyone could move it away. So tensors
are passed through `load_state_dict` in boxes that torch does not look into.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import optim

from outcore.optimizers.parameter_state import ParameterState, is_plain
from outcore.optimizers.stepping import Stepping


@dataclass(frozen=True, slots=True)
class Box:
    """A tensor of a loaded state."""

    tensor: torch.Tensor

    def opened(self, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor as torch would load it: on the device of its parameter, and of its type."""
        dtype = parameter.dtype if parameter.is_floating_point() else self.tensor.dtype
        return self.tensor.to(dtype=dtype, device=parameter.device)


class Checkpoints:
    """Hooks for `state_dict` and `load_state_dict` of an optimizer."""

    def __init__(self, stepping: Stepping) -> None:
        self._stepping = stepping

    def install(self, optimizer: optim.Optimizer) -> Callable[[], None]:
        """Register the hooks. Returns what removes them."""
        handles = (
            optimizer.register_state_dict_post_hook(_with_copies, prepend=True),
            optimizer.register_load_state_dict_pre_hook(_boxed),
            optimizer.register_load_state_dict_post_hook(self._unbox, prepend=True),
        )

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove

    def _unbox(self, optimizer: optim.Optimizer) -> None:
        """Move what was loaded away, as much at a time as a slice has."""
        ready: list[torch.Tensor] = []
        total = 0
        try:
            for parameter in list(optimizer.state):
                ready.append(parameter)
                total += _open(optimizer, parameter)
                if total >= self._stepping.slice_bytes:
                    self._stepping.put_away(optimizer, ready, held=True)
                    ready, total = [], 0
            self._stepping.put_away(optimizer, ready, held=True)
        finally:  # a box that is left would break the next step
            for parameter in list(optimizer.state):
                _open(optimizer, parameter)


def _open(optimizer: optim.Optimizer, parameter: torch.Tensor) -> int:
    """Open the boxes in the state of `parameter`; returns how many bytes were in them."""
    values = optimizer.state[parameter]
    found = values.items() if isinstance(values, dict) else ()
    boxes = {key: value for key, value in found if isinstance(value, Box)}
    for key, box in boxes.items():
        values[key] = box.opened(parameter)
    return sum(box.tensor.nbytes for box in boxes.values())


def _with_copies(_: optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Let `state_dict` have copies of what is away."""
    states = state_dict["state"].items()
    copied = {k: s.snapshot() if isinstance(s, ParameterState) else s for k, s in states}
    return {**state_dict, "state": copied}


def _boxed(_: optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Put the large tensors of `state_dict` in boxes."""
    states = state_dict["state"].items()
    boxed = {k: _in_boxes(s) if isinstance(s, dict) else s for k, s in states}
    return {**state_dict, "state": boxed}


def _in_boxes(values: Mapping[Any, Any]) -> dict[Any, Any]:
    return {k: Box(v) if is_plain(v) else v for k, v in values.items()}
