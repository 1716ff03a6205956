"""WholeSteps: what the latest steps would have needed with everything kept."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from outcore.ir.trace import Trace
from outcore.runtime.graphs.calls import whole

LATEST = 64
"""How many steps are remembered."""


@dataclass(slots=True)
class WholeSteps:
    """Adds up what the calls of each step need, and remembers the latest steps."""

    _waiting: int = 0
    """Bytes that the calls of the current step hold once all of them wait."""
    _work: int = 0
    """The most that one of them needs beyond that."""
    _latest: deque[int] = field(default_factory=lambda: deque(maxlen=LATEST))

    def begin(self) -> None:
        """Note that a step begins."""
        self._latest.append(self.current_bytes)
        self._waiting = self._work = 0

    def call(self, trace: Trace) -> None:
        """Count a forward call of the graph of `trace`."""
        taken = whole(trace)
        self._waiting += taken.waiting_bytes
        self._work = max(self._work, taken.work_bytes)

    @property
    def current_bytes(self) -> int:
        """The bytes that the calls of the current step so far need at once.

        That is without workspaces, and without what was held before the step.
        """
        return self._waiting + self._work

    @property
    def latest_bytes(self) -> int:
        """The same for one of the latest steps before it: the most."""
        return max(self._latest, default=0)
