"""growth: what the process came to hold besides its graphs since they were planned.

The state of an optimizer whose first step comes late, for gradients are accumulated over many
calls; an average of the weights; another model.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from outcore.ir.hardware import Tier
from outcore.runtime.following import Following
from outcore.runtime.margin import margin_bytes
from outcore.units import format_bytes

if TYPE_CHECKING:  # the engine has one, and a graph asks it
    from outcore.runtime.engine import Engine
    from outcore.runtime.graph import PlannedGraph

MOST_COLLECTIONS = 8
"""How often what is no one's any more is let go before it is counted as held."""

MOST_TIMES = 8
"""How often graphs are planned again for what came."""

GROWS_ON = (
    "outcore: what this process holds besides its planned graphs has grown again and again, by "
    "{more} now: it is not planned for any more, and steps may take more than the budget"
)


class Growth:
    """Notices what some plan has no room for, as a step begins.

    All that is held is counted only where the allocator has given out more than when it was counted
    last, and had room. What came once is expected to come again: nothing is noticed when it goes.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._most: WeakKeyDictionary[PlannedGraph, float] = WeakKeyDictionary()
        """What the allocator may have given out when a step begins with a call of a graph."""
        self.ahead_bytes = 0
        """What is to come besides, by the way it came: from the third time on more each time."""
        self._gone_below = -1
        """Once no more than this is given out as a step begins, half of what came last has gone."""
        self._collections = self._times = 0

    def forget(self) -> None:
        """Count again: plans are others than they were."""
        self._most.clear()

    def look(self, graph: PlannedGraph, following: Following, inputs: Sequence[Any]) -> None:
        """See what is held as a step begins with a call of `graph`, which is `following` a plan.

        What came and has no room is noted with all plans (`Following.more_bytes`). Where an
        allocator keeps no books, nothing is seen.
        """
        level = self._engine.allocated_bytes()
        if level is None or self._times > MOST_TIMES:
            return
        if level <= self._gone_below:
            self._begin_again()
        if level <= self._most.get(graph, -1):
            return
        room = max(0, self._room_bytes())
        more = self._more_bytes(graph, following, inputs)
        if more > room and self._collections < MOST_COLLECTIONS:
            self._collections += 1
            gc.collect()
            level = self._engine.allocated_bytes() or 0
            more = self._more_bytes(graph, following, inputs)
        if more <= room:
            self._most[graph] = level + room - more
            return
        self.ahead_bytes = more * (2 ** max(0, self._times - 1) - 1)
        self._times += 1
        if self._times > MOST_TIMES:
            self._engine.meter_again()
            warnings.warn(GROWS_ON.format(more=format_bytes(more)), stacklevel=2)
            return
        self._gone_below = level - more // 2
        for other in self._followed():
            other.more_bytes += more

    def too_much(self, following: Following) -> bool:
        """Note that there is no plan beside what came; whether it was so for another graph."""
        before = any(each.full for each in self._followed())
        following.full = True
        self.forget()
        self._engine.meter_again()
        return before

    def _begin_again(self) -> None:
        """Let those for whom what came was too much be asked again."""
        self._gone_below = -1
        self.forget()
        for each in self._followed():
            if each.full:
                each.full, each.more_bytes = False, 0

    def _more_bytes(self, graph: PlannedGraph, following: Following, inputs: Sequence[Any]) -> int:
        """What is held now and not noted yet; negative where less is held."""
        known = following.planned.resident_bytes + following.more_bytes
        return self._engine.resident_besides(graph, inputs) - known

    def _room_bytes(self) -> float:
        """What may come before some plan has no room for it."""
        budget = self._engine.settings.budget_bytes
        plans = (f for f in self._followed() if not f.full)
        return min((room_bytes(each, budget) for each in plans), default=inf)

    def _followed(self) -> list[Following]:
        following = (graph.following for graph in self._engine.active())
        return [each for each in following if each is not None]


def room_bytes(following: Following, budget_bytes: int) -> int:
    """What its plan leaves of the budget beside what came: negative where that is too much.

    The margin is there for what comes.
    """
    peak = following.planned.predicted.peak(Tier.DEVICE) - margin_bytes(budget_bytes)
    return budget_bytes - peak - following.more_bytes
