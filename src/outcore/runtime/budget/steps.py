"""Steps: counts the forward calls of one budget's graphs, and which of them make a step."""

from __future__ import annotations

from dataclasses import dataclass, field

LONGEST_STEP = 1024
"""Forward calls after which a step counts as over even if one of its calls never comes back."""


@dataclass(slots=True)
class Steps:
    """A step begins with a forward call while no call is outstanding. It may have many calls."""

    calls: int = 0
    """Forward calls of all graphs so far."""
    returns: int = 0
    """Backward calls so far."""
    number: int = 0
    """Steps so far, including the current one."""
    _before: int = 0
    """Forward calls before the current step."""
    _passed: set[int] = field(default_factory=set)
    """Graphs that cannot be planned and were called in the current step."""

    @property
    def overlong(self) -> bool:
        """Whether the current step has too many calls to be a real step."""
        return self.calls - self._before >= LONGEST_STEP

    def call(self, *, begins: bool) -> None:
        """Count a forward call; `begins`: a step begins with it."""
        if begins:
            self._begin()
        self.calls += 1

    def pass_by(self, caller: int, *, waiting: bool) -> None:
        """Count a call of a graph that cannot be planned; `waiting`: other calls are outstanding.

        If the graph is called again, no call is outstanding, and no step began in between, a step
        begins.
        """
        if caller in self._passed and not waiting:
            self._begin()
        self._passed.add(caller)

    def _begin(self) -> None:
        self.number += 1
        self._before = self.calls
        self._passed.clear()
