"""Replay: what is needed to run a forward call again if its graph was not as captured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from outcore.errors import StepError
from outcore.ir.trace import Trace
from outcore.runtime.step.versions import versions_of


@dataclass(frozen=True, slots=True)
class Replay:
    """The inputs of a forward call, and the generator's state before it.

    `copies`: position -> a copy, for inputs that AOTAutograd overwrites once the forward call is
    over. `versions`: for each input how often it may have been written; None if it does not matter.
    """

    inputs: tuple[Any, ...]
    generator_state: torch.Tensor
    copies: Mapping[int, torch.Tensor]
    versions: Sequence[range | None]
    results: tuple[Any, ...] = ()
    """What the call returned, and how often each was written by then, if it contains an op that may
    return something else if it runs again."""

    def giving(self, results: Sequence[Any]) -> Replay:
        """The same, once the call has returned `results`."""
        held = tuple(map(without_origin, results))
        return replace(self, results=tuple(zip(held, versions_of(results, ()), strict=True)))

    def check(self, results: Sequence[Any]) -> None:
        """Raise StepError if the call returned other results than these.

        Those that the caller has changed since cannot be told apart.
        """
        for (given, version), found in zip(self.results, results, strict=False):
            as_given = version is not None and given._version in version
            if as_given and not _same(given, found):
                raise StepError(
                    reason="forward of a first step has to run again, because a kernel behaved "
                    "differently than torch describes it, and cannot be told to give the same "
                    f"again: a result of shape {tuple(given.shape)} differs. Run the step again"
                )

    def inputs_before(self) -> list[Any]:
        """The inputs as they were before the forward call, although it is over.

        Raises StepError if one was overwritten since.
        """
        for each, version in zip(self.inputs, self.versions, strict=True):
            if version is not None and each._version not in version:
                shape = tuple(each.shape)
                raise StepError(
                    reason=f"an input of shape {shape} was changed in place between forward and "
                    "backward of a first step, which has to run again because a kernel behaved "
                    "differently than torch describes it. Run the step again; change the input "
                    "after backward"
                )
        return [self.copies.get(index, each) for index, each in enumerate(self.inputs)]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same values; NaN counts as equal to NaN."""
    both_nan = (one != one) & (other != other)  # noqa: PLR0124 - true for NaN alone
    return bool(((one == other) | both_nan).all())


def replay_of(
    trace: Trace,
    inputs: Sequence[Any],
    overwritten: Collection[int],
    generator_state: torch.Tensor,
) -> Replay:
    """The Replay of a forward call of `trace` that is about to begin.

    `overwritten`: positions of inputs.
    """
    values = {index: trace.values[trace.inputs[index]] for index in overwritten}
    copies = {
        index: _copy(inputs[index], value.offset, trace.buffers[value.buffer].nbytes)
        for index, value in values.items()
    }
    may_change = [inputs[index] for index in overwritten]
    held = tuple(map(without_origin, inputs))
    return Replay(held, generator_state, copies, versions_of(inputs, may_change))


def without_origin(given: Any) -> Any:
    """`given`, without the autograd graph that made it, or will once the call overwrites it.

    What is held until the backward of a call would never be freed if it refers to that call.
    """
    return given if not isinstance(given, torch.Tensor) or is_parameter(given) else given.detach()


def is_parameter(given: Any) -> bool:
    """Whether autograd accumulates the gradient of an input."""
    return isinstance(given, torch.Tensor) and given.requires_grad and given.is_leaf


def _copy(given: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
    """A copy of `given` and of the memory around it that its buffer stands for.

    The buffer has `nbytes`, and `given` begins `offset` items after its start. Views of other parts
    of the buffer are made of the copy.
    """
    memory = given.new_empty(0, dtype=torch.uint8).set_(given.untyped_storage())
    start = (int(given.storage_offset()) - offset) * given.itemsize
    if start < 0:  # it lies nearer to the start than when it was captured
        start, offset, nbytes = 0, int(given.storage_offset()), len(memory)
    part = memory[start : start + nbytes].clone().untyped_storage()
    return given.new_empty(0).set_(part, offset, given.shape, given.stride())
