"""first_steps: what the calls of one graph run until the graph has a plan."""

from __future__ import annotations

from typing import Any, TypeGuard
from weakref import ref

from outcore.errors import InfeasibleError
from outcore.execute import Executable
from outcore.gc_paused import gc_paused
from outcore.runtime.budget.engine import Engine
from outcore.runtime.graphs.graph import PlannedGraph
from outcore.runtime.graphs.planned import Planned
from outcore.runtime.graphs.profiling import (
    MANY_SIZES,
    Keeping,
    Profiling,
    begin_keeping,
    begin_profiling,
)
from outcore.units import format_bytes

PATIENCE = 16
"""Timed calls, times `CallsAtOnce.expected`, after which a graph is planned although an
earlier graph has no plan: that one may never get one."""

MORE = (
    "outcore: {more} more are held than as the first step began. An optimizer needs its state. "
    "Results of the step before need not be held: del them, and clear gradients, at the end of "
    "each step"
)
"""The note on an error in the second step, or soon after."""

AGAIN = "outcore: other graphs hold less from their next calls on: run the step again"


class FirstSteps:
    """Profiles a graph, and has it planned once enough is known."""

    def __init__(self, engine: Engine, graph: PlannedGraph) -> None:
        self.engine, self.graph = engine, graph

    def executable(self, own: int, inputs: list[Any]) -> Executable:
        """The executable of the call that begins with `inputs`: once enough is known, of a plan.

        `own`: outstanding calls of this graph. Raises InfeasibleError if nothing fits, and no other
        graph can be planned first or hold less.
        """
        graph = self.graph
        if graph.status.lent is not None and not (graph.may_borrow or own):
            graph.unprofile()
        profiling = graph.profiling
        if profiling is not None and profiling.keeps and not self._has_plenty(inputs):
            graph.unprofile()
            profiling = None
        return self._profiled(profiling or self._begun(inputs), own, inputs)

    def _has_plenty(self, inputs: list[Any]) -> bool:
        """Whether there is still plenty of room for keeping everything."""
        return self.engine.plans.most_beside_all(self.graph, inputs) is not None

    @gc_paused()
    def _begun(self, inputs: list[Any]) -> Profiling:
        """As `_begin`, as the first attempt of a call: if nothing fits, others make room.

        What waiting calls hold is moved away, and their graphs hold less from their next calls on.
        """
        engine, graph = self.engine, self.graph
        others_hold_less: bool | None = None
        while True:
            try:
                return self._begin(inputs)
            except InfeasibleError as error:
                if others_hold_less is None:
                    others_hold_less = engine.contention.make_room(graph, error)
                if not engine.eviction.make_room_for(graph, error):
                    if others_hold_less:
                        error.add_note(AGAIN)
                    raise

    def _begin(self, inputs: list[Any]) -> Profiling:
        """Begin to profile. Raises InfeasibleError if not even the floor program fits."""
        engine, graph, lent = self.engine, self.graph, None
        beside_all = None if graph.lean else engine.plans.most_beside_all(graph, inputs)
        kept = None if beside_all is None else engine.plans.kept_program(graph)
        borrows = graph.may_borrow and not graph.lean
        found = engine.lenders.lent(graph, inputs, kept) if borrows else None
        if found is not None:
            lent, most = found
            program = lent.program
        elif kept is not None and beside_all is not None:
            program, most = kept, beside_all
        else:
            program, most = engine.plans.floor_program(graph, inputs, leanest=graph.lean)
        driver, mark = engine.driver, engine.metering.mark
        readings = engine.readings(lent=lent is not None)
        begun = begin_profiling(graph.captured, program, most, driver, readings, mark, lent)
        bounded = lent is None or (lent.bounded and lent.everything_kept)
        begun.keeps = kept is not None and bounded
        if graph.profiling is not None:
            begun.go_on_from(graph.profiling)
        graph.profiling, graph.status.lent = begun, lent
        return begun

    def _profiled(self, profiling: Profiling, own: int, inputs: list[Any]) -> Executable:
        engine, graph = self.engine, self.graph
        if engine.registry.sizes_beside(graph) >= MANY_SIZES:
            profiling.timings.enough = 1
        keeping = profiling.keeping
        if self._keeps_on(keeping):
            return keeping.executable
        if profiling.times:
            engine.residency.sweep()
            self._leave_room(profiling)
        resident = engine.residency.external_bytes(graph, inputs)
        fits = resident <= profiling.most_resident_bytes
        room = (own or fits) and engine.eviction.try_reserve(profiling.executable)
        if not (room or profiling.done):
            profiling = self._renewed(profiling, inputs, resident)
            resident = engine.residency.external_bytes(graph, inputs)  # some may have been moved
            fits = resident <= profiling.most_resident_bytes
        engine.observer.base(graph, profiling, own, resident)
        if not profiling.done or self._follows_the_unplanned(profiling):
            return self._unplanned(profiling, resident)
        if profiling.lent is not None:
            return self._lent(profiling.lent, profiling, inputs, fits=fits)
        return self._first_plan(profiling, resident)

    def _leave_room(self, profiling: Profiling) -> None:
        """Require room for the workspaces, once they are known."""
        if not (profiling.roomy or profiling.lent is not None):
            most = self.engine.plans.most_beside_timed(self.graph, profiling)
            profiling.most_resident_bytes = min(profiling.most_resident_bytes, most)
            profiling.roomy = True

    def _renewed(self, profiling: Profiling, inputs: list[Any], resident: int) -> Profiling:
        """As `_begun`: an optimizer has its state by now, or more calls wait than before.

        The same as before if nothing fits, and other graphs will hold less once they are planned,
        or from their next calls on, or this one need not be planned.
        """
        more = resident - self.engine.residency.others_bytes(self.graph)
        more -= profiling.checks.base_bytes
        plannable = not self.graph.status.settled
        try:
            return self._begun(inputs) if plannable else self._begin(inputs)
        except InfeasibleError as error:
            if plannable and not self._hopes_for_others(profiling, error):
                if error.tier == "device" and error.floor_bytes - more <= error.budget_bytes:
                    error.add_note(MORE.format(more=format_bytes(more)))
                raise
        self.engine.residency.collect(again=True)  # the error's frames hold inputs of calls
        return profiling

    def _first_plan(self, profiling: Profiling, resident: int) -> Executable:
        """The executable of the first plan; while others must be planned first, that of profiling.

        Raises as `executable` does.
        """
        engine, graph = self.engine, self.graph
        stand = self._how_others_stand()
        if stand == graph.others_at_failed_plan and self._awaits_others(profiling):
            return self._unplanned(profiling, resident)
        graph.status.left_over_bytes = profiling.timings.left_over_bytes or 0
        try:
            return graph.settle(engine.plans.first(graph, profiling.shown())).executable
        except InfeasibleError as error:
            waits = self._awaits_others(profiling)
            if not waits and not engine.contention.make_room(graph, error):
                raise
        engine.residency.collect(again=True)  # the error's frames hold inputs of calls
        if waits:
            graph.others_at_failed_plan = stand
            return self._unplanned(profiling, resident)
        profiling.again()
        graph.observed.met = None
        return profiling.executable

    def _lent(
        self, lent: Planned, profiling: Profiling, inputs: list[Any], *, fits: bool
    ) -> Executable:
        """The executable of the plan lent by larger sizes. If it does not fit, profile anew."""
        graph, take = self.graph, self.engine.plans.take_lent
        planned = take(graph, lent, profiling.shown()) if fits else None
        if planned is not None:
            return graph.settle(planned).executable
        graph.may_borrow = False
        return self._begun(inputs).executable

    def _unplanned(self, profiling: Profiling, resident_bytes: int) -> Executable:
        """The profiling executable; the one of `Keeping` if no backward calls come and it fits."""
        engine, graph = self.engine, self.graph
        if not (graph.status.returns.ceased and graph.may_keep):
            return profiling.executable
        keeping, checked = profiling.keeping, not graph.confirmed
        if keeping is None or keeping.checked != checked:
            program, most = engine.plans.forward_only_program(
                graph, resident_bytes, profiling.program
            )
            keeping = begin_keeping(graph.captured, program, most, engine.driver, checked=checked)
            profiling.keeping = keeping
            engine.registry.tell(graph)
            engine.metering.forget_peak()
        room = keeping.most_resident_bytes - resident_bytes
        if room < 0:
            return profiling.executable
        keeping.most_allocated_bytes = room + (engine.residency.allocated_bytes() or 0)
        return keeping.executable

    def _keeps_on(self, keeping: Keeping | None) -> TypeGuard[Keeping]:
        """Whether no backward calls come, and the allocator's count shows room for `keeping`."""
        graph = self.graph
        if keeping is None or keeping.checked == graph.confirmed:
            return False
        if not (graph.status.returns.ceased and graph.may_keep):
            return False
        level = self.engine.residency.allocated_bytes()
        return level is not None and level <= keeping.most_allocated_bytes

    # ---- other graphs ---------------------------------------------------------------------------

    def _hopes_for_others(self, profiling: Profiling, error: InfeasibleError) -> bool:
        """Whether other graphs will hold less soon, although this one has no room now."""
        asked = AGAIN in getattr(error, "__notes__", ())
        return asked or self._follows_the_unplanned(profiling) or self._awaits_others(profiling)

    def _follows_the_unplanned(self, profiling: Profiling) -> bool:
        """Whether a graph with an outstanding call should be planned first, and still may be."""
        waiting = self.engine.registry.outstanding(self.graph)
        first = any(g.profiling is not None and not g.status.settled for g in waiting)
        return first and self._is_patient(profiling)

    def _awaits_others(self, profiling: Profiling) -> bool:
        """Whether to wait until it is known how little another graph's outstanding calls need.

        Such a graph is still profiled, so its least memory is unknown.
        """
        active = self.engine.registry.active()
        others = (g for g in active if g in self.graph.observed and not g.status.settled)
        unknown = any(g.profiling is not None and not g.profiling.done for g in others)
        return unknown and self._is_patient(profiling)

    def _how_others_stand(self) -> frozenset[object]:
        """What a new attempt to plan depends on: other graphs' plans, and which can be planned."""
        others = (g for g in self.engine.registry.active() if g is not self.graph)
        return frozenset(
            (ref(g), id(g.planned), g.profiling is not None and g.profiling.done) for g in others
        )

    def _is_patient(self, profiling: Profiling) -> bool:
        return profiling.timings.number < PATIENCE * self.graph.status.at_once.expected
