"""fragments: free memory of a GPU that lies in pieces, step after step, and a new beginning."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from outcore.measure import retries
from outcore.runtime.options import Settings
from outcore.runtime.plans import Plans
from outcore.runtime.registry import Registry

SETTLING_STEPS = 2
"""Planned steps that the allocator has to find where things lie well; twice as many after each new
beginning."""

IN_A_ROW = 2
"""So many steps in a row have to give memory back: one may be another's."""

OFTEN, LATEST = 4, 32
"""A layout is left where memory is given back in so many of the latest steps under it. That costs
some steps; where it is an optimizer, it may be once for several calls."""

TOLD = 16
"""After so many in a row reports tell of it."""

NOTE = (
    "in each of the last {steps} steps torch's allocator gave memory back to the GPU and took "
    "other, and the device waited: free memory lies in pieces; with a smaller budget there is more"
)


class Fragments:
    """Has torch's allocator begin anew where it gives memory back within steps.

    By its model a plan loses nothing from an empty device on (decision 0036). From where other
    steps left things it may go on as it does for ever. Where tensors have places (decision 0037)
    nothing should be lost at all; else these are left.
    """

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        registry: Registry,
        plans: Plans,
        leave_places: Callable[[], None],
    ) -> None:
        self._device, self._registry, self._plans, self._leave = (
            device,
            registry,
            plans,
            leave_places,
        )
        self._placed: deque[bool] = deque(maxlen=LATEST)
        """Of steps with places: whether memory was given back."""
        self._watches = device.type == "cuda" and any(settings.rooms)
        self._step = self._began = self._retries = self._in_a_row = 0
        self._patience = SETTLING_STEPS

    @property
    def note(self) -> str:
        """For reports; empty where it does not go on."""
        return NOTE.format(steps=self._in_a_row) if self._in_a_row >= TOLD else ""

    def called(self) -> None:
        """Take that a forward call begins; where it is a step's first, see what that before did."""
        if not self._watches or self._registry.steps.number == self._step:
            return
        self._step = self._registry.steps.number
        before, self._retries = self._retries, retries(self._device)
        self._in_a_row = self._in_a_row + 1 if self._retries > before else 0
        planned = [graph.planned for graph in self._registry.active()]
        if all(each is None or each.everything_kept for each in planned) or None in planned:
            self._began = self._step
            self._placed.clear()
        elif any(each is not None and each.layout is not None for each in planned):
            if self._step - self._began > SETTLING_STEPS:
                self._placed.append(self._in_a_row > 0)
            if sum(self._placed) >= OFTEN:
                self._leave()
                self._placed.clear()
        elif self._in_a_row >= IN_A_ROW and self._step - self._began > self._patience:
            self._began, self._patience = self._step, 2 * self._patience
            self._plans.bound_memory()  # which empties the cache, as something is moved
