"""growth: what the process came to hold besides a graph since that was planned.

The state of an optimizer whose first step comes late, for gradients are accumulated over many
calls; an average of the weights; another model.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from outcore.errors import OutcoreError
from outcore.runtime.margin import margin_bytes, slack_bytes
from outcore.runtime.metering import Metering
from outcore.runtime.options import Settings
from outcore.runtime.plans import Plans
from outcore.runtime.residency import Residency
from outcore.runtime.steps import Steps
from outcore.units import format_bytes

if TYPE_CHECKING:  # a graph asks it
    from outcore.runtime.execution import PlannedExecution
    from outcore.runtime.graph import PlannedGraph

MOST_COLLECTIONS = 8
"""Steps in which what is no one's any more is let go before it is counted as held: who leaves so
much in each would have every step wait for that."""

GROWN = (
    "outcore: this process holds {more} more than when a graph was planned, and no plan was found "
    "beside that; steps may take more than the budget: {error}"
)


class Growth:
    """Notices, as a call begins, that its plan has no room for what is held by then.

    All that is held is counted only where the allocator has given out more than when a call of the
    graph had room, what waiting calls of other graphs hold left out. Where an allocator keeps no
    books, nothing is noticed.
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
        """The number of the step in which it was said last that there is no plan."""

    def beside_what_came(
        self, graph: PlannedGraph, execution: PlannedExecution, inputs: Sequence[Any]
    ) -> PlannedExecution:
        """Another plan, if what the process holds by now has no room beside that of `graph`.

        `inputs`: those of the call. Where no plan is found it stays, and a warning tells; with
        `strict` that is an error, InfeasibleError as a rule.
        """
        status, planned = graph.status, execution.planned
        base = self._base_beyond(graph, execution, inputs)
        if base is None or self._is_refused(graph, base):
            return execution
        # What comes a third time grows: as much again as came so far is ahead.
        ahead = status.grown_bytes if status.growths > 1 else 0
        try:
            found = self._plans.beside_more(graph, planned, base, ahead)
        except OutcoreError as error:
            if self._settings.strict:
                raise
            if status.refused_bytes == inf:
                self._tell(base - planned.external.base_bytes, error)
            status.refused_bytes = base - margin_bytes(self._settings.budget_bytes)
            return execution
        status.growths += 1
        status.grown_bytes += found.external.base_bytes - planned.external.base_bytes
        return graph.settle(found)

    def _base_beyond(
        self, graph: PlannedGraph, execution: PlannedExecution, inputs: Sequence[Any]
    ) -> int | None:
        """What is held but for waiting calls, if the plan has no room for that; else None."""
        allocated, foreseen = self._residency.allocated_bytes(), execution.foreseen_bytes
        if allocated is None:
            return None
        left = self._left_bytes(execution)
        if foreseen is not None:
            known = graph.status.came_bytes + margin_bytes(self._settings.budget_bytes)
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
        """Whether no plan was found beside so much, and that was said."""
        return base_bytes >= graph.status.refused_bytes and not self._settings.strict

    def _collected(self) -> bool:
        """Let go what is no one's any more; whether it did."""
        if self._collections >= MOST_COLLECTIONS or not self._residency.collect():
            return False
        self._collections += 1
        return True

    def _note(self, graph: PlannedGraph, came_bytes: int) -> None:
        """Take how much more is held than was planned for; the margin is for some of that."""
        known = graph.status.came_bytes + margin_bytes(self._settings.budget_bytes)
        if came_bytes > known:
            graph.status.came_bytes = came_bytes
            self._plans.bound_memory()

    def _base_bytes(self, graph: PlannedGraph, inputs: Sequence[Any]) -> int:
        """What is held but for waiting calls, and for what was found to come with them."""
        return self._residency.base_bytes(graph, inputs) - self._residency.with_others_bytes(graph)

    def _tell(self, more_bytes: int, error: OutcoreError) -> None:
        """Warn that there is no plan beside so much more, once for all graphs of a step."""
        self._metering.forget_peak()
        if self._told_in != self._steps.number:
            self._told_in = self._steps.number
            warnings.warn(GROWN.format(more=format_bytes(more_bytes), error=error), stacklevel=2)

    def _room_bytes(self, graph: PlannedGraph, execution: PlannedExecution) -> int:
        """What was planned to be held besides waiting calls, and room that these do not want.

        Less the little that they may lack.
        """
        planned, little = execution.planned, slack_bytes(self._settings.budget_bytes)
        lacking = min(little, self._plans.lacking_bytes(graph, planned))
        return planned.external.base_bytes - lacking

    def _left_bytes(self, execution: PlannedExecution) -> int:
        """What the plan leaves of the budget for what comes, its margin among it."""
        budget = self._settings.budget_bytes
        peak = execution.planned.peak_bytes - margin_bytes(budget)
        return max(0, budget - peak)
