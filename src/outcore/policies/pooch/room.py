"""room: the room that a step leaves of the capacity, at each moment, with nothing recomputed.

PoocH's first step asks for each target whether keeping it fits as well. With nothing recomputed,
the answer needs no new pass: a kept target is on the device from its last forward use to its break
point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from outcore.policies.pooch.backward import Backward
from outcore.policies.pooch.log import OFFLOAD, Log, Target
from outcore.policies.pooch.model import PoochModel


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes left at each moment: of a forward op, of the pause between the calls, of a segment.

    It assumes that all copies out that an op could wait for are done by then, and that copies back
    are issued where they are needed.
    """

    log: Log
    back: tuple[int, ...]
    """Per target: the segment that brings it back."""
    left: NDArray[np.int64]
    """Per moment: bytes that are left. The forward ops come first, then the pause, then the
    segments."""

    @property
    def enough(self) -> bool:
        """Whether there is room at every moment."""
        return bool((self.left >= 0).all())

    def copy(self) -> Room:
        """A copy, in which other targets can be kept."""
        return replace(self, left=self.left.copy())

    def keep(self, index: int) -> bool:
        """Keep a target if there is room for it, and return whether there was."""
        target, back = self.log.targets[index], self._moment(self.back[index])
        there = self.left[target.gap.after + 1 : back]
        if there.min() < target.nbytes:
            return False
        there -= target.nbytes
        self.left[back : self._moment(target.last_segment + 1)] += target.padding_bytes
        return True

    def _moment(self, segment: int) -> int:
        """The index in `left` of a segment."""
        return len(self.log.forward) + 1 + segment


def room_of(model: PoochModel) -> Room:
    """The room that is left if all targets are offloaded."""
    backward = model.rebuild([OFFLOAD] * len(model.targets))
    held = [*_forward(model.log, model.targets), _pause(model.log, backward), *backward.peak_bytes]
    return Room(model.log, backward.back, model.capacity_bytes - np.array(held, np.int64))


def _forward(log: Log, targets: Sequence[Target]) -> list[int]:
    """Bytes held at each forward op, with all copies out before it done.

    The first entry covers the start of the step as well.
    """
    held, levels = log.start_bytes, []
    for op, leaving in zip(log.forward, log.leaving, strict=True):
        held += op.alloc_bytes
        levels.append(held + op.workspace_bytes)
        held -= op.free_bytes + sum(targets[i].nbytes for i in leaving)
    levels[:1] = [max(log.start_bytes, level) for level in levels[:1]]
    return levels


def _pause(log: Log, backward: Backward) -> int:
    """Bytes held from the pause to the first break point, at most."""
    return max(log.boundary_bytes, log.lead_in.peak_bytes) - backward.missing_bytes[0]
