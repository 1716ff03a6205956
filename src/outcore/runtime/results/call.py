"""call: what is held of a forward call of which a part may have to run again."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from outcore.capture import plain
from outcore.errors import StepError
from outcore.runtime.results.variant import Graph


@dataclass(frozen=True, slots=True)
class Call:
    """A forward call."""

    left: int
    """The tangents that its graph does without, as a set of bits."""
    graph: Graph
    """What ran it."""
    parameters: Mapping[int, torch.Tensor]
    """Those among its inputs, by position."""
    inputs: tuple[Any, ...]
    """Its inputs, some of them weakly, and None for saved ones; () if it need not run again."""
    versions: tuple[range | None, ...]
    """How often each of them may have been written; None if it does not matter."""
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    """That of the call."""

    def inputs_again(self, saved: Mapping[int, Any]) -> list[Any]:
        """Its inputs, with those that autograd `saved`.

        Raises StepError if one is gone, or was overwritten since.
        """
        found = list(self.inputs)
        for i, version in enumerate(self.versions):
            if isinstance(found[i], weakref.ref):
                found[i] = plain(found[i]())
                if found[i] is None:
                    raise StepError(reason=cannot_run_again("an input does not exist any more"))
            if i not in saved and version is not None and found[i]._version not in version:
                changed = f"an input of shape {tuple(found[i].shape)} was changed in place"
                raise StepError(reason=cannot_run_again(changed))
        return [saved.get(i, given) for i, given in enumerate(found)]


def cannot_run_again(why: str) -> str:
    """The reason of a StepError."""
    return (
        "a result of forward got a gradient that it was not expected to get, and forward cannot "
        f"run again for that: {why}. Run the step again: now it is expected"
    )


def kept(left: int, tangents: list[Any]) -> list[Any]:
    """Those of `tangents` that are not among `left`. Empties the list, to free each early."""
    found = [each for i, each in enumerate(tangents) if not left >> i & 1]
    tangents.clear()
    return found
