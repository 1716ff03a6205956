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
from outcore.runtime.held import Held
from outcore.runtime.margin import margin_bytes, slack_bytes
from outcore.runtime.metering import Metering
from outcore.runtime.options import Settings
from outcore.runtime.plans import Plans
from outcore.runtime.steps import Steps
from outcore.units import format_bytes

if TYPE_CHECKING:  # a graph asks it
    from outcore.runtime.following import Following
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
        self, settings: Settings, steps: Steps, held: Held, metering: Metering, plans: Plans
    ) -> None:
        self._settings, self._steps = settings, steps
        self._held, self._metering, self._plans = held, metering, plans
        self._collections = 0
        self._told_in = -1
        """The number of the step in which it was said last that there is no plan."""

    def beside_what_came(
        self, graph: PlannedGraph, following: Following, inputs: Sequence[Any]
    ) -> Following:
        """Another plan, if what the process holds by now has no room beside that of `graph`.

        `inputs`: those of the call. Where no plan is found it stays, and a warning tells; with
        `strict` that is an error, InfeasibleError as a rule.
        """
        standing, planned = graph.standing, following.planned
        base = self._base_beyond(graph, following, inputs)
        if base is None or self._is_refused(graph, base):
            return following
        # What comes a third time grows: as much again as came so far is ahead.
        ahead = standing.grown_bytes if standing.growths > 1 else 0
        try:
            found = self._plans.beside_more(graph, planned, base, ahead)
        except OutcoreError as error:
            if self._settings.strict:
                raise
            if standing.refused_bytes == inf:
                self._tell(base - planned.besides.base_bytes, error)
            standing.refused_bytes = base - margin_bytes(self._settings.budget_bytes)
            return following
        standing.growths += 1
        standing.grown_bytes += found.besides.base_bytes - planned.besides.base_bytes
        return graph.settle(found)

    def _base_beyond(
        self, graph: PlannedGraph, following: Following, inputs: Sequence[Any]
    ) -> int | None:
        """What is held but for waiting calls, if the plan has no room for that; else None."""
        allocated, foreseen = self._held.allocated_bytes(), following.foreseen_bytes
        if allocated is None:
            return None
        left = self._left_bytes(following)
        if foreseen is not None:
            known = graph.standing.came_bytes + margin_bytes(self._settings.budget_bytes)
            if allocated - foreseen <= min(left, known):
                return None
            came = allocated - self._held.others_bytes(graph) - foreseen
            if came <= min(left, known):
                return None
            if came > left and self._is_refused(graph, following.planned.besides.base_bytes + came):
                self._note(graph, came)
                return None
        base, room = self._base_bytes(graph, inputs), self._room_bytes(graph, following)
        if base > room + left and not self._is_refused(graph, base) and self._collected():
            allocated, base = self._held.allocated_bytes() or 0, self._base_bytes(graph, inputs)
        came = base - room
        level = allocated - self._held.others_bytes(graph) - came
        following.foreseen_bytes = level if foreseen is None else max(level, foreseen)
        self._note(graph, came)
        return base if came > left else None

    def _is_refused(self, graph: PlannedGraph, base_bytes: int) -> bool:
        """Whether no plan was found beside so much, and that was said."""
        return base_bytes >= graph.standing.refused_bytes and not self._settings.strict

    def _collected(self) -> bool:
        """Let go what is no one's any more; whether it did."""
        if self._collections >= MOST_COLLECTIONS or not self._held.collect():
            return False
        self._collections += 1
        return True

    def _note(self, graph: PlannedGraph, came_bytes: int) -> None:
        """Take how much more is held than was planned for; the margin is for some of that."""
        known = graph.standing.came_bytes + margin_bytes(self._settings.budget_bytes)
        if came_bytes > known:
            graph.standing.came_bytes = came_bytes
            self._plans.bound_memory()

    def _base_bytes(self, graph: PlannedGraph, inputs: Sequence[Any]) -> int:
        """What is held but for waiting calls, and for what was found to come with them."""
        return self._held.base_bytes(graph, inputs) - self._held.with_others_bytes(graph)

    def _tell(self, more_bytes: int, error: OutcoreError) -> None:
        """Warn that there is no plan beside so much more, once for all graphs of a step."""
        self._metering.forget_peak()
        if self._told_in != self._steps.number:
            self._told_in = self._steps.number
            warnings.warn(GROWN.format(more=format_bytes(more_bytes), error=error), stacklevel=2)

    def _room_bytes(self, graph: PlannedGraph, following: Following) -> int:
        """What was planned to be held besides waiting calls, and room that these do not want.

        Less the little that they may lack.
        """
        planned, little = following.planned, slack_bytes(self._settings.budget_bytes)
        lacking = min(little, self._plans.lacking_bytes(graph, planned))
        return planned.besides.base_bytes - lacking

    def _left_bytes(self, following: Following) -> int:
        """What the plan leaves of the budget for what comes, its margin among it."""
        budget = self._settings.budget_bytes
        peak = following.planned.peak_bytes - margin_bytes(budget)
        return max(0, budget - peak)
