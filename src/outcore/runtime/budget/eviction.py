"""eviction: move away what waiting calls hold when another call finds too little room.

Plans have room for the calls that were seen to wait. If others wait, because a graph comes late or
the order of calls changes, the budget is kept at the expense of time: tensors of waiting calls are
moved to an outer tier until the calls come back (docs/decisions/0039).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

import torch

from outcore.errors import HostMemoryError, InfeasibleError, SpillError
from outcore.execute import Driver, Executable, Lane, Region, build
from outcore.execute.disk import FILE_BLOCK_BYTES
from outcore.execute.driver import Handle
from outcore.gc_paused import gc_paused
from outcore.ir.hardware import Tier
from outcore.ir.margin import margin_bytes
from outcore.ir.memory import Ahead, ahead, extent_bytes
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile
from outcore.ir.program import Program
from outcore.runtime.budget.placing import call
from outcore.runtime.budget.plans import Plans
from outcore.runtime.budget.registry import Registry
from outcore.runtime.budget.residency import MOST_COLLECTIONS, Residency
from outcore.runtime.graphs.execution import PlannedExecution
from outcore.runtime.graphs.graph import PlannedGraph
from outcore.runtime.graphs.planned import Planned
from outcore.runtime.planning.shares import profile_of
from outcore.runtime.settings.options import Settings
from outcore.runtime.step.store import MovedTensors, Store
from outcore.units import format_bytes

NOTE = (
    "{times} a call found too little room beside outstanding calls that no plan had counted, and "
    "{moved} of what those hold were moved to the {tiers} until they came back, which takes time"
)
LEANER = "{times} a call with too little room beside others ran a slower program than its plan"


class Eviction:
    """Makes room for a call by moving away what waiting calls alone hold.

    The calls that began first are the last to come back, as a rule. So they are moved first.
    """

    def __init__(
        self,
        settings: Settings,
        driver: Driver,
        registry: Registry,
        residency: Residency,
        plans: Plans,
    ) -> None:
        self._settings, self._driver = settings, driver
        self._registry, self._residency, self._plans = registry, residency, plans
        self._known: WeakKeyDictionary[Executable, Ahead] = WeakKeyDictionary()
        """What is known of the executables of planned graphs."""
        self._outer: WeakKeyDictionary[Executable, dict[Tier, int]] = WeakKeyDictionary()
        """What executables need of the outer tiers."""
        self._collections = 0
        self.times = 0
        """Number of calls for which something was moved."""
        self.leaner = 0
        """Number of calls that ran a program of little memory instead of their plan."""
        self._nbytes: dict[Tier, int] = {}
        """Bytes moved so far, by the tier that they were moved to."""

    @property
    def note(self) -> str:
        """For reports: how much was moved, and what else was done; empty if nothing was."""
        tiers = " and the ".join(tier.value for tier in self._nbytes)
        moved = format_bytes(sum(self._nbytes.values()))
        note = NOTE.format(times=_times(self.times), moved=moved, tiers=tiers) if self.times else ""
        leaner = LEANER.format(times=_times(self.leaner)) if self.leaner else ""
        return "; ".join(filter(None, [note, leaner]))

    def before_forward(
        self, graph: PlannedGraph, executable: Executable, inputs: Sequence[Any]
    ) -> Executable:
        """Make room for a forward call of `graph` by `executable`; returns what it is to run.

        Usually that is `executable`. If it is the graph's plan, and that needs too much even if all
        that can be moved away is, it is a program of little memory instead, if one fits. If other
        calls wait and the outer tiers have no room for this one by its plan, it is a program that
        takes no more of them than is left.
        """
        executable = self._on_device(graph, executable, inputs)
        execution = graph.execution
        if execution is None or self.try_reserve(executable):
            return executable
        return self._elsewhere(graph, execution, inputs) or executable

    def _on_device(
        self, graph: PlannedGraph, executable: Executable, inputs: Sequence[Any]
    ) -> Executable:
        """As `before_forward`, for room on the device."""
        program = executable.program
        if program is None or not len(self._registry.stores):
            return executable
        if not self._is_in_doubt(graph, executable, 1):
            return executable
        needs, between = self._needs(graph, executable), _between_bytes(graph)
        self.move_away(graph, self._lacking(needs.until_backward(between)), program=program)
        execution = graph.execution
        if execution is None or executable is not execution.executable:
            return executable
        lacking = self._lacking_later(needs.in_all(between))
        if lacking <= margin_bytes(self._settings.budget_bytes):  # the margin is enough
            return executable
        return self._lean(graph, execution, inputs, lacking) or executable

    def before_backward(self, graph: PlannedGraph, store: Store) -> None:
        """Make room for the backward call of `store` and for what was moved out of it."""
        executable = store.executable
        if executable.program is None or not self._others([store]):
            return
        if store.away or self._is_in_doubt(graph, executable):
            needs = self._needs(graph, executable)
            lacking = self._lacking(store.away_bytes + needs.backward_bytes)
            self.move_away(graph, lacking, but=[store])

    def make_room_for(self, graph: PlannedGraph, error: InfeasibleError) -> bool:
        """Move away as much as `error`, about a first program of `graph`, says is lacking.

        Returns whether anything was moved.
        """
        lacking = error.floor_bytes - error.budget_bytes if error.tier == "device" else 0
        return self.move_away(graph, lacking, but=self._registry.stores.of(graph)) > 0

    @gc_paused()
    def move_away(
        self,
        graph: PlannedGraph,
        nbytes: int,
        *,
        but: Sequence[Store] = (),
        program: Program | None = None,
    ) -> int:
        """Move that many bytes away for a call of `graph`, if calls other than `but` hold them.

        What plans and `program`, which is about to run, need of the outer tiers is left to them.
        Returns how many were moved; somewhat more than `nbytes` if tensors are large.
        """
        moved, room = 0, partial(self._room_bytes, graph)
        for store in self._others(but) if nbytes > 0 else ():
            if moved < nbytes:
                moved += self._move_from(store, nbytes - moved, room, program)
        self.times += moved > 0
        return moved

    def _others(self, but: Sequence[Store] = ()) -> list[Store]:
        """The stores of which something may be moved, those of the earliest calls first."""
        queue, stores = self._driver.queue(), self._registry.stores.all()
        return [s for s in stores if s.queue == queue and all(s is not each for each in but)]

    def _lean(
        self, graph: PlannedGraph, execution: PlannedExecution, inputs: Sequence[Any], lacking: int
    ) -> Executable | None:
        """A program of little memory for a call whose plan lacks `lacking` bytes.

        The latest one, or a new one if that needs too much. None if none fits.
        """
        if lacking >= execution.lean_refused_bytes:
            return None
        try:
            lean = self._lean_beside(graph, execution.lean, execution.planned, inputs)
        except InfeasibleError:
            execution.lean_refused_bytes = lacking
            return None
        execution.lean = lean
        try:
            self._reserve(lean.program)
        except (SpillError, HostMemoryError):
            return None  # there may be room for a later call
        self.leaner += 1
        return lean

    def _elsewhere(
        self, graph: PlannedGraph, execution: PlannedExecution, inputs: Sequence[Any]
    ) -> Executable | None:
        """A program of little memory with room in the outer tiers; None if none fits.

        It takes what the plans of other graphs leave, or else nothing of full tiers.
        """
        known = execution.lean_elsewhere
        if known is None or not self.try_reserve(known):
            known = None
        host = self._plans.hardware.capacity(Tier.HOST)
        nearest = [(Tier.HOST,)] if host else []
        for without in ((), *nearest, (Tier.HOST, Tier.DISK)):
            with suppress(InfeasibleError):
                lean = self._lean_beside(graph, known, execution.planned, inputs, without)
                if self.try_reserve(lean):
                    execution.lean_elsewhere = lean
                    self.leaner += 1
                    return lean
        return None

    def _lean_beside(
        self,
        graph: PlannedGraph,
        known: Executable | None,
        planned: Planned,
        inputs: Sequence[Any],
        without: Collection[Tier] = (),
    ) -> Executable:
        """The `known` program of little memory, or a new one if that needs too much by now.

        Raises InfeasibleError if none fits.
        """
        between = _between_bytes(graph)
        if known is not None:
            lacking = self._lacking_later(self._needs(graph, known).in_all(between))
            if lacking <= 0:
                return known
        program = self._plans.lean_program(graph, planned, inputs, between, without=without)
        return build(graph.captured.trace, program, self._driver.generator)

    def try_reserve(self, executable: Executable) -> bool:
        """Whether the outer tiers have, or can make, room for a call beside outstanding calls."""
        if not len(self._registry.stores):
            return True
        needed = self._outer.get(executable)
        if needed is None:
            needed = self._outer[executable] = _outer_bytes(executable.program)
        return not needed or self._driver.try_reserve(needed)

    def _lacking(self, ahead_bytes: int) -> int:
        """By how much the budget without its margin will be exceeded if so much more is held."""
        budget = self._settings.budget_bytes
        limit = budget - margin_bytes(budget)
        lacking = self._residency.resident_bytes() + ahead_bytes - limit
        if lacking > 0 and self._collections < MOST_COLLECTIONS and self._residency.collect():
            self._collections += 1
            lacking = self._residency.resident_bytes() + ahead_bytes - limit
        return lacking

    def _lacking_later(self, ahead_bytes: int) -> int:
        """As `_lacking`, once all that can be moved away is."""
        return self._lacking(ahead_bytes) - sum(s.private_bytes for s in self._others())

    def _is_in_doubt(self, graph: PlannedGraph, executable: Executable, begun: int = 0) -> bool:
        """Whether a call of `graph` may find more held than `executable` leaves room for.

        `begun`: how many calls have just begun.
        """
        planned, observed, status = graph.planned, graph.observed, graph.status
        if planned is None:
            keeping = None if graph.profiling is None else graph.profiling.keeping
            return keeping is None or executable is not keeping.executable
        if observed.unchecked or observed.latest_mix_uncounted:
            return True
        if status.refused.external_bytes != inf or status.growth.unplanned_bytes > 0:
            return True
        if status.at_once.most <= planned.calls:
            return False
        returned = status.history.returned(self._registry.steps.number)  # their gradients are held
        return begun + self._registry.waiting(graph) + returned > planned.calls

    def _needs(self, graph: PlannedGraph, executable: Executable) -> Ahead:
        """What the calls of `executable` will hold beyond what is held as they begin."""
        trace, program = executable.trace, executable.program
        assert trace is not None  # noqa: S101 - callers ask for the program
        assert program is not None  # noqa: S101 - as above
        if executable not in self._known:
            hardware = self._plans.hardware
            same = graph.captured.trace is trace
            profile = profile_of(graph) if same else Profile.unknown(len(trace.ops))
            found = ahead(Problem(trace, profile, hardware, self._settings.budget_bytes), program)
            if graph.planned is None:  # workspaces may be known later
                return found
            self._known[executable] = found
        return self._known[executable]

    # ---- what is moved, and where to -------------------------------------------------------------

    def _move_from(
        self,
        store: Store,
        nbytes: int,
        room_bytes: Callable[[Tier], int],
        program: Program | None,
    ) -> int:
        """Move `nbytes` of a waiting call away, or somewhat more, or all; returns how many."""
        things = dict(enumerate(store.crossing))  # a finalizer of another thread may empty it
        private = ((p, things.get(p)) for p in store.executable.private)
        found = {p: t for p, t in private if isinstance(t, torch.Tensor) and self._is_there(t)}
        few = choose({p: t.untyped_storage().nbytes() for p, t in found.items()}, nbytes)
        chosen = {p: found[p] for p in few}
        handles = [things[p] for p in store.executable.copies if p in things]
        for tier in self._tiers() if chosen else ():
            if sum(map(_blocks_bytes, chosen.values())) > room_bytes(tier):
                continue
            try:
                away = self._move(store.lane, chosen, handles, tier, program)
            except (SpillError, HostMemoryError):
                continue  # to the next tier; if there is none, less is moved
            self._registry.stores.put_away(store, away)
            self._nbytes[tier] = self._nbytes.get(tier, 0) + away.nbytes
            return away.nbytes
        return 0

    def _is_there(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is on the device, and not too small to be worth a copy."""
        large = tensor.untyped_storage().nbytes() >= FILE_BLOCK_BYTES
        return large and tensor.device == self._residency.device

    def _tiers(self) -> Iterator[Tier]:
        """Where tensors may be moved to, the nearest tier first."""
        hardware = self._plans.hardware
        if hardware.capacity(hardware.outer):
            yield hardware.outer
            if hardware.outer is not Tier.DISK and self._settings.disk_budget_bytes:
                yield Tier.DISK

    def _move(
        self,
        waiting: Lane,
        chosen: Mapping[int, torch.Tensor],
        handles: Sequence[Handle],
        tier: Tier,
        program: Program | None,
    ) -> MovedTensors:
        """Copy tensors of a waiting call, given by position, to `tier`.

        `waiting`: the lane of that call; `handles`: its copies, which may read or write what moves.
        Raises SpillError or HostMemoryError if there is no room, or if one of its copies failed.
        """
        regions, stop = {}, 0
        for number, tensor in enumerate(chosen.values()):
            regions[number] = Region.of(tensor, stop, tier)
            stop += _blocks_bytes(tensor)
        tensors, room = list(chosen.values()), {tier: stop}
        with call(waiting, ()):  # where the call computes
            for handle in handles:
                waiting.wait(handle)
            try:
                lane = self._copied(tensors, regions, room, program, keep=True)
            except HostMemoryError:  # a slab may be larger than what moves, and the plan's
                lane = self._copied(tensors, regions, room, program, keep=False)
        return MovedTensors(
            lane, tuple(chosen), tier, sum(region.nbytes for region in regions.values())
        )

    def _copied(
        self,
        tensors: Sequence[torch.Tensor],
        regions: Mapping[int, Region],
        room: Mapping[Tier, int],
        program: Program | None,
        *,
        keep: bool,
    ) -> Lane:
        """A lane of `regions` with copies of `tensors`, and `room` as for `Driver.reserve`."""
        self._driver.reserve(room, keep=keep)
        lane = self._driver.open_lane(regions)
        try:
            copies = [lane.copy_out(tensor, i) for i, tensor in enumerate(tensors)]
            for copy in copies:
                lane.wait(copy)
            self._reserve(program)
        except BaseException:
            lane.close()
            raise
        return lane

    def _room_bytes(self, graph: PlannedGraph, tier: Tier) -> int:
        """What is left of `tier` by plans of calls that may wait together with those of `graph`."""
        planner, planned, number = self._plans.planner, graph.planned, graph.status.planned_for
        room = self._settings.disk_budget_bytes
        if tier is Tier.HOST:
            room = self._plans.hardware.capacity(tier)
        shares = planner.shares(graph, self._registry.running_with(graph))
        each = shares.outer(tier, room, own=planned)
        own = 0 if planned is None else planned.predicted.peak(tier)
        stores = self._registry.stores.all()
        away = sum(a.nbytes for store in stores for a in store.away if a.tier is tier)
        return number * (each - own) - away

    def _reserve(self, program: Program | None) -> None:
        """Reserve what `program` needs of the outer tiers. Raises SpillError or HostMemoryError."""
        needed = _outer_bytes(program)
        if needed:
            self._driver.reserve(needed, keep=True)


