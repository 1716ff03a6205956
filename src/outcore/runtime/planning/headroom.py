"""headroom: choose plans that leave the allocator room on a GPU that they nearly fill.

See docs/decisions/0036 and 0037. A plan leaves room because it is made for a smaller budget.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from outcore.allocators import Card
from outcore.errors import InfeasibleError
from outcore.ir.layout import Layout
from outcore.ir.memory import fits
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.lower import lower
from outcore.out_of_process import Tried
from outcore.simulate import simulate
from outcore.units import format_bytes, format_seconds

log = logging.getLogger("outcore")

Make: TypeAlias = Callable[[Problem], Plan]
"""Makes a plan for a problem; raises InfeasibleError if none fits."""

Improve: TypeAlias = Callable[[Problem, Plan], Plan]
"""Changes a plan so that the allocator finds room for its tensors without giving memory back."""


Place: TypeAlias = Callable[[Sequence[Problem]], Generator[Tried, None, None]]
"""Makes a plan with a layout for each of some problems; ends before the first that has no plan."""


class Placed(NamedTuple):
    """A plan, the problem that it is made for, and its layout, if it has one."""

    problem: Problem
    plan: Plan
    layout: Layout | None = None


class Remembering:
    """A way to make plans that makes each plan only once."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._known: list[tuple[Problem, Plan]] = []

    def __call__(self, problem: Problem) -> Plan:
        """The plan for `problem`. Raises as the way to make it does; errors are not remembered."""
        plan = next((plan for other, plan in self._known if other == problem), None)
        if plan is None:
            plan = self._make(problem)
            self.remember(problem, plan)
        return plan

    def remember(self, problem: Problem, plan: Plan) -> None:
        """Take `plan` as the one for `problem`."""
        self._known.append((problem, plan))


def with_least_room(problem: Problem, room: int, make: Make) -> tuple[Problem, Plan] | None:
    """The plan of `make` that leaves `room` bytes free; None if there is none.

    Returns it with its problem, whose budget is smaller by `room`. Lower the plan for that problem,
    because prefetches use all of a budget.
    """
    roomy = _less(problem, room)
    try:
        return roomy, make(roomy)
    except InfeasibleError:
        return None


def with_best_room(
    problem: Problem, rooms: Sequence[int], make: Make, improve: Improve, card: Card
) -> tuple[Problem, Plan] | None:
    """The plan with the shortest step, including the time that the allocator of `card` loses.

    Tries `rooms` in order, as `with_least_room` does, until a plan loses nothing to the allocator,
    or its step alone takes as long as the best so far with its loss. Returns None if no plan leaves
    the first room free.
    """
    found: list[tuple[float, Problem, Plan]] = []
    for room in rooms:
        made = with_least_room(problem, room, make)
        if made is None:
            break
        roomy, plan = made[0], improve(*made)
        seconds, lost = _times(roomy, plan, card)
        log.debug(
            "outcore: with %s left free a step takes %s, and %s for the allocator (predicted)",
            *(format_bytes(room), format_seconds(seconds), format_seconds(lost)),
        )
        found.append((seconds + lost, roomy, plan))
        if not lost or seconds >= min(total for total, *_ in found):
            break
    return min(found, key=itemgetter(0))[1:] if found else None


def with_places(
    problem: Problem, rooms: Sequence[int], place: Place, make: Remembering
) -> Placed | None:
    """The plan with a layout that leaves the least room free.

    Tries `rooms` and the values halfway between two of them, smallest first. Returns None if no
    such plan has a layout, or if a layout lacks more than the largest room would give. `make`
    remembers the plans.
    """
    between = ((less + more) // 2 for less, more in pairwise(rooms))
    tried = sorted({*rooms, *between})
    problems = [_less(problem, room) for room in tried]
    with closing(place(problems)) as found:
        for room, roomy, (plan, lacking, layout) in zip(tried, problems, found, strict=False):
            make.remember(roomy, plan)
            if layout is not None:
                return Placed(roomy, plan, layout)
            if lacking > rooms[-1] - room:
                break
    return None


def best_room_for(plan: Plan, problem: Problem, rooms: Sequence[int], card: Card) -> Problem:
    """`problem` with its budget reduced by that one of `rooms` with which `plan` is fastest.

    The time includes what the allocator of `card` loses. `problem` itself if the plan fits none.
    """
    roomy = (_less(problem, room) for room in rooms)
    fitting = [each for each in roomy if fits(each, lower(each, plan, fast=True))]
    return min(fitting, key=lambda each: sum(_times(each, plan, card)), default=problem)


def _less(problem: Problem, room: int) -> Problem:
    """`problem` with its budget reduced by `room` bytes; itself for 0."""
    return replace(problem, budget_bytes=problem.budget_bytes - room) if room else problem


def _times(problem: Problem, plan: Plan, card: Card) -> tuple[float, float]:
    """Seconds of a step, and the seconds that the allocator of `card` adds to it."""
    program = lower(problem, plan, fast=True)
    return simulate(problem, program).seconds, card.lost_seconds(problem, program)
