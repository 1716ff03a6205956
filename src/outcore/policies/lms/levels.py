"""levels: compute how far each op is from the start of the step, by the longest path.

The nodes are the ops of the trace, in order, and one more between the forward and the backward ops:
the pause, in which the rest of the step makes the tangents from the outputs. In a graph of the
whole step the loss is there. All forward ops are below the pause and all backward ops above it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outcore.ir.trace import Trace

Ints = NDArray[np.int64]
"""An array of integers."""


@dataclass(frozen=True, slots=True, eq=False)
class Levels:
    """The level of each node, and its ancestors on a longest path."""

    pause: int
    """The node of the pause."""
    level: Ints
    """Per node, its level; 0 for the start of the step."""
    above: tuple[Ints, ...]
    """`above[k]` has, per node, the node 2**k levels before it on a longest path."""

    @property
    def count(self) -> int:
        """How many levels there are."""
        return int(self.level.max()) + 1

    def node(self, op: int) -> int:
        """The node of `op`."""
        return op + (op >= self.pause)

    def op_after(self, node: int) -> int:
        """The op that runs next after `node`."""
        return node + (node < self.pause)

    def ancestors(self, nodes: Ints, steps: int) -> Ints:
        """Per node, one that leads to it, `steps` levels before it. O(log n) per node.

        Every node must be at least `steps` levels from a start.
        """
        for bit, above in enumerate(self.above):
            if steps >> bit & 1:
                nodes = above[nodes]
        return nodes


def levels(trace: Trace) -> Levels:
    """The levels of `trace`. O(n log n) in ops."""
    pause = trace.boundary
    made_by: dict[int, int] = {}
    level: list[int] = []
    parent: list[int] = []

    def append(producers: Iterable[int]) -> None:
        """Add a node. Its parent is the last of the producers on the highest level."""
        before = max(producers, key=lambda node: (level[node], node), default=None)
        level.append(0 if before is None else level[before] + 1)
        parent.append(0 if before is None else before)

    for op, reads in enumerate(trace.reads):
        if op == pause:
            append(range(pause))
        made = [made_by[b] for b in reads if b in made_by]
        append(made if op < pause else [pause, *made])
        made_by.update(dict.fromkeys(trace.writes[op], len(level) - 1))
    if pause >= len(trace.ops):
        append(range(len(level)))
    return Levels(pause, np.array(level), _powers(np.array(parent), max(level)))


def _powers(parent: Ints, highest: int) -> tuple[Ints, ...]:
    """`parent` applied once, twice, four times and so on, for up to `highest` levels in all."""
    powers = [parent]
    while 2 ** len(powers) <= highest:
        powers.append(powers[-1][powers[-1]])
    return tuple(powers)
