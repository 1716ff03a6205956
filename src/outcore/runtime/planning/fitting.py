"""fitting: fit a plan beside the other calls and graphs of its step.

How much memory they leave depends in part on the plan itself: its calls may wait for each other,
and later graphs run while they wait. So plans are made for several amounts, and each is evaluated
with what is then really held.

A call is outstanding, or waits, from the end of its forward call until its backward call begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TypeVar

from outcore.errors import InfeasibleError
from outcore.ir.hardware import Tier
from outcore.ir.memory import crossing_bytes, fits, pause_bytes, peak, retained_bytes
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.ir.timeline import Timeline
from outcore.lower import lower
from outcore.policies import lean_plans
from outcore.runtime.graphs.calls import Calls, gradient_bytes
from outcore.runtime.graphs.external import ExternalMemory, Room
from outcore.runtime.graphs.planned import Planned
from outcore.runtime.planning.shares import Shares
from outcore.runtime.planning.solving import Solved, Solver
from outcore.simulate import simulate

T = TypeVar("T")

ROOM_DIVISOR = 32
"""`Fitting.retaining` finds the room for retained memory to within the budget divided by this.

It has to search: with less room set aside, a plan keeps more, and more of that is retained.
"""


class Fitting:
    """Fits the policy's plans beside what the rest of a step holds."""

    def __init__(self, solver: Solver) -> None:
        self._solver = solver

    def plan(
        self,
        shares: Shares,
        problem: Problem,
        external: ExternalMemory,
        room: Room,
        *,
        in_haste: bool = False,
    ) -> Planned:
        """The plan for `problem`, with room for later graphs and for other calls of the graph.

        `problem` is that of one call. Raises InfeasibleError if the policy has no plan.
        """
        left = shares.left_bytes(problem, external)
        between = (max(problem.between_bytes, each) for each in left)
        status = shares.graph.status
        calls = Calls(
            problem,
            status.planned_for,
            retained=status.retained,
            gone=external.gone,
            spare_bytes=room.spare_bytes,
        )
        planned = first(partial(self._leaving, shares, calls, in_haste=in_haste), between)
        return replace(planned, external=external, external_bytes=room.nbytes)

    def retaining(self, shares: Shares, planned: Planned) -> Planned:
        """A plan like `planned`, with room for backward calls under `retain_graph`.

        Those free nothing. A search finds how much room they need, in haste if the policy can.
        If it fails, plans are made whose calls hold less while they wait: less of that can stay.
        Raises InfeasibleError if no plan was found that has the room.
        """
        make = partial(self._with_room_for_retained, shares, planned)
        try:
            found = _in_least_room(make, planned)
        except InfeasibleError:
            less = None if planned.from_file else self._retaining_less(shares, planned)
            if less is None:
                raise
            return less
        if self._solver.may_haste and not found.everything_kept:
            room = found.retaining_bytes or 0
            with contextlib.suppress(InfeasibleError):
                slowly = make(room)
                if _retained_bytes(slowly) <= room:
                    return slowly
        return found

    def _retaining_less(self, shares: Shares, planned: Planned) -> Planned | None:
        """A plan like `planned` whose calls hold so little while they wait that it can stay.

        None if none is found.
        """
        room, gradients = _retained_bytes(planned) // 2, gradient_bytes(planned.problem.trace)
        while room > gradients:
            with contextlib.suppress(InfeasibleError):
                tried = self._with_room_for_retained(
                    shares, planned, room, most_waiting=room - gradients
                )
                if _retained_bytes(tried) <= room:
                    return tried
            room //= 2
        return None

    def _with_room_for_retained(
        self,
        shares: Shares,
        planned: Planned,
        room: int,
        *,
        in_haste: bool = False,
        most_waiting: int | None = None,
    ) -> Planned:
        """The plan for the problem of `planned` with `room` bytes for what `retain_graph` keeps.

        `most_waiting`: the most that calls hold while they wait; None: as much as there is room.
        """
        problem, external = planned.alone, Room(planned.external_bytes)
        wider = replace(problem, outside_bytes=problem.outside_bytes + room)
        if most_waiting is None:
            tried = self.plan(shares, wider, planned.external, external, in_haste=in_haste)
            return replace(tried, retaining_bytes=room)
        kept = self._solver.kept(wider)
        rest = pause_bytes(wider, kept) + crossing_bytes(kept) - most_waiting
        needed = max(wider.between_bytes, shares.left_bytes(wider, planned.external)[-1])
        bounded = replace(wider, between_bytes=max(needed, rest))
        tried = self.plan(shares, bounded, planned.external, external, in_haste=in_haste)
        needed += tried.problem.between_bytes - bounded.between_bytes  # what it reads again
        return replace(self.needing(shares, tried, needed), retaining_bytes=room)

    def needing(self, shares: Shares, planned: Planned, between_bytes: int) -> Planned:
        """The same plan, evaluated with other `between_bytes`: fewer than it leaves."""
        problem = replace(planned.problem, between_bytes=between_bytes)
        if not planned.everything_kept:
            between_bytes = max(between_bytes, shares.most_bytes(problem.hardware))
        in_core = replace(problem, between_bytes=between_bytes)
        return replace(
            planned,
            problem=problem,
            predicted=simulate(problem, planned.program),
            in_core=simulate(in_core, self._solver.kept(problem)),
        )

    def _leaving(self, shares: Shares, calls: Calls, left_bytes: int, *, in_haste: bool) -> Planned:
        """The plan that leaves `left_bytes` for what runs while the graph waits.

        First the policy's plans, then those with room for buffers that are read again, then the
        leanest.
        """
        problem = calls.problem
        leaving = replace(calls, problem=replace(problem, between_bytes=left_bytes))
        found = self._within(shares, leaving, problem, in_haste=in_haste)
        if found is None and calls.rereadable:
            found = self._rereading(shares, leaving, problem, in_haste=in_haste)
        return found or self._leanest(shares, leaving, problem)

    def _rereading(
        self, shares: Shares, calls: Calls, problem: Problem, *, in_haste: bool
    ) -> Planned | None:
        """As `_within`, with room for buffers that a plan may read again; None if none fits.

        Policies do not know that such a buffer stays longer because the plan reads it again.
        """
        more = calls.number * sum(problem.trace.buffers[b].nbytes for b in calls.rereadable)
        outside = calls.problem.outside_bytes + more
        wider = replace(calls, problem=replace(calls.problem, outside_bytes=outside))
        with contextlib.suppress(InfeasibleError):
            return self._within(shares, wider, problem, in_haste=in_haste)
        return None

    def _leanest(self, shares: Shares, calls: Calls, problem: Problem) -> Planned:
        """The fastest of the leanest plans that fit, for all `calls`.

        It is used if the policy's plans do not fit with what they hold in other calls, or read
        again. Raises InfeasibleError if the leanest plans do not fit either.
        """
        as_it_is, limit = replace(calls, problem=problem), problem.limit_bytes(Tier.DEVICE)
        found, lacking = [], []
        for beside, plan in product(calls.problems(), lean_plans(problem)):
            solved = Solved(beside, plan, lower(beside, plan, fast=True))
            planned = self._as_it_is(shares, solved, as_it_is)
            if fits(planned.problem, planned.program):
                found.append(planned)
            taken = peak(planned.problem, planned.program, Tier.DEVICE).nbytes
            lacking.append(max(0, taken - limit))
        if not found:
            raise calls.refusal(min(lacking))
        return min(found, key=lambda planned: planned.predicted.seconds)

    def _within(
        self, shares: Shares, calls: Calls, problem: Problem, *, in_haste: bool
    ) -> Planned | None:
        """The policy's fastest plan for all `calls`, evaluated under `problem`, that of one call.

        None if the policy has plans, but none that fits when evaluated so. Raises InfeasibleError
        if the policy has none. With several calls, plans are first made in haste, to see how much
        room the waiting calls should have.
        """
        hasty = self._solver.may_haste and (in_haste or calls.number > 1)
        as_it_is = replace(calls, problem=problem)
        found: list[tuple[Planned, Problem]] = []
        made, refusal = 0, None
        for beside in calls.problems():
            try:
                solved = self._solver.solved(shares, beside, in_haste=hasty)
            except InfeasibleError as error:
                error.at_least |= calls.number > 1
                refusal = error
                continue
            made += 1
            planned = self._as_it_is(shares, solved, as_it_is)
            if calls.number == 1 and not calls.reread_bytes(planned.program):
                return planned
            if fits(planned.problem, planned.program):
                found.append((planned, beside))
            if planned.everything_kept:
                break
        if refusal is not None and not made:
            try:
                raise refusal
            finally:
                del refusal  # the error's frames hold the error itself, and what the step made
        if not found:
            return None
        best, beside = min(found, key=lambda pair: pair[0].predicted.seconds)
        if best.everything_kept or in_haste or not hasty:
            return best
        slowly = self._as_it_is(shares, self._solver.solved(shares, beside), as_it_is)
        better = slowly.predicted.seconds < best.predicted.seconds
        return slowly if better and fits(slowly.problem, slowly.program) else best

    def _as_it_is(self, shares: Shares, solved: Solved, calls: Calls) -> Planned:
        """The plan with what other calls really hold in place of the room set aside for it.

        The same holds for what was seen between the graph's two calls.
        """
        outside, plan, program = calls.problem.outside_bytes, solved.plan, solved.program
        others = calls.others_bytes(program)
        problem = replace(
            solved.problem,
            budget_bytes=calls.problem.budget_bytes,
            outside_bytes=outside + others,
            between_bytes=calls.problem.between_bytes + calls.reread_bytes(program),
        )
        return Planned(
            problem,
            plan,
            program,
            predicted=simulate(problem, program),
            in_core=self.in_core(shares, replace(problem, outside_bytes=outside), calls, plan),
            room_bytes=solved.room_bytes,
            layout=solved.layout,
            after_beyond_bytes=solved.after_beyond_bytes,
            from_file=solved.from_file,
            note=solved.note,
            calls=calls.number,
            others_bytes=others,
        )

    def in_core(self, shares: Shares, problem: Problem, calls: Calls, plan: Plan) -> Timeline:
        """Timeline of a call if all calls of the graph, and later graphs, kept everything.

        If the plan does keep everything, later graphs count what they find, so nothing is added for
        them.
        """
        kept = self._solver.kept(problem)
        outside, between = problem.outside_bytes + calls.others_bytes(kept), problem.between_bytes
        if plan.moves:
            between = max(between, shares.most_bytes(problem.hardware))
        return simulate(replace(problem, outside_bytes=outside, between_bytes=between), kept)


