"""Replay: what is needed to run a forward call again if its graph was not as captured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outcore.errors import StepError
from outcore.runtime.step.versions import versions_of


@dataclass(frozen=True, slots=True)
class Replay:
    """The inputs of a forward call, and the generator's state before it.

    `copies`: position -> a copy, for inputs that AOTAutograd overwrites once the forward call is
    over. `versions`: for each input how often it had been written; None if that does not matter.
    """

    inputs: tuple[Any, ...]
    generator_state: torch.Tensor
    copies: Mapping[int, torch.Tensor]
    versions: Sequence[int | None]

    def inputs_before(self) -> list[Any]:
        """The inputs as they were before the forward call, although it is over.

        Raises StepError if one was overwritten since.
        """
        for each, version in zip(self.inputs, self.versions, strict=True):
            if version is not None and each._version != version:
                shape = tuple(each.shape)
                raise StepError(
                    reason=f"an input of shape {shape} was changed in place between forward and "
                    "backward of a first step, which has to run again because a kernel behaved "
                    "differently than torch describes it. Run the step again; change the input "
                    "after backward"
                )
        return [self.copies.get(index, each) for index, each in enumerate(self.inputs)]


def replay_of(
    inputs: Sequence[Any], overwritten: Collection[int], generator_state: torch.Tensor
) -> Replay:
    """The Replay of a forward call that is about to begin; `overwritten`: positions of inputs."""
    copies = {index: _copy(inputs[index]) for index in overwritten}
    may_change = [inputs[index] for index in overwritten]
    return Replay(tuple(inputs), generator_state, copies, versions_of(inputs, may_change))


def _copy(given: torch.Tensor) -> torch.Tensor:
    """A copy of the whole storage of `given`, viewed as `given` is: views are made of it."""
    storage: Any = given.untyped_storage()
    whole = storage.clone()
    return given.new_empty(0).set_(whole, given.storage_offset(), given.shape, given.stride())
