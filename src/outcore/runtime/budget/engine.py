"""Engine: one budget, the driver that moves bytes, and all that the graphs of the budget share."""

from __future__ import annotations

import threading
from contextlib import suppress

import torch

from outcore.errors import OutcoreError
from outcore.execute import Driver, open_driver
from outcore.runtime.budget.contention import Contention
from outcore.runtime.budget.eviction import Eviction
from outcore.runtime.budget.fragments import Fragments
from outcore.runtime.budget.growth import Growth
from outcore.runtime.budget.lenders import Lenders
from outcore.runtime.budget.metering import Metering
from outcore.runtime.budget.observer import Observer
from outcore.runtime.budget.placing import Placing
from outcore.runtime.budget.plans import Plans
from outcore.runtime.budget.registry import Registry
from outcore.runtime.budget.residency import Residency
from outcore.runtime.budget.steps import Steps
from outcore.runtime.graphs.graph import Equipment, PlannedGraph
from outcore.runtime.graphs.recording import Recorder
from outcore.runtime.graphs.trial import Trials
from outcore.runtime.settings.options import Settings
from outcore.runtime.step.store import Stores


class Engine:
    """What the graphs of one budget share. Each part knows only the parts constructed before it."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.lock = threading.RLock()
        """Held by each call of a graph: threads that train under one budget take turns."""
        self.driver: Driver = open_driver(
            device, settings.spill_dir, settings.link_bytes_per_second
        )
        self.stores, self.steps = Stores(), Steps()
        self.registry = Registry(self.stores, self.steps)
        self.residency = Residency(device, self.driver, self.registry)
        self.observer = Observer(self.registry, self.residency)
        self.metering = Metering(device, self.registry, self.residency, self.observer)
        self.plans = Plans(
            settings, device, self.driver, self.registry, self.residency, self.metering
        )
        self.eviction = Eviction(settings, self.driver, self.registry, self.residency, self.plans)
        self.contention = Contention(self.registry, self.metering, self.plans)
        self.growth = Growth(settings, self.steps, self.residency, self.metering, self.plans)
        self.lenders = Lenders(settings, self.registry, self.residency, self.plans, self.growth)
        self.placing = Placing(self.stores, self.metering)
        leave = self.placing.give_up
        self.fragments = Fragments(
            settings, device, self.registry, self.metering, self.plans, leave
        )
        self.recorder, self.trials = Recorder(self.driver), Trials(self.driver)
        self.equipment = Equipment(self.driver, self.recorder, self.trials, settings.strict)

    @property
    def graphs(self) -> list[PlannedGraph]:
        """The graphs whose compiled code torch still has, oldest first."""
        return self.registry.graphs

    def add(self, graph: PlannedGraph, *, compiled: bool = True) -> None:
        """Add a captured graph. If its trace was planned before (a recompile), it gets that plan.

        `compiled`: whether a compiler ran for it. Copies for further sizes need none.

        Forgets what is known of graphs that torch has dropped. With `strict`, raises DigestError
        if the file of plans is known to have no plan for the graph.
        """
        self.plans.check_known(graph, checked=False)
        self.registry.add(graph)
        if compiled:
            self.residency.compiled()
        self.plans.give_known(graph)
        self.metering.renew_tries()

    def close(self, reason: str) -> None:
        """Run all graphs in-core from now on, and stop bounding the process's memory.

        Closes the driver, once no call is outstanding.
        """
        with self.lock:
            for graph in self.graphs:
                graph.retire(reason)
            self.metering.end(whole=False)
            self.driver.bound_memory(self.residency.resident_bytes, None)
            self.stores.once_empty(self._close_driver)

    def _close_driver(self) -> None:
        # A finalizer must not break what a CUDA graph captures, nor an error the last backward.
        with suppress(OutcoreError, OSError, RuntimeError):
            self.driver.refuse_capture()
            self.driver.close()

    def readings(self, *, lent: bool) -> int:
        """Steps to meter before planning; `lent`: they run a plan for larger sizes.

        In the first on a GPU, cuDNN may try its algorithms. What libraries allocate once was
        allocated for the larger sizes.
        """
        anew = torch.backends.cudnn.benchmark or not lent
        return 2 if self.device.type == "cuda" and anew else 1

    # ---- steps ----------------------------------------------------------------------------------

    def called(self, caller: PlannedGraph) -> None:
        """Count the forward call of `caller` that now begins.

        If it begins a new step, this ends the metered step. Also ends a trial or a recording whose
        graph is gone or that has lasted too long.
        """
        self.placing.called()
        self.residency.tidy()
        self.registry.called(caller)
        self.trials.check(self.steps.number)
        self.recorder.check(self.steps.number)
        self.fragments.called()
        self.begun(caller)

    def begun(self, caller: PlannedGraph) -> None:
        """End the metered step if a counted call begins a new one.

        Called again if the trace was corrected and the call begins anew.
        """
        if self.metering.called(caller):
            self.plans.bound_memory()  # again: planning and metering leave memory fragmented

    def passed_by(self, caller: int) -> None:
        """Count the forward call of a graph that cannot be planned; `caller` identifies it."""
        with self.lock:
            self.registry.passed_by(caller)

    def close_step(self, *, early: bool = False) -> None:
        """End the metered step if it is over; `early` as in `Metering.close_step`."""
        if not self.lock.acquire(blocking=False):
            return  # another thread is in the middle of a step
        try:
            if self.metering.close_step(early=early):
                self.plans.bound_memory()  # as above
        finally:
            self.lock.release()
