"""fragments: free memory of a GPU that lies in pieces, step after step, and a new beginning."""

from __future__ import annotations

import torch

from outcore.measure import retries
from outcore.runtime.options import Settings
from outcore.runtime.plans import Plans
from outcore.runtime.steps import Steps

SETTLING_STEPS = 4
"""Steps that the allocator has to find where things lie well; twice as many after each new
beginning."""


class Fragments:
    """Has torch's allocator begin anew where it gives memory back within steps.

    By its model a plan loses nothing from an empty device on (decision 0036). From where other
    steps left things it may go on as it does for ever.
    """

    def __init__(
        self, settings: Settings, device: torch.device, steps: Steps, plans: Plans
    ) -> None:
        self._device, self._steps, self._plans = device, steps, plans
        self._watches = device.type == "cuda" and any(settings.rooms)
        self._step = self._began = self._retries = 0
        self._patience = SETTLING_STEPS

    def called(self) -> None:
        """Take that a forward call begins; where it is a step's first, see what that before did."""
        if not self._watches or self._steps.number == self._step:
            return
        self._step = self._steps.number
        before, self._retries = self._retries, retries(self._device)
        if self._retries == before or self._step - self._began <= self._patience:
            return
        self._began, self._patience = self._step, 2 * self._patience
        self._plans.bound_memory()  # which empties the cache, where something is moved
