"""stepping: run the steps of an optimizer whose state is away, slice by slice.

While a slice is updated, the state of the next one comes, and that of the previous one goes. So
about three slices are on the device at a time.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import optim
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from outcore.optimizers.parameter_state import ParameterState, is_plain
from outcore.optimizers.places import Copy, Outer
from outcore.optimizers.slices import Slice, has_slices, run_on, slices

STAYS = "outcore: some of the state of {optimizer} stays on the device: {reason}"

SHARDED = (
    "outcore: some of the state of {optimizer} stays on the device: that of tensor subclasses, "
    "such as FSDP2's DTensor, is not moved"
)

ELSEWHERE = (
    "outcore: some of the state of {optimizer} stays on the device: it was offloaded for the "
    "device {device}, and parameters are on another one now; call outcore.restore_optimizer and "
    "then offload_optimizer again"
)

REPLACED = (
    "outcore: the step of {optimizer} was replaced by one from before outcore.offload_optimizer: "
    "all of its state is on the device in each step. Call offload_optimizer before what replaced "
    "it, such as Accelerator.prepare with a gradient scaler"
)

_HOOKS = getattr(optim.Optimizer.profile_hook_step(len), "__code__", object())
"""The code that torch puts around the step of an optimizer's class, for hooks."""


class Move(NamedTuple):
    """A tensor of a parameter's state on its way."""

    state: ParameterState
    key: str
    copy: Copy


