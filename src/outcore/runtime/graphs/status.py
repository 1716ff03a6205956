"""GraphStatus: how far a graph has come, what was measured of it, and which plans were refused."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from math import inf
from statistics import median

from outcore.gauges import Clock, Moment
from outcore.ir.identity import Identity
from outcore.ir.timeline import Timeline
from outcore.runtime.graphs.drift import Drift
from outcore.runtime.graphs.history import CallHistory, CallsAtOnce
from outcore.runtime.graphs.planned import Planned
from outcore.units import format_bytes

WORTH_DIVISOR = 50
"""Memory left over from the step before is reported if it is at least the budget divided by this.
"""

LEFT_OVER = (
    "{left} were held during its forward call and freed before its backward call: usually results "
    "of the step before, which keep their names until the next results replace them, or gradients "
    "that are cleared between the two calls. Plans count them for the whole step: del or clear "
    "them at the end of the step, and plans have that much more room"
)


class State(Enum):
    """The stage of a graph.

    A plan that moves something is in force (planned), or one that keeps everything (in-core), or
    none yet (profiling), or there will be none (unplanned).
    """

    PROFILING = "profiling"
    PLANNED = "planned"
    IN_CORE = "in-core"
    UNPLANNED = "unplanned"

    @classmethod
    def under(cls, plan: Planned) -> State:
        """The stage of a graph whose steps run `plan`."""
        return cls.IN_CORE if plan.everything_kept else cls.PLANNED


MOST_STEPS_WITHOUT_BACKWARD = 4
"""The least `Returns.most_missing`."""


@dataclass(slots=True)
class Refusals:
    """For what no plan was found. inf: for nothing yet."""

    calls: int = 0
    """The value of `CallsAtOnce.expected` for which no plan was found last; 0: for none."""
    external_bytes: float = inf
    """The smallest `Planned.external_bytes`, when calls of other graphs needed more room."""
    left_bytes: float = inf
    """The smallest number of bytes to leave to later graphs while the graph waits; -inf if a new
    plan left no more than before."""
    growth_bytes: float = inf
    """The smallest `ExternalMemory.base_bytes` when external memory had grown, less the margin."""


@dataclass(slots=True)
class GrowthRecord:
    """How much external memory has grown since the first plan."""

    replans: int = 0
    """How often the graph was planned again for it."""
    planned_bytes: int = 0
    """External bytes that the current plan makes room for beyond those of the first plan. Some may
    be expected growth that has not come yet."""
    unplanned_bytes: int = 0
    """The most external bytes seen beyond what the current plan has room for, for which there is no
    new plan. Reports add them to the predicted peak."""
    between_bytes: int = 0
    """The most that was seen to be made between the two calls of a step."""
    followed: bool = False
    """Whether another forward call has come between those two calls."""
    ends_forward: bool = False
    """Whether, in some steps, none has."""


@dataclass(slots=True)
class Peaks:
    """Device peaks of the latest metered step with the graph in which all graphs ran plans."""

    step_bytes: int | None = None
    """The peak up to the last backward call. None if there is none since peaks were forgotten."""
    after_bytes: int | None = None
    """The peak from the last backward call to the next step, such as that of the optimizer's
    step."""
    after_is_whole: bool = False
    """Whether `after_bytes` is up to the next step. If not, a report came before that."""
    tries: int = 0
    """Planned steps that began with this graph and were metered for their peak, since the tries
    were last reset."""

    def forget(self) -> None:
        """Forget the peaks; the tries stay."""
        self.step_bytes, self.after_bytes, self.after_is_whole = None, None, False


@dataclass(slots=True)
class Returns:
    """How many steps a graph was called in without a backward call."""

    missing: int = 0
    """Metered steps in a row with a forward call of the graph and no backward call of it."""
    most_missing: int = MOST_STEPS_WITHOUT_BACKWARD
    """Such steps after which nobody seems to differentiate the graph. Its calls are not metered any
    more then until one comes back. Each time that happens before the graph has a plan, this is
    doubled: otherwise a graph that is differentiated in few of its calls would get none."""

    @property
    def ceased(self) -> bool:
        """Whether nobody seems to differentiate the graph."""
        return self.missing >= self.most_missing

    def came(self, *, planned: bool) -> None:
        """Note that a backward call begins, of a graph that has a plan or not."""
        if self.ceased and not planned:
            self.most_missing *= 2
        self.missing = 0


@dataclass(slots=True)
class WorkTimes:
    """When the calls of the latest planned steps ran, by the driver's clock.

    Metered, recorded and trial steps are not among them.
    """

    recent: deque[tuple[tuple[Moment, Moment], ...]] = field(
        default_factory=lambda: deque(maxlen=64)
    )
    """Start and stop of each call (forward, then backward) of a step."""
    steps: int = 0
    """Number of steps added under the current plan."""

    def note(self, work: tuple[tuple[Moment, Moment], ...]) -> None:
        """Note when the forward and the backward call of a planned step ran."""
        self.recent.append(work)
        self.steps += 1

    def forget(self) -> None:
        """Forget all steps: there is a new plan."""
        self.recent.clear()
        self.steps = 0

    def seconds(self, clock: Clock) -> float | None:
        """Median seconds of the two calls; None if there are none."""
        return _median(clock, list(self.recent))

    def latest_seconds(self, clock: Clock, steps: int, *, done: bool = False) -> float | None:
        """Median seconds of the two calls in the last `steps` steps; None if there are fewer.

        `done`: use only steps that the device has finished, so that the host need not wait for it.
        """
        latest = (w for w in list(self.recent)[::-1] if not done or clock.come(w[-1][1]))
        work = list(islice(latest, steps))
        return _median(clock, work) if len(work) == steps else None


@dataclass(slots=True)
class GraphStatus:
    """The state of one graph, for reports and for later planning.

    It holds no tensors, and may outlive its graph. All bytes are of device memory. A graph "waits"
    while one of its calls is outstanding: the forward call is over, the backward call has not
    begun. A planned step of the graph is one forward call and its backward call, so a training step
    that calls the graph several times has several.
    """

    retired: bool = False
    """Whether the graph runs in-core from now on, whatever plan it had."""
    planned: Planned | None = None
    """The current plan, or the last one of a retired graph; None while there is none."""
    lent: Planned | None = None
    """The plan for larger sizes that its checked steps run; None for others."""
    times: WorkTimes = field(default_factory=WorkTimes)
    bound_seconds: float | None = None
    """Lower bound on the seconds of a step under the current plan's problem. None until it is
    requested."""
    place: int = 0
    """Number of other graphs with the same trace that wait when this one is called. It
    distinguishes identical blocks that are compiled separately."""
    kind: tuple[str, ...] = ()
    """Targets of the graph's ops, in order. Equal for the same layers at other sizes, and for
    identical layers."""
    identity: Identity | None = None
    """That of the graph's trace. Equal for identical layers; different for other sizes."""
    measured: Timeline | None = None
    """Timeline of a step recorded under the current plan. None if none was recorded."""
    peaks: Peaks = field(default_factory=Peaks)
    after_beyond_bytes: int = 0
    """The most that was held between a backward call of the graph and the end of its profiled step,
    above what was held at that end. Layouts leave room for it."""
    reason: str = ""
    """Why it has no plan, if it runs in-core or is profiled for longer than usual. Otherwise empty.
    """
    retained: bool = False
    """Whether a backward call was made with `retain_graph=True`."""
    at_once: CallsAtOnce = field(default_factory=CallsAtOnce)
    history: CallHistory = field(default_factory=CallHistory)
    refused: Refusals = field(default_factory=Refusals)
    growth: GrowthRecord = field(default_factory=GrowthRecord)
    left_at_least: int = 0
    """The least that its plans leave to later graphs while it waits, even if they seem to need
    less."""
    asked_bytes: set[int] = field(default_factory=set)
    """Requests by graphs that lack room while this one waits: how many more bytes each of them
    needs to be left. Emptied at the next call of this graph that can change its plan."""
    planning_seconds: float = 0.0
    """Seconds spent on planning the graph so far, failed attempts included."""
    returns: Returns = field(default_factory=Returns)
    left_over_bytes: int = 0
    """Bytes that were freed in each timed step while the graph waited and were not part of that
    step, such as results or gradients of the step before. The least of the timed steps."""

    @property
    def state(self) -> State:
        """How far the graph has come."""
        if self.retired:
            return State.UNPLANNED
        return State.PROFILING if self.planned is None else State.under(self.planned)

    @property
    def settled(self) -> bool:
        """Whether its way to run is settled: planned, in-core, or not differentiated by anybody."""
        return self.state is not State.PROFILING or self.returns.ceased

    @property
    def follows(self) -> Planned | None:
        """The plan that its steps run; None while they run another program."""
        return self.planned or (None if self.settled else self.lent)

    @property
    def planned_for(self) -> int:
        """Number of outstanding calls that its plans make room for.

        Those expected, or those of the current plan if no plan was found for more.
        """
        if self.planned is not None and self.at_once.expected <= self.refused.calls:
            return self.planned.calls
        return self.at_once.expected

    def settle(self, planned: Planned) -> None:
        """Make `planned` the current plan, and forget what was measured under the previous one."""
        self.planned, self.bound_seconds, self.measured = planned, None, None
        self.times.forget()
        self.growth.unplanned_bytes = 0

    def left_over(self, budget_bytes: int) -> str:
        """A note on memory left over from the step before, if it is much of the budget; else ""."""
        much = self.left_over_bytes >= max(1, budget_bytes // WORTH_DIVISOR)
        return LEFT_OVER.format(left=format_bytes(self.left_over_bytes)) * much

    def unsettle(self) -> None:
        """Drop the plan: the graph is profiled again.

        The next plan is a first one: growth counts from it, and nothing was refused under its
        profile. What other graphs asked for stays: they still need it.
        """
        self.planned = self.measured = None
        self.refused, self.growth = Refusals(), GrowthRecord()

    def drift(self, clock: Clock, steps: int, *, done: bool = False) -> Drift | None:
        """Measured against predicted time of the last `steps` planned steps.

        None if there are fewer of them, or no plan. `done`: use only steps that the device has
        finished, so that the host need not wait for it.
        """
        seconds = self.times.latest_seconds(clock, steps, done=done)
        if self.planned is None or seconds is None:
            return None
        return Drift(self.planned.predicted.seconds, seconds, steps)


def _median(clock: Clock, steps: Iterable[tuple[tuple[Moment, Moment], ...]]) -> float | None:
    seconds = [sum(clock.seconds(*span) for span in work) for work in steps]
    return median(seconds) if seconds else None
