"""Steps: the forward calls of the graphs of one budget, and which of them make a step."""

from __future__ import annotations

from dataclasses import dataclass, field

LONGEST_STEP = 1024
"""Forward calls after which a step counts as over, where one of its calls never goes back."""


@dataclass(slots=True)
class Steps:
    """A step begins where no call waits for its backward, however many calls it has."""

    calls: int = 0
    """Forward calls so far, of all graphs."""
    returns: int = 0
    """Backward calls so far."""
    number: int = 0
    """Steps so far, the one under way included."""
    _before: int = 0
    """Forward calls before the step under way."""
    _passed: set[int] = field(default_factory=set)
    """Graphs that cannot be planned and were called in the step under way."""

    @property
    def overlong(self) -> bool:
        """Whether the step under way has so many calls that it is none."""
        return self.calls - self._before >= LONGEST_STEP

    def call(self, *, begins: bool) -> None:
        """Count a forward call, with which a step `begins` or not."""
        if begins:
            self._begin()
        self.calls += 1

    def pass_by(self, caller: int, *, waiting: bool) -> None:
        """Count a call of a graph that cannot be planned; `waiting`: calls of others are.

        When it comes round, and no step of planned graphs began in between, that is a step.
        """
        if caller in self._passed and not waiting:
            self._begin()
        self._passed.add(caller)

    def _begin(self) -> None:
        self.number += 1
        self._before = self.calls
        self._passed.clear()
