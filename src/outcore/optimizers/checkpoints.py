"""checkpoints: save and load the state of an optimizer that is away, a part at a time.

torch would copy all of a loaded state to the device before anyone could move it away. So tensors
are passed through `load_state_dict` in boxes that torch does not look into.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import optim
from torch.utils._pytree import tree_leaves, tree_map

from outcore.optimizers.parameter_state import ParameterState, is_plain
from outcore.optimizers.snapshots import Snapshots, tensors_in
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
        with torch.inference_mode(mode=False):
            if not isinstance(parameter, torch.Tensor):
                return self.tensor.clone()
            dtype = parameter.dtype if parameter.is_floating_point() else self.tensor.dtype
            return self.tensor.to(dtype=dtype, device=parameter.device, copy=True)


class Checkpoints:
    """Hooks for `state_dict` and `load_state_dict` of an optimizer.

    What is saved is of one moment, and what is loaded stays as it is. torch's own would follow
    later steps. Copies of what is away cannot, and they have to match the rest.
    """

    def __init__(self, stepping: Stepping) -> None:
        self._stepping = stepping
        self._loaded: set[int] = set()
        """The ids of the tensors that are being loaded, of which torch takes some as they are. If
        torch raises an error, nothing would release the tensors themselves."""

    def install(self, optimizer: optim.Optimizer) -> Callable[[], None]:
        """Register the hooks. Returns what removes them."""
        handles = (
            optimizer.register_state_dict_post_hook(self._with_copies, prepend=True),
            optimizer.register_load_state_dict_pre_hook(self._box),
            optimizer.register_load_state_dict_post_hook(self._unbox, prepend=True),
        )

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove

    def _with_copies(self, _: optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Let `state_dict` have copies of all tensors: large ones in host memory."""
        with self._stepping.lock:
            here = tree_map(lambda v: v.here() if isinstance(v, ParameterState) else v, state_dict)
            snapshots = Snapshots(tensors_in(here), on_host=True)
            copied: dict[str, Any]
            copied = tree_map(lambda v: snapshots.of(v) if isinstance(v, torch.Tensor) else v, here)
            for key, state in state_dict["state"].items():
                if isinstance(state, ParameterState):
                    copied["state"][key] = state.copy(on_host=True) | copied["state"][key]
            return copied

    def _box(self, optimizer: optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Put large tensors in boxes, unless code that is not torch's looks at what is loaded.

        Raises StepError if nothing could leave the device afterwards.
        """
        self._stepping.outer.check()
        self._loaded = set(map(id, tensors_in(state_dict["state"])))
        return _boxed(state_dict) if type(optimizer).__module__.startswith(TORCHS) else state_dict

    def _unbox(self, optimizer: optim.Optimizer) -> None:
        """Copy what was loaded and move it away, as much at a time as a slice has."""
        loaded, self._loaded = self._loaded, set()
        states = optimizer.state
        taken = (t for t in tensors_in(list(states.values())) if id(t) in loaded)
        snapshots = Snapshots(taken)

        def own(parameter: Any, value: Any) -> Any:
            if isinstance(value, Box):
                return value.opened(parameter)
            is_taken = isinstance(value, torch.Tensor) and id(value) in loaded
            return snapshots.of(value) if is_taken else value

        def own_or_taken(parameter: Any, value: Any) -> Any:
            try:
                return own(parameter, value)
            except RuntimeError:  # there is no memory for a copy
                return value.tensor if isinstance(value, Box) else value

        left = dict.fromkeys(states)
        try:
            for some in self._stepping.parts(states, lambda p: _nbytes(states[p])):
                for parameter in some:
                    states[parameter] = tree_map(partial(own, parameter), states[parameter])
                    del left[parameter]
                self._stepping.move_away(optimizer, some)
        finally:  # a box that is left would break the next step
            for parameter in left:
                states[parameter] = tree_map(partial(own_or_taken, parameter), states[parameter])
        self._stepping.warn(optimizer)


def _nbytes(state: object) -> int:
    """Bytes of the large tensors in a state, also of those in boxes."""
    found = (value.tensor if isinstance(value, Box) else value for value in tree_leaves(state))
    return sum(value.nbytes for value in found if is_plain(value))


def _boxed(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Put the large tensors of parameters' states in boxes.

    Not those that share their memory: they would not share it any more.
    """
    states: dict[Any, Any] = state_dict["state"]
    is_shared = Snapshots(tensors_in(states)).is_shared

    def in_box(key: object, value: Any) -> Any:
        return Box(value) if key != COUNT and is_plain(value) and not is_shared(value) else value

    boxed = {
        number: {key: in_box(key, value) for key, value in values.items()}
        if isinstance(number, int) and isinstance(values, dict)
        else values
        for number, values in states.items()
    }
    return {**state_dict, "state": boxed}
