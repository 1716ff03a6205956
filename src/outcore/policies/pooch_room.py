"""Room: what a step that keeps or offloads its targets leaves of the capacity, at each moment.

PoocH's first step asks after each target whether keeping it fits as well. With nothing recomputed
the answer needs no new pass: what is kept is there from its last forward use to its break point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from outcore.policies.pooch_backward import Backward
from outcore.policies.pooch_log import OFFLOAD, Log, Target
from outcore.policies.pooch_model import PoochModel


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes left at each moment: of a forward op, of the pause between the calls, of a segment.

    All copies out that an op could wait for are over by then, and copies back are issued where they
    are needed. `back` is the segment that brings each target back.
    """

    log: Log
    back: tuple[int, ...]
    left: NDArray[np.int64]

    @property
    def enough(self) -> bool:
        """Whether there is room at every moment."""
        return bool((self.left >= 0).all())

    def copy(self) -> Room:
        """The same room, to keep other targets in."""
        return replace(self, left=self.left.copy())

    def keep(self, index: int) -> bool:
        """Keep a target where there is room for it, and say whether there was."""
        target, back = self.log.targets[index], self._moment(self.back[index])
        there = self.left[target.gap.after + 1 : back]
        if there.min() < target.nbytes:
            return False
        there -= target.nbytes
        self.left[back : self._moment(target.last_segment + 1)] += target.padding_bytes
        return True

    def _moment(self, segment: int) -> int:
        return len(self.log.forward) + 1 + segment


def room_of(model: PoochModel) -> Room:
    """What is left where all targets are offloaded."""
    backward = model.rebuild([OFFLOAD] * len(model.targets))
    held = [*_forward(model.log, model.targets), _pause(model.log, backward), *backward.peak_bytes]
    return Room(model.log, backward.back, model.capacity_bytes - np.array(held, np.int64))


def _forward(log: Log, targets: Sequence[Target]) -> list[int]:
    """The bytes of each forward op, with all copies out before it over; the first has the start."""
    held, levels = log.start_bytes, []
    for op, leaving in zip(log.forward, log.leaving, strict=True):
        held += op.alloc_bytes
        levels.append(held + op.workspace_bytes)
        held -= op.free_bytes + sum(targets[i].nbytes for i in leaving)
    levels[:1] = [max(log.start_bytes, level) for level in levels[:1]]
    return levels


def _pause(log: Log, backward: Backward) -> int:
    return max(log.boundary_bytes, log.lead_in.peak_bytes) - backward.missing_bytes[0]