def first(make: Callable[[T], Planned], rooms: Iterable[T]) -> Planned:
    """The result of `make` for the first of `rooms` for which there is one.

    If there is none, raises the InfeasibleError of the last one.
    """
    *more, last = dict.fromkeys(rooms)
    for room in more:
        with contextlib.suppress(InfeasibleError):
            return make(room)
    return make(last)


def _in_least_room(make: Callable[..., Planned], planned: Planned) -> Planned:
    """The plan that `make` gives, in haste, for about the least room in which what stays fits.

    Raises InfeasibleError if none was found: that of the smallest room that was tried.
    """
    step = planned.problem.budget_bytes // ROOM_DIVISOR
    found, least, room, most = None, 0, _retained_bytes(planned), None
    refusal: InfeasibleError | None = None
    try:
        while most is None or most - least > step:
            try:
                tried = make(room, in_haste=True)
            except InfeasibleError as error:
                if planned.from_file:  # there is no other plan
                    raise
                error.at_least = True  # a plan with less memory may also retain less than `room`
                refusal, most = error, room
            else:
                needed = _retained_bytes(tried)
                if needed <= room:
                    found, most = tried, room
                else:
                    least = room
            room = max(needed, room + step) if most is None else (least + most) // 2
        if found is None and refusal is not None:
            raise refusal
    finally:
        del refusal  # its frames hold it, and what the step made
    assert found is not None  # noqa: S101 - the search ends with it or a refusal
    return found


def _retained_bytes(planned: Planned) -> int:
    """Bytes that a backward call under `retain_graph` needs beyond the plan's peak.

    They include its gradients, which are held while the next call makes its own.
    """
    problem = planned.problem
    return retained_bytes(problem, planned.program) + gradient_bytes(problem.trace)
