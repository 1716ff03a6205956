"""history: which of the latest steps called a graph, how often, and how many calls at once."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

LATEST = 64
"""How many steps, and how many backward calls of a graph, are remembered: the latest ones."""

RECURS_WITHIN = 32
"""Steps within which calls must be outstanding together twice before a planned graph expects it.
"""


@dataclass(slots=True)
class CallsAtOnce:
    """How many calls of one graph were outstanding at once.

    A step that skips its backward has one more call than others. Planning for it would make all
    later steps slower. So if calls came one at a time until the graph had a plan, more are expected
    only once they recur.
    """

    most: int = 1
    """The most ever."""
    expected: int = 1
    """For how many to plan."""
    _beyond: dict[int, int] = field(default_factory=dict)
    """Step -> the most in it, for the latest steps with several that were not expected."""

    def note(self, calls: int, step: int, *, planned: bool) -> None:
        """Note that `calls` calls are outstanding in step number `step`."""
        self.most = max(self.most, calls)
        if calls <= self.expected:
            return
        if not planned or self.expected > 1:
            self.expected = calls
            return
        latest = {s: n for s, n in self._beyond.items() if s > step - RECURS_WITHIN}
        self._beyond = latest | {step: max(calls, latest.get(step, 0))}
        if len(self._beyond) > 1:
            self.expected = sorted(self._beyond.values())[-2]


@dataclass(slots=True)
class CallHistory:
    """The latest calls of one graph. Steps have the engine's numbers."""

    last_step: int = 0
    """Number of the step with the latest forward call of the graph."""
    longest_pause: int = 0
    """The most steps between two consecutive forward calls of the graph."""
    latest_steps: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=LATEST))
    """(number of a step, backward calls of the graph in it), for the latest steps with any."""
    latest_calls: deque[int] = field(default_factory=lambda: deque(maxlen=LATEST))
    """For each of the latest backward calls: forward calls that the engine had counted by then."""

    def called(self, step: int) -> None:
        """Note a forward call in step number `step`."""
        self.longest_pause = max(self.longest_pause, step - self.last_step)
        self.last_step = step

    def came_back(self, step: int, calls: int) -> None:
        """Note a backward call in step number `step`, after `calls` forward calls."""
        self.latest_calls.append(calls)
        latest, often = self.latest_steps.pop() if self.latest_steps else (step, 0)
        if latest != step:
            self.latest_steps.append((latest, often))
            often = 0
        self.latest_steps.append((step, often + 1))

    def returned(self, step: int) -> int:
        """Backward calls of the graph so far in step number `step`."""
        latest, often = self.latest_steps[-1] if self.latest_steps else (step, 0)
        return often if latest == step else 0

    def forget(self, step: int) -> None:
        """Drop step number `step` from the counts: it was not a real step."""
        if self.latest_steps and self.latest_steps[-1][0] == step:
            self.latest_steps.pop()

    def calls(self, under_way: int | None) -> int:
        """Median number of backward calls in a step; 1 if none is known.

        Of two middle values it is the lower one. The step `under_way` does not count.
        """
        often = [calls for step, calls in list(self.latest_steps) if step != under_way]
        return median_low(often) if often else 1
