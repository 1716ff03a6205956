"""stepping: run the steps of an optimizer whose state is away, slice by slice.

While a slice is updated, the state of the next one comes, and that of the previous one goes. So
about three slices are on the device at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import optim

from outcore.errors import HostMemoryError, OutcoreError, SpillError
from outcore.optimizers.parameter_state import ParameterState, is_plain
from outcore.optimizers.places import Copy, OuterTiers
from outcore.optimizers.slices import INDEPENDENT, Slice, only, slices

STAYS = "outcore: some of the state of {optimizer} stays on the device: {reason}"


class Move(NamedTuple):
    """A tensor of a parameter's state on its way."""

    state: ParameterState
    key: str
    copy: Copy


class Stepping:
    """Moves the state of one optimizer, and runs its steps. It does not refer to the optimizer."""

    def __init__(self, outer: OuterTiers, device: torch.device, slice_bytes: int) -> None:
        self.outer, self.device, self.slice_bytes = outer, device, slice_bytes
        self.ended = False
        """Whether all of the state is back, and stays."""
        self._told = False
        """Whether it was reported that something cannot leave."""

    def step(self, optimizer: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Do what the optimizer's class does in a step, without hooks."""
        run = _without_hooks(type(optimizer).step)
        if self.ended:
            return run(optimizer, *args, **kwargs)
        if type(optimizer) in INDEPENDENT:
            return self._by_slices(optimizer, run, *args, **kwargs)
        results = run(optimizer, *args, **kwargs)
        self.put_away(optimizer)
        return results

    def put_away(
        self,
        optimizer: optim.Optimizer,
        parameters: Iterable[torch.Tensor] | None = None,
        *,
        held: bool = False,
    ) -> None:
        """Move the state of `parameters`, or of all, away: about a slice at a time.

        `held`: also tensors that something else refers to, which will not follow the steps.
        """
        waiting: list[torch.Tensor] = []
        total = 0
        for parameter in list(optimizer.state) if parameters is None else parameters:
            waiting.append(parameter)
            total += _nbytes_here(optimizer.state[parameter])
            if total >= self.slice_bytes:
                self._finish_going(optimizer, self._send(optimizer, waiting, held=held))
                waiting, total = [], 0
        self._finish_going(optimizer, self._send(optimizer, waiting, held=held))

    def _by_slices(
        self,
        optimizer: optim.Optimizer,
        run: Callable[..., Any],
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parts = list(slices(optimizer, self.slice_bytes))
        coming = _fetch(optimizer, parts[:1])
        going: list[Move] = []
        for number, part in enumerate(parts, 1):
            here, coming = coming, _fetch(optimizer, parts[number : number + 1])
            _finish_coming(here)
            with only(optimizer, part):
                run(optimizer)
            gone, going = going, self._send(optimizer, part.parameters)
            self._finish_going(optimizer, gone)
        self._finish_going(optimizer, going)
        return loss

    def _send(
        self, optimizer: optim.Optimizer, parameters: Iterable[torch.Tensor], *, held: bool = False
    ) -> list[Move]:
        """Start to move away the state of `parameters`, as far as there is room."""
        chosen = [
            (state, key)
            for parameter in parameters
            if (state := _own_state(optimizer, parameter)) is not None
            for key in state.movable(self.device, held=held)
        ]
        homeless = [(state, key) for state, key in chosen if not state.has_home(key)]
        tensors = [state[key] for state, key in homeless]
        try:
            homes = self.outer.places(tensors)
        except (SpillError, HostMemoryError) as error:
            self._tell(optimizer, error)
            chosen = [(state, key) for state, key in chosen if state.has_home(key)]
        else:
            for (state, key), home in zip(homeless, homes, strict=True):
                state.settle(key, home)
        return [Move(state, key, state.write(key)) for state, key in chosen]

    def _finish_going(self, optimizer: optim.Optimizer, moves: list[Move]) -> None:
        """Let the tensors of `moves`, which is emptied, be away. Those whose copies failed stay."""
        while moves:
            state, key, copy = moves.pop(0)
            try:
                state.let_go(key, copy)
            except SpillError as error:
                self._tell(optimizer, error)

    def _tell(self, optimizer: optim.Optimizer, error: OutcoreError) -> None:
        """Warn that some of the state stays on the device, once."""
        if not self._told:
            self._told = True
            name, reason = type(optimizer).__name__, error.with_traceback(None)
            warnings.warn(STAYS.format(optimizer=name, reason=reason), stacklevel=2)


def _fetch(optimizer: optim.Optimizer, parts: Iterable[Slice]) -> list[Move]:
    """Start to copy back what is away of the state of `parts`."""
    parameters = (parameter for part in parts for parameter in part.parameters)
    states = (optimizer.state.get(parameter) for parameter in parameters)
    return [
        Move(state, key, copy)
        for state in states
        if isinstance(state, ParameterState)
        for key, copy in state.read().items()
    ]


def _finish_coming(moves: list[Move]) -> None:
    """Let the tensors of `moves`, which is emptied, be on the device.

    Raises SpillError if a copy failed.
    """
    while moves:
        state, key, copy = moves.pop(0)
        state.take_back(key, copy)


def _own_state(optimizer: optim.Optimizer, parameter: torch.Tensor) -> ParameterState | None:
    """The state of `parameter` as one whose tensors can be away; None if there is nothing large."""
    state = optimizer.state.get(parameter)
    if isinstance(state, ParameterState):
        return state
    if type(state) is dict and any(map(is_plain, state.values())):
        own = optimizer.state[parameter] = ParameterState(state)
        return own
    return None


def _nbytes_here(state: object) -> int:
    """Bytes of the tensors in `state` that are on a device and large."""
    values = state.here() if isinstance(state, ParameterState) else state
    found = values.values() if isinstance(values, dict) else ()
    return sum(value.untyped_storage().nbytes() for value in found if is_plain(value))


def _without_hooks(step: Any) -> Callable[..., Any]:
    """The step of an optimizer's class, without the code that torch puts around it for hooks."""
    found: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return found