class Stepping:
    """Moves the state of one optimizer, and runs its steps. It does not refer to the optimizer."""

    def __init__(self, outer: Outer, device: torch.device, slice_bytes: int) -> None:
        self.outer, self.device, self.slice_bytes = outer, device, slice_bytes
        self.ended = False
        """Whether all of the state is back, and stays."""
        self.lock = threading.RLock()
        """Held in a step, and by what reads a state (`ParameterState.lock`)."""
        self._in_step = self._stepped = False
        """Whether `step` runs, and whether it ran since hooks were last called."""
        self._reasons: list[str] = []
        """Why some of the state stays, to be reported."""
        self._told: set[str] = set()
        """What was reported."""

    def step(self, optimizer: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Do what the optimizer's class does in a step, without hooks."""
        run = _without_hooks(type(optimizer).step)
        if self.ended:
            return run(optimizer, *args, **kwargs)
        self.outer.check()
        self._in_step = True
        try:
            if has_slices(optimizer) and is_hooked(type(optimizer).step):
                results = self._by_slices(optimizer, run, *args, **kwargs)
            else:
                results = self._whole(optimizer, run, *args, **kwargs)
            self._stepped = True
        finally:
            self._in_step = False
        return results

    def after_step(self, optimizer: optim.Optimizer, *_: Any) -> None:
        """Move the state away if something else than `step` did the step: a hook of torch."""
        if self._in_step or self.ended:
            return
        if not self._stepped:
            self.put_away(optimizer)
            self._tell(REPLACED, optimizer=type(optimizer).__name__)
        self._stepped = False

    def put_away(self, optimizer: optim.Optimizer) -> None:
        """Move all of the state away. Raises StepError as `Outer.check` does."""
        self.outer.check()
        self.move_away(optimizer, optimizer.state)
        self.warn(optimizer)

    def move_away(self, optimizer: optim.Optimizer, parameters: Iterable[Any]) -> None:
        """Move the state of `parameters` away, as far as possible; `warn` tells why not all."""
        with self.lock:
            for some in self.parts(parameters, lambda p: _nbytes_here(optimizer.state.get(p))):
                self._finish_going(self._send(optimizer, some))

    def parts(self, parameters: Iterable[Any], nbytes: Callable[[Any], int]) -> Iterator[list[Any]]:
        """Lists of parameters with about as many bytes as a slice; some may have none."""
        some: list[Any] = []
        total = 0
        for parameter in list(parameters):
            some.append(parameter)
            total += nbytes(parameter)
            if total >= self.slice_bytes:
                yield some
                some, total = [], 0
        yield some

    def _whole(
        self, optimizer: optim.Optimizer, run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Update everything at once; what is read comes back."""
        results = run(optimizer, *args, **kwargs)
        if not self.ended:
            self.put_away(optimizer)
        return results

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
        if self.ended:  # by the closure
            run(optimizer)
            return loss
        with self.lock:
            self._update(optimizer, run)
        self.warn(optimizer)
        return loss

    def _update(self, optimizer: optim.Optimizer, run: Callable[..., Any]) -> None:
        """Update all slices, the state of each while that of the next one comes."""
        parts = list(slices(optimizer, self.slice_bytes))
        coming = _fetch(optimizer, parts[:1])
        going: list[Move] = []
        for number, part in enumerate(parts, 1):
            here, coming = coming, _fetch(optimizer, parts[number : number + 1])
            _finish_coming(here)
            run_on(optimizer, part, run)
            gone, going = going, self._send(optimizer, part.parameters)
            self._finish_going(gone)
        self._finish_going(going)
        rest = (p for group in optimizer.param_groups for p in group["params"] if p.grad is None)
        self.move_away(optimizer, rest)  # what was read of it

    def _send(self, optimizer: optim.Optimizer, parameters: Iterable[Any]) -> list[Move]:
        """Start to move away the state of `parameters`, as far as there is room."""
        states = [s for p in parameters if (s := self._own_state(optimizer, p)) is not None]
        chosen = [(state, key) for state in states for key in state.movable(self.device)]
        homeless = [(state, key) for state, key in chosen if not state.has_home(key)]
        moves: list[Move] = []
        try:
            homes = self.outer.places([state[k] for state, k in homeless]) if homeless else []
            for (state, key), home in zip(homeless, homes, strict=True):
                state.settle(key, home)
        except Exception as error:  # noqa: BLE001 - none may end an update, nor may a warning
            self._reasons.append(str(error))
        try:
            for state, key in chosen:
                if state.has_home(key):
                    moves.append(Move(state, key, state.write(key)))
        except Exception as error:  # noqa: BLE001 - as above
            self._reasons.append(str(error))
        return moves

    def _finish_going(self, moves: list[Move]) -> None:
        """Let the tensors of `moves`, which is emptied, be away. Those whose copies failed stay."""
        while moves:
            state, key, copy = moves.pop(0)
            try:
                state.let_go(key, copy)
            except Exception as error:  # noqa: BLE001 - as above
                self._reasons.append(str(error))

    def _own_state(self, optimizer: optim.Optimizer, parameter: Any) -> ParameterState | None:
        """The state of `parameter` as one whose tensors can be away.

        None if there is nothing large, or if something else has the dict: it would not follow.
        """
        state = optimizer.state.get(parameter)
        if type(state) is dict and any(map(is_plain, state.values())):
            if sys.getrefcount(state) > _references_of_owned():
                return None
            state = optimizer.state[parameter] = ParameterState(state)
        if not isinstance(state, ParameterState):
            return None
        state.lock = self.lock
        return state

    def warn(self, optimizer: optim.Optimizer) -> None:
        """Warn that some of the state stays on the device. Not in the middle of an update."""
        name, groups = type(optimizer).__name__, optimizer.param_groups
        reasons, self._reasons = self._reasons, []
        if reasons:
            self._tell(STAYS, optimizer=name, reason=reasons[0])
        trained = (p for group in groups for p in group["params"] if p.requires_grad)
        if SHARDED not in self._told and any(map(is_traceable_wrapper_subclass, trained)):
            self._tell(SHARDED, optimizer=name)
        if any(p.device != self.device for group in groups for p in group["params"]):
            self._tell(ELSEWHERE, optimizer=name, device=str(self.device))

    def _tell(self, text: str, **words: str) -> None:
        """Warn, once for each `text`."""
        if text not in self._told:
            self._told.add(text)
            warnings.warn(text.format(**words), stacklevel=2)


def _references_of_owned() -> int:
    """References to a dict that only another one and the code that asks refer to."""
    owner: dict[int, object] = {0: {}}
    state = owner.get(0)
    return sys.getrefcount(state)


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


def _nbytes_here(state: object) -> int:
    """Bytes of the tensors in `state` that are on a device and large."""
    values = state.here() if isinstance(state, ParameterState) else state
    found = values.values() if isinstance(values, dict) else ()
    return sum(value.nbytes for value in found if is_plain(value))


def is_hooked(step: Any) -> bool:
    """Whether `step` is that of an optimizer's class, with the code that torch puts around it.

    Someone else may have put their own around that.
    """
    return getattr(step, "__code__", None) is _HOOKS


def _without_hooks(step: Any) -> Callable[..., Any]:
    found: Callable[..., Any] = step.__wrapped__ if is_hooked(step) else step
    return found
