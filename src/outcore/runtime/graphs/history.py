"""CallHistory: which of the latest steps called a graph, and how often."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

LATEST = 64
"""How many steps, and how many backward calls of a graph, are remembered: the latest ones."""


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
