"""growth: replan a graph when the process holds more external memory than the plan has room for.

Examples: the state of an optimizer whose first step comes late, because gradients are accumulated
over many calls; an average of the weights; another model.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import inf
from typing import Any

from outcore.allocators.layout import LIBRARIES_BYTES
from outcore.errors import OutcoreError, StepError
from outcore.execute import Executable
from outcore.ir.margin import margin_bytes, slack_bytes
from outcore.runtime.budget.metering import Metering
from outcore.runtime.budget.plans import Plans
from outcore.runtime.budget.residency import MOST_COLLECTIONS, Residency
from outcore.runtime.budget.steps import Steps
from outcore.runtime.graphs.execution import PlannedExecution
from outcore.runtime.graphs.graph import PlannedGraph
from outcore.runtime.graphs.planned import Planned
from outcore.runtime.settings.options import Settings
from outcore.runtime.step.visit import Visit
from outcore.units import format_bytes

CALLS_UNCOUNTED = 16
"""Calls after which live tensors are counted whatever the allocator reports, if tensors may hold
memory that is not the allocator's. A count takes some 0.1 ms."""

GROWN = (
    "outcore: this process holds {more} more than when a graph was planned, and no plan has room "
    "for that; steps may need more than the budget: {error}"
)


class Growth:
    """Checks, as a call begins, that its plan has room for the external memory held then.

    Counting all live tensors is slow. So they are counted only if the allocator reports more than
    at an earlier call of the graph that had room, without what outstanding calls of other graphs
    hold; on a CPU also now and then. If the allocator keeps no count, growth is not noticed.
    """

    def __init__(
        self,
        settings: Settings,
        steps: Steps,
        residency: Residency,
        metering: Metering,
        plans: Plans,
    ) -> None:
        self._settings, self._steps = settings, steps
        self._residency, self._metering, self._plans = residency, metering, plans
        self._collections = 0
        self._told_in = -1
        """The number of the step with the latest warning that no plan was found."""

    def replan_if_grown(
        self, graph: PlannedGraph, execution: PlannedExecution, inputs: Sequence[Any]
    ) -> PlannedExecution:
        """A new plan if the plan of `graph` has no room for the external memory held now.

        `inputs`: the inputs of the call that begins. If no plan is found, `execution` stays and a
        warning says so; with `strict`, the error is raised (usually InfeasibleError). Raises
        StepError in a forked process.
        """
        status, planned = graph.status, execution.planned
        base = self._base_beyond(graph, execution, inputs)
        if base is None or self._is_refused(graph, base):
            return execution
        try:
            return self.replan(graph, planned, base)
        except StepError:  # no plan can run here
            raise
        except OutcoreError as error:
            if self._settings.strict:
                raise
            if status.refused.growth_bytes == inf:
                self._tell(base - planned.external.base_bytes, error)
            status.refused.growth_bytes = base - margin_bytes(self._settings.budget_bytes)
            return execution

    def left(self, graph: PlannedGraph, executable: Executable, visit: Visit) -> None:
        """Note what is allocated as the forward call of `visit` ends, if it ran a plan.

        It is not read if other calls have followed those of the graph each time so far: it takes
        some 25 us on a GPU.
        """
        if graph.execution is not None and executable is graph.execution.executable:
            record = graph.status.growth
            reads = record.ends_forward or not record.followed
            levels = self._residency.level_and_peak(anew=True) if reads else None
            visit.left = self._steps.calls, levels

    def came_back(self, graph: PlannedGraph, visit: Visit) -> None:
        """Meter steps again if more was made while `visit` waited than ever before in a step.

        It may be a loss that begins later, or gradients that are kept. What metered steps show is
        planned for. Other calls must not have begun meanwhile: what they hold is planned for.
        """
        record, left, visit.left = graph.status.growth, visit.left, None
        if left is None:
            return
        calls, levels = left
        if calls != self._steps.calls:
            record.followed = True
            return
        record.ends_forward = True
        levels_now = None if levels is None else self._residency.level_and_peak()
        if levels is None or levels_now is None:
            return
        (level, before), (now, peak) = levels, levels_now
        made, known = (peak if peak > before else now) - level, record.between_bytes
        record.between_bytes = max(made, known)
        if graph.planned is not None:
            known = max(known, graph.planned.problem.between_bytes)
        news = made - known > margin_bytes(self._settings.budget_bytes)
        if news and self._metering.running is None:
            self._metering.forget_peak()

    def replan(self, graph: PlannedGraph, planned: Planned, base_bytes: int) -> PlannedExecution:
        """The execution of a new plan with room for `base_bytes` of external memory.

        Raises OutcoreError (usually InfeasibleError) if no plan is found.
        """
        status = graph.status
        # Memory that has grown twice before keeps growing: plan for as much again as came so far.
        ahead = status.growth.planned_bytes if status.growth.replans > 1 else 0
        found = self._plans.beside_more(graph, planned, base_bytes, ahead)
        status.growth.replans += 1
        status.growth.planned_bytes += found.external.base_bytes - planned.external.base_bytes
        return graph.settle(found)

    def _base_beyond(
        self, graph: PlannedGraph, execution: PlannedExecution, inputs: Sequence[Any]
    ) -> int | None:
        """External memory without outstanding calls, if the plan has no room for it; else None."""
        allocated, foreseen = self._residency.allocated_bytes(), execution.foreseen_bytes
        if allocated is None:
            return None
        left = self._left_bytes(execution)
        execution.uncounted += 1
        overdue = self._residency.overlooks_tensors and execution.uncounted >= CALLS_UNCOUNTED
        if foreseen is not None and not overdue:
            known = graph.status.growth.unplanned_bytes + margin_bytes(self._settings.budget_bytes)
            if allocated - foreseen <= min(left, known):
                return None
            came = allocated - self._residency.others_bytes(graph) - foreseen
            if came <= min(left, known):
                return None
            if came > left and self._is_refused(
                graph, execution.planned.external.base_bytes + came
            ):
                self._note(graph, came)
                return None
        execution.uncounted = 0
        base, room = self._base_bytes(graph, inputs), self._room_bytes(graph, execution)
        if base > room + left and not self._is_refused(graph, base) and self._collected():
            allocated, base = (
                self._residency.allocated_bytes() or 0,
                self._base_bytes(graph, inputs),
            )
        came = base - room
        level = allocated - self._residency.others_bytes(graph) - came
        execution.foreseen_bytes = level if foreseen is None else max(level, foreseen)
        self._note(graph, came)
        return base if came > left else None

    def _is_refused(self, graph: PlannedGraph, base_bytes: int) -> bool:
        """Whether no plan was found with about `base_bytes` held, or less; False with `strict`."""
        return base_bytes >= graph.status.refused.growth_bytes and not self._settings.strict

    def _collected(self) -> bool:
        """Collect garbage, in at most `MOST_COLLECTIONS` steps; returns whether it did."""
        if self._collections >= MOST_COLLECTIONS or not self._residency.collect():
            return False
        self._collections += 1
        return True

    def _note(self, graph: PlannedGraph, unplanned_growth_bytes: int) -> None:
        """Note how much more is held than was planned for, if it is news by more than the margin.

        The bound on the process's memory is raised by it.
        """
        known = graph.status.growth.unplanned_bytes + margin_bytes(self._settings.budget_bytes)
        if unplanned_growth_bytes > known:
            graph.status.growth.unplanned_bytes = unplanned_growth_bytes
            self._plans.bound_memory()

    def _base_bytes(self, graph: PlannedGraph, inputs: Sequence[Any]) -> int:
        """External memory, without outstanding calls and the excess that was seen with them."""
        return self._residency.base_bytes(graph, inputs) - self._residency.with_others_bytes(graph)

    def _tell(self, more_bytes: int, error: OutcoreError) -> None:
        """Warn that no plan has room for `more_bytes` more, once a step for all graphs."""
        self._metering.forget_peak()
        if self._told_in != self._steps.number:
            self._told_in = self._steps.number
            warnings.warn(GROWN.format(more=format_bytes(more_bytes), error=error), stacklevel=2)

    def _room_bytes(self, graph: PlannedGraph, execution: PlannedExecution) -> int:
        """The room that the plan has for external memory without outstanding calls.

        Room that those calls do not need is added. What they lack is subtracted, up to the slack.
        A layout has room for what libraries keep for the stream that it computes on: in the first
        step with the layout, they take it.
        """
        planned, little = execution.planned, slack_bytes(self._settings.budget_bytes)
        lacking = min(little, self._plans.lacking_bytes(graph, planned))
        libraries = 0 if planned.layout is None else LIBRARIES_BYTES
        return planned.external.base_bytes - lacking + libraries

    def _left_bytes(self, execution: PlannedExecution) -> int:
        """What the plan leaves of the budget for growth, its margin included."""
        budget = self._settings.budget_bytes
        peak = execution.planned.peak_bytes - margin_bytes(budget)
        return max(0, budget - peak)
