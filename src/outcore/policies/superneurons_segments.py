"""SuperNeurons' segments between checkpoints, and how each is replayed (section 3.4).

Over an abstract graph of layers, in order of execution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. `inputs`: the positions of the layers whose outputs it reads.

    `forward_bytes` is what its forward makes (l_f in the paper), `backward_bytes` the working set
    of its backward (l_b); 0 where it has none.
    """

    inputs: tuple[int, ...]
    checkpoint: bool
    forward_bytes: int
    backward_bytes: int


def segments(layers: Sequence[Layer]) -> tuple[tuple[int, ...], ...]:
    """The layers between checkpoints, a segment each, in order of their first layers.

    A layer that is no checkpoint goes on with the segment of its last input that has one, and
    begins one where all its inputs are checkpoints. Linear in layers and inputs.
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

    The sum of the forwards, and the backward of the last layer that has one. As in the paper, what
    that backward shares with the forwards counts twice.
    """
    replayed = sum(layers[i].forward_bytes for i in segment)
    backwards = (layers[i].backward_bytes for i in reversed(segment))
    return replayed + next(filter(None, backwards), 0) <= peak_bytes
