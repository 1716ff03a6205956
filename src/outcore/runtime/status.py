"""GraphStatus: how far a graph has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from math import inf
from statistics import median, median_low
from typing import TYPE_CHECKING

from outcore.gauges import Clock, Moment
from outcore.ir.timeline import Timeline
from outcore.runtime.drift import Drift
from outcore.units import format_bytes

if TYPE_CHECKING:  # the engine makes plans
    from outcore.runtime.planned import Planned


WORTH_DIVISOR = 50
"""What is left over is worth a word from this part of the budget on."""

LEFT_OVER = (
    "{left} were held while its forward call ran and had gone when its backward call began: as a "
    "rule left of the step before, results that keep their name until the next ones take it, or "
    "gradients that are cleared between the two calls. Plans count them throughout: del or clear "
    "them at the end of the step, and plans have so much more room"
)

LATEST = 64
"""How often graphs run is counted over so many steps, or calls."""


class State(Enum):
    """What a graph is doing."""

    PROFILING = "profiling"
    PLANNED = "planned"
    IN_CORE = "in-core"


MOST_FRUITLESS = 4
"""Forward calls in a row that are metered in vain; then the meter waits for a backward call."""


@dataclass(slots=True)
class GraphStatus:
    """How far a graph has come, for reports and for plans to come.

    It holds no tensors, and may outlive its graph.
    """

    state: State = State.PROFILING
    planned: Planned | None = None
    recent_work: deque[tuple[tuple[Moment, Moment], ...]] = field(
        default_factory=lambda: deque(maxlen=64)
    )
    """Of the latest planned steps: from when to when each call ran, by the driver's clock."""
    steps: int = 0
    """Planned steps that were noted since it was planned."""
    bound_seconds: float | None = None
    """The lower bound of the plan's problem, once somebody asked."""
    last_step: int = 0
    """Number of the engine's step in which its forward was called last."""
    longest_pause: int = 0
    """The most steps from one call of its forward to the next."""
    place: int = 0
    """How many graphs of the same trace wait when it is called: alike blocks, compiled apart."""
    kind: tuple[str, ...] = ()
    """The ops of the graph, by target: those of other shapes have the same, and layers alike."""
    digest: str = ""
    """That of its trace: those of layers alike are equal, those of other shapes are not."""
    latest_steps: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=LATEST))
    """Numbers of the engine's steps in which its backward was called, and how often."""
    latest_calls: deque[int] = field(default_factory=lambda: deque(maxlen=LATEST))
    """How many forward calls the engine had counted when its backward was called."""
    measured: Timeline | None = None
    """Of a step that was recorded under its plan."""
    peak_bytes: int | None = None
    """The peak of the latest metered step in which it ran, all of which was planned."""
    after_bytes: int | None = None
    """That of what came between the step's last backward call and the next step."""
    after_beyond_bytes: int = 0
    """The most of that in profiled steps, beyond what was held as the next one began."""
    peak_tries: int = 0
    """Steps that began with it and were metered for their peak, since that was forgotten."""
    reason: str = ""
    """Why it has no plan, where it runs in-core or is profiled for longer than usual."""
    retained: bool = False
    """Whether a backward call was asked to leave all as it was, for another one."""
    most_outstanding: int = 1
    """The most calls that waited for their backward at once."""
    refused_calls: int = 0
    """As many as were seen to wait at once, and had no plan."""
    refused_external_bytes: float = inf
    """The least `Planned.external_bytes` that was wanted and for which no plan was found."""
    left_at_least: int = 0
    """What it leaves to later graphs while it waits, however little they seem to need."""
    asked_bytes: set[int] = field(default_factory=set)
    """How much more each of those is to be left that have no plan beside it, until it heard them.
    """
    refused_left_bytes: float = inf
    """The least that they were to be left while it waits, and for which no plan was found."""
    planning_seconds: float = 0.0
    """What planning it took so far, in vain too."""
    fruitless: int = 0
    """Metered steps in a row in which its forward was called, and its backward never."""
    growths: int = 0
    """How often it was planned again beside more that the process came to hold."""
    refused_bytes: float = inf
    """The least `ExternalMemory.base_bytes` for which no plan was found, less the margin."""
    grown_bytes: int = 0
    """What it was planned again beside, more than at first: it came later, or is about to."""
    came_bytes: int = 0
    """What came to be held besides under its plan, which has room for it: the peak is higher."""
    gone_bytes: int = 0
    """What went while it waited in each timed step, and was not of that step."""

    @property
    def settled(self) -> bool:
        """Whether it will run from now on as it runs now: planned, or for nobody's gradients."""
        return self.state is not State.PROFILING or self.fruitless >= MOST_FRUITLESS

    @property
    def planned_for(self) -> int:
        """Calls that may wait at once under its plans: all that were seen, if there is one."""
        if self.planned is not None and self.most_outstanding <= self.refused_calls:
            return self.planned.calls
        return self.most_outstanding

    def settle(self, planned: Planned) -> None:
        """Stand with `planned` from now on."""
        self.planned, self.bound_seconds, self.measured = planned, None, None
        self.recent_work.clear()
        self.steps = self.came_bytes = 0
        self.state = State.IN_CORE if planned.everything_kept else State.PLANNED

    def left_over(self, budget_bytes: int) -> str:
        """What to free earlier, where it is much of the budget; else empty."""
        much = self.gone_bytes >= max(1, budget_bytes // WORTH_DIVISOR)
        return LEFT_OVER.format(left=format_bytes(self.gone_bytes)) * much

    def unsettle(self) -> None:
        """Begin again."""
        self.planned, self.measured, self.state = None, None, State.PROFILING
        self.refused_external_bytes = inf

    def called(self, step: int) -> None:
        """Note a forward call in the engine's step of that number."""
        self.longest_pause = max(self.longest_pause, step - self.last_step)
        self.last_step = step

    def came_back(self, step: int, calls: int) -> None:
        """Note a backward call in the engine's step of that number, after so many forward calls."""
        self.latest_calls.append(calls)
        latest, often = self.latest_steps.pop() if self.latest_steps else (step, 0)
        if latest != step:
            self.latest_steps.append((latest, often))
            often = 0
        self.latest_steps.append((step, often + 1))

    def returned(self, step: int) -> int:
        """How often its backward was called in the engine's step of that number, so far."""
        latest, often = self.latest_steps[-1] if self.latest_steps else (step, 0)
        return often if latest == step else 0

    def forget(self, step: int) -> None:
        """Do not count that step: it was not one."""
        if self.latest_steps and self.latest_steps[-1][0] == step:
            self.latest_steps.pop()

    def calls(self, under_way: int | None) -> int:
        """How often a step calls it, mostly. One that is `under_way` does not count."""
        often = [calls for step, calls in list(self.latest_steps) if step != under_way]
        return median_low(often) if often else 1

    def note(self, work: tuple[tuple[Moment, Moment], ...]) -> None:
        """Take when the two calls of a planned step ran."""
        self.recent_work.append(work)
        self.steps += 1

    def measured_seconds(self, clock: Clock) -> float | None:
        """Median time at work of the latest steps; None where there are none."""
        return _median(clock, list(self.recent_work))

    def drift(self, clock: Clock, steps: int, *, done: bool = False) -> Drift | None:
        """What the last `steps` steps took beside the prediction; None: fewer, or no plan.

        `done`: of those that the device is done with, so that the host need not wait for it.
        """
        latest = (w for w in list(self.recent_work)[::-1] if not done or clock.come(w[-1][1]))
        work = list(islice(latest, steps))
        seconds = _median(clock, work)
        if self.planned is None or seconds is None or len(work) < steps:
            return None
        return Drift(self.planned.predicted.seconds, seconds, steps)


def _median(clock: Clock, steps: Iterable[tuple[tuple[Moment, Moment], ...]]) -> float | None:
    seconds = [sum(clock.seconds(*span) for span in work) for work in steps]
    return median(seconds) if seconds else None
