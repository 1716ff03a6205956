"""external: what is held besides a graph, as its profiled steps told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    """What is held besides a graph and its calls, and how much of that is not there on return."""

    nbytes: int
    spare_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ExternalMemory:
    """What is held besides a graph and the buffers that other calls alone hold."""

    base_bytes: int = 0
    """As the first call of a step begins, at most."""
    lingering_bytes: int = 0
    """What came while the graph waited and is still there when its backward begins, by a meter."""
    returning_bytes: int = 0
    """How much more there is as calls come back, at most: for a graph of the same trace."""
    between_bytes: int = 0
    """What the rest of the step takes at most while the graph waits, beyond that, by a meter."""
    gone: frozenset[int] = frozenset()
    """Buffers that calls are given or return, and that nobody held as one came back: more is held
    where a plan reads them again."""
    late_bytes: int = 0
    """Gradients of graphs that come back before it, which no profiled step had."""

    def room(self, called_bytes: int, returned_bytes: int) -> Room:
        """For all that is held besides, with so much more as calls begin and as they come back."""
        on_call = self.base_bytes + called_bytes + self.lingering_bytes
        on_return = self.base_bytes + returned_bytes + self.late_bytes
        most = max(0, on_call, on_return)
        return Room(most, most - max(0, on_return))
