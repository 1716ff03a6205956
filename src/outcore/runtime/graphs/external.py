"""ExternalMemory: what the process holds outside a graph, as measured in its profiled steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    """External memory that a plan makes room for."""

    nbytes: int
    spare_bytes: int = 0
    """How much of `nbytes` is not held as calls come back."""


@dataclass(frozen=True, slots=True)
class ExternalMemory:
    """Memory held outside a graph, without the buffers that outstanding calls alone hold."""

    base_bytes: int = 0
    """The most held as the first call of a step begins."""
    timed_base_bytes: int = 0
    """`base_bytes` as in the timed steps; the process may hold more since."""
    dropped_bytes: int = 0
    """By how much `base_bytes` is more than in steps whose calls came back: in others, results were
    dropped. The fields that were metered in the former are less by this."""
    lingering_bytes: int = 0
    """Metered: what was made while the graph waited and is still held when its backward begins,
    without the tangents."""
    returning_bytes: int = 0
    """How much more is held as calls come back, at most. A graph of the same trace that takes over
    the plan uses this until it has counted for itself."""
    between_bytes: int = 0
    """Metered: the most that the rest of the step needs while the graph waits, beyond
    `lingering_bytes` and the tangents."""
    gone: frozenset[int] = frozenset()
    """Inputs and outputs of calls that nothing held any more as one came back. A plan that rereads
    them holds them for longer, so they count again."""
    late_bytes: int = 0
    """Gradients of graphs that come back before this one, which no profiled step had."""

    def room(self, called_bytes: int, returned_bytes: int) -> Room:
        """The room for all external memory.

        `called_bytes`, `returned_bytes`: how much more is held as calls begin, and as they come
        back, than as the first call of a step begins.
        """
        on_call = self.base_bytes + called_bytes + self.lingering_bytes
        on_return = self.base_bytes + returned_bytes + self.late_bytes
        most = max(0, on_call, on_return)
        return Room(most, most - max(0, on_return))
