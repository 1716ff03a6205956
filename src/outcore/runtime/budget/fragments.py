"""fragments: reset torch's allocator if a GPU's free memory stays fragmented over many steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from outcore.ir.layout import Layout
from outcore.measure import retries
from outcore.runtime.budget.metering import Metering
from outcore.runtime.budget.plans import Plans
from outcore.runtime.budget.registry import Registry
from outcore.runtime.settings.options import Settings

SETTLING_STEPS = 2
"""Planned steps in which the allocator may settle before it is reset; doubled after each reset."""

IN_A_ROW = 2
"""The allocator must give memory back in so many consecutive steps before it is reset: a single
time may have another cause."""

OFTEN, LATEST = 4, 32
"""A layout is dropped if memory is given back in `OFTEN` of the `LATEST` steps under it. It is not
dropped sooner, as that costs some steps. The steps need not be consecutive: if an optimizer causes
it, it may happen once per several calls."""

TOLD = 16
"""Reports have a note after so many consecutive steps in which memory was given back."""

NOTE = (
    "in each of the last {steps} steps torch's allocator returned memory to the GPU and took other "
    "memory, and the device waited: free memory is fragmented; a smaller budget leaves more of it"
)


class Fragments:
    """Resets torch's allocator, or drops a layout, if memory is given back within steps.

    By outcore's model of the allocator, a plan that starts on an empty device loses nothing
    (decision 0036). If it starts from what other steps left, it may give memory back in every
    step. Under a layout (decision 0037) nothing should be lost at all; if it is, the layout is
    dropped. Steps that are metered do not count: nothing is held for layouts in them, and plans
    start anew after them.
    """

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        registry: Registry,
        metering: Metering,
        plans: Plans,
        leave_places: Callable[[], None],
    ) -> None:
        self._device, self._registry, self._metering = device, registry, metering
        self._plans, self._leave = plans, leave_places
        self._layout: Layout | None = None
        """The layout of the latest step with one."""
        self._placed: deque[bool] = deque(maxlen=LATEST)
        """For the latest steps under that layout: whether memory was given back."""
        self._watches = device.type == "cuda" and any(settings.rooms)
        self._step = self._began = self._retries = self._in_a_row = 0
        self._patience = SETTLING_STEPS

    @property
    def note(self) -> str:
        """A note for reports if memory is given back step after step; else empty."""
        return NOTE.format(steps=self._in_a_row) if self._in_a_row >= TOLD else ""

    def called(self) -> None:
        """Note that a forward call begins; if it is the first of a step, check the step before."""
        if not self._watches or self._registry.steps.number == self._step:
            return
        counts = not self._metering.was_metered(self._step)
        self._step = self._registry.steps.number
        before, self._retries = self._retries, retries(self._device)
        if counts:
            self._in_a_row = self._in_a_row + 1 if self._retries > before else 0
        planned = [graph.planned for graph in self._registry.active()]
        if all(each is None or each.everything_kept for each in planned) or None in planned:
            self._began = self._step
            self._placed.clear()
        elif counts:
            layouts = (each.layout for each in planned if each is not None)
            self._check(next(filter(None, layouts), None))

    def _check(self, layout: Layout | None) -> None:
        """Check the step before, in which plans moved something, with `layout` if there is one."""
        if layout is not None:
            self._check_placed(layout)
        elif self._in_a_row >= IN_A_ROW and self._step - self._began > self._patience:
            self._began, self._patience = self._step, 2 * self._patience
            self._plans.bound_memory()  # empties the allocator's cache, as the plans move something

    def _check_placed(self, layout: Layout) -> None:
        if layout is not self._layout:
            self._layout, self._began = layout, self._step
            self._placed.clear()
        if self._step - self._began > SETTLING_STEPS:
            self._placed.append(self._in_a_row > 0)
        if sum(self._placed) >= OFTEN:
            self._leave()
            self._placed.clear()
