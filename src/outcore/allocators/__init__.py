"""allocators: predict what an allocator reserves on the device for a Program; place its slots."""

from outcore.allocators.allocator import Allocator, Heap
from outcore.allocators.card import Card
from outcore.allocators.expandable import Held
from outcore.allocators.layout import Space, lacking_bytes, lay_out
from outcore.allocators.reserve import Reservation, reserve
from outcore.allocators.spec import resolve
from outcore.allocators.table import ALLOCATORS

__all__ = [
    "ALLOCATORS",
    "Allocator",
    "Card",
    "Heap",
    "Held",
    "Reservation",
    "Space",
    "lacking_bytes",
    "lay_out",
    "reserve",
    "resolve",
]
