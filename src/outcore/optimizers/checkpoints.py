"""checkpoints: save and load the state of an optimizer that is away, a part at a time.

torch would copy all of a loaded state to the device before anyone could move it away. So tensors
are passed through `load_state_dict` in boxes that torch does not look into.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import optim

from outcore.optimizers.parameter_state import ParameterState, is_plain
from outcore.optimizers.stepping import Stepping

COUNT = "step"
"""What torch's optimizers call the number of steps: torch loads it by rules of its own."""

TORCHS = "torch.optim."
"""Where torch's optimizers are."""


@dataclass(frozen=True, slots=True)
class Box:
    """A tensor of a loaded state."""

    tensor: torch.Tensor

    def opened(self, parameter: Any) -> torch.Tensor:
        """A copy of the tensor as torch would load it: on its parameter's device, of its type."""
        if not isinstance(parameter, torch.Tensor):
            return self.tensor
        dtype = parameter.dtype if parameter.is_floating_point() else self.tensor.dtype
        with torch.inference_mode(mode=False):
            return self.tensor.to(dtype=dtype, device=parameter.device, copy=True)

    def opened_at_least(self, parameter: Any) -> torch.Tensor:
        """As `opened`; the tensor itself if there is no memory for a copy."""
        with suppress(RuntimeError):
            return self.opened(parameter)
        return self.tensor


class Checkpoints:
    """Hooks for `state_dict` and `load_state_dict` of an optimizer."""

    def __init__(self, stepping: Stepping) -> None:
        self._stepping = stepping

    def install(self, optimizer: optim.Optimizer) -> Callable[[], None]:
        """Register the hooks. Returns what removes them."""
        handles = (
            optimizer.register_state_dict_post_hook(_with_copies, prepend=True),
            optimizer.register_load_state_dict_pre_hook(self._box),
            optimizer.register_load_state_dict_post_hook(self._unbox, prepend=True),
        )

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove

    def _box(self, optimizer: optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Put large tensors in boxes, unless code that is not torch's looks at what is loaded.

        Raises StepError if nothing could leave the device afterwards.
        """
        self._stepping.outer.check()
        return _boxed(state_dict) if type(optimizer).__module__.startswith(TORCHS) else state_dict

    def _unbox(self, optimizer: optim.Optimizer) -> None:
        """Move what was loaded away, as much at a time as a slice has."""
        try:
            for some in self._stepping.parts(optimizer.state, lambda p: _nbytes(optimizer, p)):
                for parameter in some:
                    for key, box in _boxes(optimizer, parameter).items():
                        optimizer.state[parameter][key] = box.opened(parameter)
                self._stepping.move_away(optimizer, some)
        finally:  # a box that is left would break the next step
            for parameter in list(optimizer.state):
                for key, box in _boxes(optimizer, parameter).items():
                    optimizer.state[parameter][key] = box.opened_at_least(parameter)
        self._stepping.warn(optimizer)


def _boxes(optimizer: optim.Optimizer, parameter: Any) -> dict[Any, Box]:
    """The boxes in the state of `parameter`."""
    values = optimizer.state[parameter]
    found = values.items() if isinstance(values, dict) else ()
    return {key: value for key, value in found if isinstance(value, Box)}


def _nbytes(optimizer: optim.Optimizer, parameter: Any) -> int:
    return sum(box.tensor.nbytes for box in _boxes(optimizer, parameter).values())


def _with_copies(_: optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Let `state_dict` have copies of what is away."""
    states = state_dict["state"].items()
    copied = {k: s.copy(on_host=True) if isinstance(s, ParameterState) else s for k, s in states}
    return {**state_dict, "state": copied}


def _boxed(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Put the large tensors of parameters' states in boxes.

    Not those that share their memory: they would not share it any more.
    """
    states: dict[Any, Any] = state_dict["state"]
    large = [v for values in states.values() for _, v in _large(values)]
    times = Counter(v.untyped_storage().data_ptr() for v in large)

    def in_box(value: torch.Tensor) -> Any:
        return Box(value) if times[value.untyped_storage().data_ptr()] == 1 else value

    boxed = {
        number: {**values, **{k: in_box(v) for k, v in _large(values)}}
        if isinstance(number, int) and isinstance(values, dict)
        else values
        for number, values in states.items()
    }
    return {**state_dict, "state": boxed}


def _large(values: object) -> list[tuple[Any, torch.Tensor]]:
    found = values.items() if isinstance(values, dict) else ()
    return [(key, value) for key, value in found if key != COUNT and is_plain(value)]
