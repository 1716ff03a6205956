"""Step 1 of PoocH as its paper has it: keep or offload, by a tree over what compute waits for.

Section 4.4.2: a level of the tree for each target of L_I, whose copy back is not hidden in the
all-offload run. At each leaf those of L_O without L_I are kept where they fit, from the output
side. The leaf with the least simulated time wins. The paper visits all of the tree; here a beam
searches it where it has more leaves than asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from outcore.policies.pooch_clock import simulated_seconds
from outcore.policies.pooch_hidden import exposed
from outcore.policies.pooch_log import KEEP, OFFLOAD, Kind
from outcore.policies.pooch_model import PoochModel
from outcore.policies.pooch_room import Room, room_of
from outcore.policies.pooch_search import offload_all


@dataclass(frozen=True, slots=True)
class Leaf:
    """Kinds, one per target; the seconds of a step with them, and the bytes that they offload."""

    seconds: float
    offloaded_bytes: int
    kinds: tuple[Kind, ...]

    @property
    def cost(self) -> tuple[float, int]:
        """Less is better: seconds; among equals, bytes to copy."""
        return self.seconds, self.offloaded_bytes


class Tree:
    """The tree of one model. Leaves are for one in which all offloaded fits.

    `levels` is L_I, the longest stall first, equal ones from the output side. `scanned` is L_O and
    L_I from the output side.
    """

    def __init__(self, model: PoochModel) -> None:
        found = exposed(model)
        self.model, self.room = model, room_of(model)
        self.scanned = sorted({*found.out, *found.stalls}, reverse=True)
        self.levels = sorted(found.stalls, key=lambda i: (-found.stalls[i], -i))

    def root(self) -> Leaf:
        """The leaf that the scan alone gives: nothing is decided beforehand."""
        return self._scan(self.room.copy(), {})

    def sibling(self, leaf: Leaf, level: int) -> Leaf | None:
        """The leaf that decides as `leaf` does above `level`, and the other way there.

        None where that does not fit.
        """
        decided = {target: leaf.kinds[target] for target in self.levels[: level + 1]}
        turned = self.levels[level]
        decided[turned] = OFFLOAD if leaf.kinds[turned] is KEEP else KEEP
        room = self.room.copy()
        there = all(room.keep(target) for target, kind in decided.items() if kind is KEEP)
        return self._scan(room, decided) if there else None

    def _scan(self, room: Room, decided: Mapping[int, Kind]) -> Leaf:
        """Keep what fits in `room` of what is not decided.

        The paper decides all of L_I before it scans. It comes to the same to let the scan decide
        the rest: a kept target never takes less than an offloaded one (but for a copy's padding),
        so what is kept here fits in that leaf too, and what is left out here does not.
        """
        kinds = [decided.get(target, OFFLOAD) for target in range(len(self.model.targets))]
        for target in self.scanned:
            if target not in decided and room.keep(target):
                kinds[target] = KEEP
        sizes = (target.nbytes for target in self.model.targets)
        away = sum(n for n, kind in zip(sizes, kinds, strict=True) if kind is OFFLOAD)
        forward, backward = self.model.sync_swapout(kinds), self.model.rebuild(kinds)
        return Leaf(simulated_seconds(self.model, forward, backward), away, tuple(kinds))


def keep_by_tree(model: PoochModel, leaves: int) -> Sequence[Kind]:
    """Step 1: the kinds of the fastest leaf. All are offloaded where not even that fits.

    Simulates at most `leaves` leaves: all of them where L_I has at most log2(`leaves`) targets.
    """
    tree = Tree(model)
    return fastest_leaf(tree, leaves).kinds if tree.room.enough else offload_all(model)


def fastest_leaf(tree: Tree, leaves: int) -> Leaf:
    """The fastest of at most `leaves` leaves, the root among them.

    A beam, level by level: each of its leaves stays, as one branch of the level, and its sibling is
    the other. What is left of `leaves` is shared evenly by the levels that are left: nothing is cut
    off where the whole tree has no more leaves than that.
    """
    best = tree.root()
    beam, left = [best], leaves - 1
    levels = min(len(tree.levels), left)
    for level in range(levels):
        beam = sorted(beam, key=attrgetter("cost"))[: left // (levels - level)]
        turned = [tree.sibling(leaf, level) for leaf in beam]
        found = [leaf for leaf in turned if leaf is not None]
        left -= len(found)
        beam += found
        best = min([best, *found], key=attrgetter("cost"))
    return best
