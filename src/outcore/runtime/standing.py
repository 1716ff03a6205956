"""Standing: how far a graph has come."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from outcore.gauges import Moment

if TYPE_CHECKING:  # the engine makes plans
    from outcore.runtime.planning import Planned


class State(Enum):
    """What a graph is doing."""

    PROFILING = "profiling"
    PLANNED = "planned"
    IN_CORE = "in-core"


@dataclass(slots=True)
class Standing:
    """How far a graph has come, for the report. It holds no tensors, and may outlive its graph."""

    state: State = State.PROFILING
    planned: Planned | None = None
    recent_work: deque[tuple[tuple[Moment, Moment], ...]] = field(
        default_factory=lambda: deque(maxlen=64)
    )
    """Of the latest planned steps: from when to when each call ran, by the driver's clock."""
    last_call: int = 0
    """Number of its last forward call, counted over the engine's graphs."""
    reason: str = ""
    """Why it runs in-core, where it was not planned."""

    @property
    def settled(self) -> bool:
        """Whether it will run from now on as it runs now."""
        return self.state is not State.PROFILING

    def settle(self, planned: Planned) -> None:
        """Stand with `planned` from now on."""
        self.planned = planned
        self.recent_work.clear()
        self.state = State.IN_CORE if planned.everything_kept else State.PLANNED

    def unsettle(self) -> None:
        """Begin again."""
        self.planned, self.state = None, State.PROFILING
