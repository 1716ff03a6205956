"""eviction: move away what waiting calls hold when another call finds too little room.

Plans have room for the calls that were seen to wait. If others wait, because a graph comes late or
the order of calls changes, the budget is kept at the expense of time: tensors of waiting calls are
moved to an outer tier until the calls come back (docs/decisions/0039).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from outcore.errors import HostMemoryError, InfeasibleError, SpillError
from outcore.execute import Driver, Executable, Region, build
from outcore.execute.disk import FILE_BLOCK_BYTES
from outcore.gc_paused import gc_paused
from outcore.ir.hardware import Tier
from outcore.ir.memory import bytes_ahead, extent_bytes
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile
from outcore.ir.program import Program
from outcore.runtime.margin import margin_bytes
from outcore.runtime.options import Settings
from outcore.runtime.placing import call
from outcore.runtime.plans import Plans
from outcore.runtime.registry import Registry
from outcore.runtime.residency import Residency
from outcore.runtime.shares import profile_of
from outcore.runtime.store import Away, Store
from outcore.units import format_bytes

if TYPE_CHECKING:  # a graph calls its engine's Eviction
    from outcore.runtime.execution import PlannedExecution
    from outcore.runtime.graph import PlannedGraph

NOTE = (
    "{times} a call found too little room beside outstanding calls that no plan had counted, and "
    "{nbytes} of what those hold were moved to the {tiers} until they came back, which takes time"
)


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
        self._ahead: WeakKeyDictionary[Executable, tuple[int, int]] = WeakKeyDictionary()
        """Executable -> `bytes_ahead` of its two calls."""
        self.times = 0
        """Number of calls for which something was moved."""
        self._nbytes: dict[Tier, int] = {}
        """Bytes moved so far, by the tier that they were moved to."""

    @property
    def note(self) -> str:
        """For reports: how much was moved; empty if nothing was."""
        if not self.times:
            return ""
        times = "once" if self.times == 1 else f"{self.times} times"
        tiers = " and the ".join(tier.value for tier in self._nbytes)
        return NOTE.format(
            times=times, nbytes=format_bytes(sum(self._nbytes.values())), tiers=tiers
        )

    def before_forward(
        self, graph: PlannedGraph, executable: Executable, inputs: Sequence[Any]
    ) -> Executable:
        """Make room for a forward call of `graph` by `executable`; returns what it is to run.

        Usually that is `executable`. If it needs too much even then, and is the graph's plan, it is
        a program of little memory instead, if that fits.
        """
        if not len(self._registry.stores) or not _is_in_doubt(graph):
            return executable
        lacking, execution = self._lacking_bytes(graph, executable), graph.execution
        lacking -= self._moved_bytes(lacking, program=executable.program)
        if lacking <= 0 or execution is None or executable is not execution.executable:
            return executable
        with contextlib.suppress(InfeasibleError, SpillError, HostMemoryError):
            return self._lean(graph, execution, inputs)
        return executable

    def _lean(
        self, graph: PlannedGraph, execution: PlannedExecution, inputs: Sequence[Any]
    ) -> Executable:
        """The latest program of little memory for `graph`, or a new one if that needs too much."""
        known, planned = execution.lean, execution.planned
        if known is None or self._lacking_bytes(graph, known) > 0:
            between = _between_bytes(graph)
            program = self._plans.lean_program(graph, planned, inputs, between)
            known = build(graph.captured.trace, program, self._driver.generator)
            execution.lean = known
        return known

    def before_backward(self, graph: PlannedGraph, store: Store) -> None:
        """Make room for the backward call of `store` and for what was moved out of it."""
        if len(self._registry.stores) > 1 and (store.away or _is_in_doubt(graph)):
            lacking = self._lacking_bytes(graph, store.executable, backward=True)
            self._moved_bytes(lacking + store.away_bytes, but=store)

    def make_room_for(self, error: InfeasibleError) -> bool:
        """Move away as much as `error` says is lacking; returns whether anything was moved."""
        lacking = error.floor_bytes - error.budget_bytes if error.tier == "device" else 0
        return self._moved_bytes(lacking) > 0

    def _lacking_bytes(
        self, graph: PlannedGraph, executable: Executable, *, backward: bool = False
    ) -> int:
        """By how much a call will exceed the budget, less its margin; negative if it fits."""
        if executable.program is None or executable.trace is None:
            return 0  # it runs in-core: nobody knows what it needs
        if executable not in self._ahead:
            trace, hardware = executable.trace, self._plans.planner.solver.hardware()
            known = graph.captured.trace is trace
            profile = profile_of(graph) if known else Profile.unknown(len(trace.ops))
            problem = Problem(trace, profile, hardware, self._settings.budget_bytes)
            problem = replace(problem, between_bytes=_between_bytes(graph))
            self._ahead[executable] = bytes_ahead(problem, executable.program)
        ahead = self._ahead[executable][backward]
        budget = self._settings.budget_bytes
        return self._residency.resident_bytes() + ahead + margin_bytes(budget) - budget

    @gc_paused()
    def _moved_bytes(
        self, lacking_bytes: int, *, but: Store | None = None, program: Program | None = None
    ) -> int:
        """Move that many bytes away, if calls other than that of `but` hold them.

        What `program`, which is about to run, needs of the outer tiers is left to it. Returns how
        many were moved.
        """
        left, queue = lacking_bytes, self._driver.queue()
        for store in self._registry.stores.all() if left > 0 else ():
            if store is not but and store.queue == queue:
                left -= self._evicted_bytes(store, left, program)
            if left <= 0:
                break
        self.times += left < lacking_bytes
        return lacking_bytes - left

    def _evicted_bytes(self, store: Store, nbytes: int, program: Program | None) -> int:
        """Move up to `nbytes` of a waiting call away, and a little more; returns how many."""
        movable = list(self._movable(store))
        movable.sort(key=lambda each: -each[1].untyped_storage().nbytes())
        sums = accumulate(each.untyped_storage().nbytes() for _, each in movable)
        few = next((i for i, total in enumerate(sums, 1) if total >= nbytes), len(movable))
        chosen = dict(movable[:few])
        for tier in self._tiers() if chosen else ():
            needed = 0 if program is None else extent_bytes(program, tier)
            try:
                moved = self._move(store, chosen, tier, needed)
            except (SpillError, HostMemoryError):
                continue  # to the next tier; if there is none, less is moved
            self._nbytes[tier] = self._nbytes.get(tier, 0) + moved
            return moved
        return 0

    def _movable(self, store: Store) -> Iterator[tuple[int, torch.Tensor]]:
        """The tensors on the device that nothing but the waiting call of `store` holds."""
        things = dict(enumerate(store.crossing))  # a finalizer of another thread may empty it
        for position in store.executable.private:
            thing = things.get(position)
            if isinstance(thing, torch.Tensor) and thing.device == self._residency.device:
                yield position, thing

    def _tiers(self) -> Iterator[Tier]:
        """Where tensors may be moved to, the nearest tier first."""
        hardware = self._plans.planner.solver.hardware()
        if hardware.capacity(hardware.outer):
            yield hardware.outer
            if hardware.outer is not Tier.DISK and self._settings.disk_budget_bytes:
                yield Tier.DISK

    def _move(
        self, store: Store, chosen: Mapping[int, torch.Tensor], tier: Tier, needed_bytes: int
    ) -> int:
        """Move tensors of a waiting call, given by position, to `tier`; returns the bytes.

        Raises SpillError or HostMemoryError if that leaves less than `needed_bytes` of the tier, or
        if a copy of the waiting call failed.
        """
        regions, stop = {}, 0
        for number, tensor in enumerate(chosen.values()):
            regions[number] = _region(tensor, stop, tier)
            stop += -(-regions[number].nbytes // FILE_BLOCK_BYTES) * FILE_BLOCK_BYTES
        if tier is Tier.DISK:
            self._check_disk(stop + needed_bytes)
        with call(store.lane, ()):  # where the call computes
            for position in store.executable.copies:  # they may read or write what moves
                store.lane.wait(store.crossing[position])
            lane = self._driver.open_lane(regions)
            try:
                if needed_bytes:
                    self._driver.reserve({tier: needed_bytes})
                copies = [lane.copy_out(tensor, i) for i, tensor in enumerate(chosen.values())]
                for copy in copies:
                    lane.wait(copy)
            except BaseException:
                lane.close()
                raise
        moved = sum(region.nbytes for region in regions.values())
        self._registry.stores.put_away(store, Away(lane, tuple(chosen), tier, moved))
        return moved

    def _check_disk(self, nbytes: int) -> None:
        """Raise SpillError if `nbytes` more on the disk exceed its budget."""
        stores, budget = self._registry.stores.all(), self._settings.disk_budget_bytes
        programs = (store.executable.program for store in stores)
        taken = sum(extent_bytes(p, Tier.DISK) for p in programs if p is not None)
        taken += sum(a.nbytes for store in stores for a in store.away if a.tier is Tier.DISK)
        if taken + nbytes > budget:
            raise SpillError(
                directory=str(self._settings.spill_dir),
                reason="disk_budget is used up",
                needed_bytes=nbytes,
                free_bytes=budget - taken,
            )


def _region(tensor: torch.Tensor, offset: int, tier: Tier) -> Region:
    """A place at `offset` of a lane for the storage of `tensor`."""
    nbytes, start = tensor.untyped_storage().nbytes(), int(tensor.storage_offset())
    shape, stride = tuple(tensor.shape), tensor.stride()
    return Region(offset, nbytes, tensor.dtype, shape, stride, tier, start)


def _between_bytes(graph: PlannedGraph) -> int:
    """What was seen to be made while a call of `graph` waited, without its tangents."""
    planned, profiling = graph.planned, graph.profiling
    seen = profiling if planned is None else planned.external
    return 0 if seen is None else seen.between_bytes + seen.lingering_bytes


def _is_in_doubt(graph: PlannedGraph) -> bool:
    """Whether a call of `graph` may find more held than what it runs leaves room for."""
    planned, observed, status = graph.planned, graph.observed, graph.status
    if planned is None:
        return True
    unknown = observed.unchecked or observed.latest_mix_uncounted
    refused = status.refused.external_bytes != inf or status.growth.unplanned_bytes > 0
    return unknown or refused or status.most_outstanding > planned.calls
