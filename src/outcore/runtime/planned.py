"""Planned: a graph's plan, with what it was made for and what is predicted of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from outcore.ir.hardware import Tier
from outcore.ir.layout import Layout
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.ir.program import Program
from outcore.ir.timeline import Timeline
from outcore.runtime.calls import Taken
from outcore.runtime.drift import Replanned
from outcore.runtime.external import ExternalMemory

FORCED = "overrides"
"""Who made a plan in which only what overrides say is moved: no policy was asked."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A problem, its plan, the program, and what the simulator says of it."""

    problem: Problem
    plan: Plan
    program: Program
    predicted: Timeline
    in_core: Timeline
    external: ExternalMemory = field(default_factory=ExternalMemory)
    """What is held besides, but for what other calls alone hold."""
    external_bytes: int = 0
    """All that is held besides, but for the other calls of the graph; a part of what is outside."""
    planning_seconds: float = 0.0
    """What all planning of the graph has taken up to this plan, in vain too."""
    profiled: Taken | None = None
    """What a call took while it was profiled."""
    room_bytes: int = 0
    """What the program leaves free of the budget, for a GPU's allocator."""
    layout: Layout | None = None
    """Where its tensors lie on a GPU that they nearly fill; None: where the allocator puts them."""
    after_beyond_bytes: int = 0
    """What came once steps were over, beyond what is held as one begins: layouts leave it room."""
    replanned: Replanned | None = None
    """Why the graph was planned again with other times, if it was."""
    from_file: str = ""
    """The file of plans that it comes from; such a plan is not improved on."""
    note: str = ""
    """For the report."""
    retaining_bytes: int | None = None
    """The room, a part of what is outside, for backward calls that leave all as it was for the next
    one. None: there is none for such."""
    calls: int = 1
    """The calls of the graph that may wait for their backward at once."""
    others_bytes: int = 0
    """What all but one of them hold, a part of what is outside."""

    @property
    def alone(self) -> Problem:
        """The problem of one call, were there no others, and nothing to be retained."""
        external = self.others_bytes + (self.retaining_bytes or 0)
        return replace(self.problem, outside_bytes=self.problem.outside_bytes - external)

    @property
    def lowered_for(self) -> Problem:
        """The problem with no more of a budget than the program was made for."""
        return replace(self.problem, budget_bytes=self.problem.budget_bytes - self.room_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most of the device that is in use, what a layout holds free of it included."""
        laid = 0 if self.layout is None else self.layout.peak_bytes
        return max(laid, self.predicted.peak(Tier.DEVICE))

    @property
    def everything_kept(self) -> bool:
        """Whether the plan moves nothing."""
        return not self.plan.moves

    @property
    def fits_in_core(self) -> bool:
        """Whether there was no need to move anything: a file or overrides say so."""
        return self.in_core.peak(Tier.DEVICE) <= self.problem.limit_bytes(Tier.DEVICE)

    @property
    def may_improve(self) -> bool:
        """Whether to plan again where times turn out otherwise: once, if there is a choice."""
        return self.replanned is None and not self.everything_kept and not self.from_file
