"""tree: step 1 of PoocH as in its paper: keep or offload, by a tree over exposed copies.

Section 4.4.2: the tree has one level for each target of L_I, whose copy back is not hidden in the
all-offload run. At each leaf, the targets of L_O that are not in L_I are kept if they fit, from the
output side. The leaf with the least simulated time wins. The paper visits the whole tree. Here a
beam searches it if it has more leaves than `leaves` allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from outcore.policies.pooch.clock import simulated_seconds
from outcore.policies.pooch.hidden import exposed
from outcore.policies.pooch.log import KEEP, OFFLOAD, Kind
from outcore.policies.pooch.model import PoochModel
from outcore.policies.pooch.room import Room, room_of
from outcore.policies.pooch.search import offload_all


@dataclass(frozen=True, slots=True)
class Leaf:
    """A decision for every target, and what its step costs."""

    seconds: float
    """Simulated time of the step."""
    offloaded_bytes: int
    """Bytes that it offloads."""
    kinds: tuple[Kind, ...]
    """One kind per target."""

    @property
    def cost(self) -> tuple[float, int]:
        """What is minimized: seconds; if equal, bytes to copy."""
        return self.seconds, self.offloaded_bytes


class Tree:
    """The tree of one model. Its leaves are valid only if the model fits with all offloaded.

    `levels` is L_I, the longest stall first, equal stalls from the output side. `scanned` is L_O
    and L_I together, from the output side.
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
        """The leaf that decides like `leaf` above `level`, and the other way at `level`.

        None if that does not fit.
        """
        decided = {target: leaf.kinds[target] for target in self.levels[: level + 1]}
        turned = self.levels[level]
        decided[turned] = OFFLOAD if leaf.kinds[turned] is KEEP else KEEP
        room = self.room.copy()
        there = all(room.keep(target) for target, kind in decided.items() if kind is KEEP)
        return self._scan(room, decided) if there else None

    def _scan(self, room: Room, decided: Mapping[int, Kind]) -> Leaf:
        """Keep what fits in `room`, of the targets that are not decided.

        The paper decides all of L_I before it scans. Letting the scan decide the rest gives the
        same. A kept target never needs less than an offloaded one (except for a copy's padding). So
        what is kept here fits in the paper's leaf too, and what is left out here does not.
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
    """Step 1: the kinds of the fastest leaf; if not even offloading everything fits, all offloaded.

    Simulates at most `leaves` leaves: all of them if L_I has at most log2(`leaves`) targets.
    """
    tree = Tree(model)
    return fastest_leaf(tree, leaves).kinds if tree.room.enough else offload_all(model)


def fastest_leaf(tree: Tree, leaves: int) -> Leaf:
    """The fastest of at most `leaves` leaves, the root among them.

    A beam goes level by level. Each of its leaves stays, as one branch of the level; its sibling is
    the other branch. The levels that are left share evenly what is left of `leaves`, so nothing is
    cut off if the whole tree has no more leaves than that.
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
