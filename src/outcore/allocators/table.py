"""ALLOCATORS: every allocator by name. A new one needs a file, a row here and its docs."""

from __future__ import annotations

from outcore.allocators.allocator import Allocator
from outcore.allocators.best_fit import BestFit, BestFitNnabla
from outcore.allocators.expandable import ExpandableSegments
from outcore.allocators.first_fit import FirstFit
from outcore.allocators.ideal import Ideal
from outcore.allocators.virtual_chunks import VirtualChunks

ALLOCATORS: dict[str, type[Allocator]] = {
    "ideal": Ideal,
    "best-fit": BestFit,
    "best-fit-nnabla": BestFitNnabla,
    "expandable-segments": ExpandableSegments,
    "first-fit": FirstFit,
    "virtual-chunks": VirtualChunks,
}
