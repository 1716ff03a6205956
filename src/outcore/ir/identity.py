"""identity: whether two traces mean the same, by digests only where sizes do not tell."""

from __future__ import annotations

from outcore.ir.store import digest
from outcore.ir.trace import Trace


class Identity:
    """Equal for traces with the same digest. To be used as a key.

    A digest takes time for each op. Traces at different sizes differ in the bytes of some buffer.
    """

    __slots__ = ("_hash", "_sizes", "_trace")

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._sizes = tuple(buffer.nbytes for buffer in trace.buffers)
        self._hash = hash(self._sizes)

    @property
    def digest(self) -> str:
        """The digest of the trace. It is computed once per trace."""
        return digest(self._trace)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity) or self._hash != other._hash:
            return False
        if self._sizes != other._sizes:
            return False
        return self._trace is other._trace or self.digest == other.digest

    def __hash__(self) -> int:
        return self._hash
