"""PlannedGraph: what is known of one captured graph, from its profile to its plan."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from weakref import WeakKeyDictionary

from outcore.capture import Captured, capture_again
from outcore.errors import CaptureError
from outcore.execute import Driver, Executable, MismatchError, build
from outcore.ir.identity import Identity
from outcore.ir.verify import verify_trace
from outcore.measure import Reading
from outcore.runtime.graphs.execution import PlannedExecution
from outcore.runtime.graphs.history import CallsAtOnce
from outcore.runtime.graphs.lending import Origin
from outcore.runtime.graphs.observations import Observations
from outcore.runtime.graphs.obstacle import Obstacle
from outcore.runtime.graphs.planned import Planned
from outcore.runtime.graphs.profiling import Profiling
from outcore.runtime.graphs.recording import Recorder
from outcore.runtime.graphs.status import GraphStatus
from outcore.runtime.graphs.trial import Trials
from outcore.runtime.step.visit import Visit

STILL_PROFILED = (
    "outcore cannot plan a graph yet: {reason}; until some steps run without it, all steps are "
    "slow profiled steps, inside the budget"
)


@dataclass(frozen=True, slots=True)
class Equipment:
    """What the graphs of one budget are built, timed and recorded with."""

    driver: Driver
    recorder: Recorder
    trials: Trials
    strict: bool
    """Whether a graph that cannot be planned is an error."""


class PlannedGraph:
    """A captured graph, what its steps run, and what they have shown.

    Only its runner and what that owns hold it, so it is freed with the code that torch compiled.
    """

    def __init__(
        self,
        captured: Captured,
        fallback: Callable[[], Executable],
        equipment: Equipment,
        tell: Callable[[PlannedGraph], None],
    ) -> None:
        """`tell`: called if calls of the graph hold something else from now on."""
        self.captured, self.equipment = captured, equipment
        self._fallback, self._tell = fallback, tell
        self.identity = Identity(captured.trace)
        self.status = GraphStatus(kind=self.ops, identity=self.identity)
        self.profiling: Profiling | None = None
        self.execution: PlannedExecution | None = None
        self.provisional = False
        """Whether it may soon be replaced by one that does without more (`ByGradients`)."""
        self.observed = Observations()
        """Which calls were outstanding as calls of this graph began, waited and came back, and the
        external memory then."""
        self.may_keep = True
        """Whether the graph may keep everything (`Keeping`) while no backward calls come. False
        once another graph finds no plan (`Contention.keep_less`)."""
        self.asked: WeakKeyDictionary[PlannedGraph, int] = WeakKeyDictionary()
        """Planned graphs that this one asked to leave it more memory -> how often, since they last
        answered (`Contention.leaving_more`)."""
        self.others_at_failed_plan: frozenset[object] | None = None
        """State of the other graphs (`FirstSteps`) when this one last found no plan and
        waited for some of them. It does not try again until that state changes or the wait ends.
        None: no such attempt."""
        self.origin: Origin | None = None
        """What tells it apart from other graphs, but not from the same graph at other sizes. None
        before its first call."""
        self.may_borrow = True
        """Whether it may be profiled with the plan that the graph has for larger sizes. False once
        that turned out to need too much memory, or to leave too little."""
        self.lent_in = -1
        """The number of the latest step whose sizes its plan was lent to; -1: there was none."""
        self.lean = False
        """Whether the graph is profiled with the leanest program, because device memory ran out."""
        self.tightened = False
        """Whether a tighter plan was tried, because device memory ran out. It is tried once: plans
        that are made from it keep what it leaves free."""
        self.obstacles: Counter[Obstacle] = Counter()
        """Steps that could not be metered since the last one that was, by reason."""
        self.confirmed = False
        """Whether a backward call was compared with the trace to its end."""
        self.corrections = 0
        """How often a kernel did not do what was captured."""
        self.recorded = 0
        """`Recorder.asked` when this graph was last recorded."""

    @cached_property
    def fallback(self) -> Executable:
        """What runs the graph in-core."""
        return self._fallback()

    @property
    def ops(self) -> tuple[str, ...]:
        """The targets of its ops. A correction may have added some (`GraphStatus.kind`)."""
        return tuple(op.target for op in self.captured.trace.ops)

    @property
    def planned(self) -> Planned | None:
        """The graph's plan; None until it has one."""
        return self.status.planned

    @property
    def retired(self) -> bool:
        """Whether the graph runs in-core from now on, with `fallback`."""
        return self.status.retired

    @property
    def executable(self) -> Executable | None:
        """What steps run once the graph has a plan or is retired; None while it is profiled."""
        if self.retired:
            return self.fallback
        return None if self.execution is None else self.execution.executable

    @property
    def gone(self) -> frozenset[int]:
        """Inputs and outputs of calls that nothing held any more when profiled calls came back."""
        if self.planned is not None:
            return self.planned.external.gone
        return frozenset() if self.profiling is None else self.profiling.timings.gone

    @property
    def private_bytes(self) -> int:
        """The most that one outstanding call alone holds while the graph is profiled; else 0."""
        if self.profiling is None:
            return 0
        keeping = self.profiling.keeping if self.may_keep else None
        kept = 0 if keeping is None else keeping.executable.private_bytes
        return max(kept, self.profiling.checked.private_bytes)

    def compares(self, executable: Executable) -> bool:
        """Whether `executable` compares the trace with what kernels really return."""
        return self.profiling is not None and self.profiling.compares(executable)

    def times(self, executable: Executable) -> bool:
        """Whether `executable` times the ops of the floor program."""
        return self.profiling is not None and executable is self.profiling.timed

    # ---- what its steps run ---------------------------------------------------------------------

    def settle(self, planned: Planned) -> PlannedExecution:
        """Follow `planned` from the next step on; returns its execution."""
        generator = self.equipment.driver.generator
        trace, layout = self.captured.trace, planned.layout
        executable = build(trace, planned.program, generator, layout=layout)
        self.status.settle(planned)
        self.observed.unchecked = True
        self._tell(self)
        self.unfollow()
        self.unprofile()
        self.execution = PlannedExecution(planned, executable)
        return self.execution

    def adopt(self, planned: Planned) -> None:
        """Take over the plan of a graph with the same trace, and that graph's corrected trace."""
        self.captured, self.confirmed = replace(self.captured, trace=planned.problem.trace), True
        self.settle(planned).adopted = True
        self.status.at_once = CallsAtOnce(planned.calls, planned.calls)
        self.status.retained = planned.retaining_bytes is not None
        self.status.planning_seconds = planned.planning_seconds
        self.status.after_beyond_bytes = planned.after_beyond_bytes

    def unprofile(self) -> None:
        """Forget the profile, and what its steps run."""
        self.profiling = self.status.lent = None

    def unfollow(self) -> None:
        """Leave the plan, and end what was measured of it."""
        if self.execution is not None:
            self.execution.end(self)
            self.execution = None

    def retire(self, reason: str) -> None:
        """Run in-core and unplanned from now on, without a warning."""
        self.status.retired, self.status.reason = True, reason
        self.unfollow()
        self.unprofile()
        self._tell(self)

    def give_up(self, error: CaptureError) -> None:
        """Run in-core from now on. Warns, or with `strict` raises `error`."""
        self.retire(str(error))
        if self.equipment.strict:
            raise error
        warnings.warn(f"outcore runs a graph in-core: {error}", stacklevel=2)

    # ---- what they show -------------------------------------------------------------------------

    def correct(self, error: CaptureError) -> None:
        """Correct the trace from what a kernel really returned, or run in-core from now on."""
        self.confirmed, self.status.returns.missing = False, 0
        try:
            self.captured = self._corrected(error)
        except CaptureError as final:
            self.give_up(final)
        self.unprofile()

    def _corrected(self, error: CaptureError) -> Captured:
        """The graph as it really behaves. Raises CaptureError if that cannot be determined."""
        self.corrections += 1
        if not isinstance(error, MismatchError) or self.corrections > len(self.captured.trace.ops):
            raise error
        try:
            captured = capture_again(self.captured, error.op, error.real)
            verify_trace(captured.trace)
        except CaptureError as deeper:
            reason = f"{error.reason}; {deeper.reason}"
            raise CaptureError(reason=reason, site=error.site) from deeper
        return captured

    def unmetered(self, obstacle: Obstacle) -> None:
        """Note that a step could not be metered.

        After too many, while workspaces are not known, warn or run in-core (`give_up`).
        """
        self.obstacles[obstacle] += 1
        if self.profiling is None or self.obstacles[obstacle] < obstacle.most:
            return
        if self.profiling.times:
            return  # workspaces are known: planning can do without this reading
        if not obstacle.passes:
            self.give_up(CaptureError(reason=obstacle.reason))
        elif self.status.reason != obstacle.reason:
            self.status.reason = obstacle.reason
            warnings.warn(STILL_PROFILED.format(reason=obstacle.reason), stacklevel=2)

    def metered(self, reading: Reading, visit: Visit) -> None:
        """Record what the meter saw of the step that `visit` belongs to."""
        self.obstacles.clear()
        if self.profiling is not None:
            self.status.reason = ""
            self.profiling.metered(reading, visit)
            beyond = reading.peak_bytes(visit.backward_stop) - max(0, reading.last_bytes)
            status = self.status
            status.after_beyond_bytes = max(status.after_beyond_bytes, beyond)