def _outer_bytes(program: Program | None) -> dict[Tier, int]:
    """What a program needs of the outer tiers, of those that it uses."""
    outer = (Tier.HOST, Tier.DISK) if program is not None else ()
    return {t: nbytes for t in outer if program and (nbytes := extent_bytes(program, t))}


def choose(sizes: Mapping[int, int], nbytes: int) -> list[int]:
    """Keys of a few `sizes` that add up to `nbytes` or little more; all if they are less."""
    chosen: list[int] = []
    larger: list[int] = []
    left = nbytes
    for key in sorted(sizes, key=lambda each: -sizes[each]):
        (chosen if sizes[key] <= left else larger).append(key)
        left -= sizes[key] if sizes[key] <= left else 0
    if left > 0 and larger:
        left -= sizes[larger[-1]]
        for key in list(chosen):  # not needed any more
            if sizes[key] <= -left:
                chosen.remove(key)
                left += sizes[key]
        chosen.append(larger[-1])
    return chosen


def _blocks_bytes(tensor: torch.Tensor) -> int:
    """Bytes of `tensor` in an outer tier."""
    return -(-tensor.untyped_storage().nbytes() // FILE_BLOCK_BYTES) * FILE_BLOCK_BYTES


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _between_bytes(graph: PlannedGraph) -> int:
    """What was seen to be made while a call of `graph` waited, without its tangents."""
    planned, profiling = graph.planned, graph.profiling
    if planned is not None:
        seen = planned.external
        return seen.between_bytes + seen.lingering_bytes + seen.dropped_bytes
    if profiling is None:
        return 0
    return profiling.waiting.between_bytes + profiling.waiting.lingering_bytes
