"""Planned: a graph's plan, what it was made for, and what is predicted of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from outcore.ir.hardware import Tier
from outcore.ir.layout import Layout
from outcore.ir.memory import pause_bytes
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.ir.program import Program
from outcore.ir.timeline import Timeline
from outcore.runtime.graphs.calls import Taken
from outcore.runtime.graphs.drift import Replanned
from outcore.runtime.graphs.external import ExternalMemory

FORCED = "overrides"
"""The policy named by a plan that moves only what overrides say: no policy was asked."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A problem, its plan, the lowered program, and its simulation. Bytes are device bytes."""

    problem: Problem
    """The problem of one call; its `outside_bytes` include what other calls hold."""
    plan: Plan
    program: Program
    predicted: Timeline
    """The simulated step under the plan."""
    in_core: Timeline
    """The simulated step with everything kept."""
    external: ExternalMemory = field(default_factory=ExternalMemory)
    """External memory, without what outstanding calls alone hold."""
    external_bytes: int = 0
    """All external bytes that the plan has room for, without the other calls of the graph. A part
    of `problem.outside_bytes`."""
    planning_seconds: float = 0.0
    """Seconds of all planning of the graph up to this plan, failed attempts included."""
    profiled: Taken | None = None
    """What a call needed while the graph was profiled. None: not known."""
    room_bytes: int = 0
    """Bytes of the budget that the program leaves free for a GPU's allocator."""
    layout: Layout | None = None
    """Where tensors lie on a GPU that they nearly fill. None: where the allocator puts them."""
    after_beyond_bytes: int = 0
    """`GraphStatus.after_beyond_bytes` as the plan was made: layouts leave room for it."""
    replanned: Replanned | None = None
    """Why the graph was planned again with measured times. None if it was not."""
    from_file: str = ""
    """Path of the file that the plan comes from; empty for others. Such a plan is not improved on.
    """
    note: str = ""
    """For the report."""
    retaining_bytes: int | None = None
    """Room for backward calls under `retain_graph`, a part of `problem.outside_bytes`. None: the
    plan has no such room."""
    calls: int = 1
    """The number of calls of the graph that may be outstanding at once."""
    early: bool = False
    """Whether it was made, for these or for larger sizes, before a step was timed."""
    bounded: bool = False
    """Whether calls hold no more while they wait than under the program of profiled steps."""
    checking_bytes: int = 0
    """What its steps hold besides while they are checked; 0 once the graph is planned."""
    others_bytes: int = 0
    """What all of these calls but one hold, and the gone buffers that the one rereads (`Calls`). A
    part of `problem.outside_bytes`."""

    @property
    def alone(self) -> Problem:
        """The problem of one call without room for other calls or for `retain_graph`."""
        external = self.others_bytes + (self.retaining_bytes or 0)
        return replace(self.problem, outside_bytes=self.problem.outside_bytes - external)

    @property
    def lowered_for(self) -> Problem:
        """The problem with the budget that the program was made for, without `room_bytes`."""
        return replace(self.problem, budget_bytes=self.problem.budget_bytes - self.room_bytes)

    @property
    def peak_bytes(self) -> int:
        """The device peak, with the memory that a layout holds free, and `checking_bytes`."""
        laid = 0 if self.layout is None else self.layout.peak_bytes
        return max(laid, self.predicted.peak(Tier.DEVICE)) + self.checking_bytes

    @property
    def left_bytes(self) -> int:
        """Bytes that the budget leaves while a call under the plan waits for its backward."""
        return pause_bytes(self.problem, self.program)

    @property
    def everything_kept(self) -> bool:
        """Whether the plan moves nothing."""
        return not self.plan.moves

    @property
    def fits_in_core(self) -> bool:
        """Whether keeping everything fits.

        If so, the plan moves something because of a file of plans or overrides, or because other
        calls were thought to need more room than they turned out to need.
        """
        return self.in_core.peak(Tier.DEVICE) <= self.problem.limit_bytes(Tier.DEVICE)

    @property
    def may_improve(self) -> bool:
        """Whether to plan again if times drift: once, if something moves and no file says so."""
        return self.replanned is None and not self.everything_kept and not self.from_file
