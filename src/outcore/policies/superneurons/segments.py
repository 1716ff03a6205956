"""segments: segments between checkpoints, and how each is replayed (section 3.4).

These functions work on an abstract graph of layers, in order of execution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer."""

    inputs: tuple[int, ...]
    """The positions of the layers whose outputs it reads."""
    checkpoint: bool
    """Whether it is a checkpoint: what it makes is not dropped, and replays start from it."""
    forward_bytes: int
    """What its forward makes (l_f in the paper)."""
    backward_bytes: int
    """The working set of its backward (l_b in the paper); 0 if it has none."""


def segments(layers: Sequence[Layer]) -> tuple[tuple[int, ...], ...]:
    """The layers between checkpoints, one segment each, in order of their first layers.

    A layer that is not a checkpoint continues the segment of its last input that has one. It begins
    a segment if all its inputs are checkpoints. Linear in layers and inputs.
    """
    segment: dict[int, int] = {}
    members: dict[int, list[int]] = {}
    for number, layer in enumerate(layers):
        if layer.checkpoint:
            continue
        goes_on = [segment[i] for i in layer.inputs if i in segment]
        segment[number] = goes_on[-1] if goes_on else number
        members.setdefault(segment[number], []).append(number)
    return tuple(map(tuple, members.values()))


def bounded(layers: Sequence[Layer], segment: Sequence[int], peak_bytes: int) -> bool:
    """Whether `segment`, replayed as a whole, stays within `peak_bytes`: SuperNeurons' test.

    It adds the forwards of all its layers and the backward of the last layer that has one. As in
    the paper, what that backward shares with the forwards counts twice.
    """
    replayed = sum(layers[i].forward_bytes for i in segment)
    backwards = (layers[i].backward_bytes for i in reversed(segment))
    return replayed + next(filter(None, backwards), 0) <= peak_bytes
