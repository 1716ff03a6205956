"""state: what a Backend shares with the compiler of its graphs."""

from __future__ import annotations

import warnings

import torch

from outcore.capture import LargeInputs
from outcore.errors import CaptureError
from outcore.measure import frozen_objects
from outcore.runtime.budget.engine import Engine
from outcore.runtime.parameters import Parameters
from outcore.runtime.settings.options import Options, over_memory, settings_for

RESTLESS_STEPS, OF_STEPS = 20, 24
"""The backend warns if `RESTLESS_STEPS` of the latest `OF_STEPS` steps were captured anew."""


CLOSED = "its backend was closed"

FROZEN = (
    "tensors that existed when gc.freeze() was called may not count toward the budget: call "
    "gc.unfreeze() before the first training call, or gc.freeze() after it"
)


class Tally:
    """A counter that compiled code can increment without keeping the Backend alive.

    It needs no lock: between reading and writing an attribute, CPython switches no threads. And
    only whether it has grown matters.
    """

    number = 0


class BackendState:
    """The options, the engine and the notes of a Backend, and what is known of its graphs."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.engine: Engine | None = None
        self.capture_seconds = 0.0
        self.notes: list[str] = []
        self.closed = False
        self.recordings_asked = False
        self.parameters = Parameters()
        self.plain_calls = Tally()
        """Calls of graphs that cannot be planned, or that have nothing to differentiate."""
        self.compiled_anew = False
        """Whether torch compiled something since a graph was last added."""
        self.large_inputs = LargeInputs()
        self._captured_at: list[int] = []
        """Numbers of the latest steps in which a new graph was captured."""

    @property
    def engaged(self) -> bool:
        """Whether a graph with a backward was captured here, and has run."""
        return self.engine is not None and self.engine.steps.calls > 0

    def note(self, text: str) -> None:
        """Add a note to the reports, once."""
        if text not in self.notes:
            self.notes.append(text)

    def note_capture(self, step: int) -> None:
        """Warn once if almost every step brings a new graph, which takes longer than the step."""
        latest = self._captured_at
        if step in latest or len(latest) == RESTLESS_STEPS:
            return
        latest[:] = [each for each in latest if each > step - OF_STEPS] + [step]
        if len(latest) == RESTLESS_STEPS:
            text = (
                "step after step needs a new graph, which takes time: something differs each time, "
                "such as the sizes of inputs (pad them to few), a counter in the model or a list "
                "that grows (TORCH_LOGS=recompiles,dynamic may show it)"
            )
            self.notes.append(text)
            warnings.warn(f"outcore: {text}", stacklevel=2)

    def engine_for(self, device: torch.device) -> Engine:
        """The engine. Raises CaptureError if it is another device's, or if this was closed."""
        if self.closed:
            raise CaptureError(reason=CLOSED)
        if self.engine is None:
            settings = settings_for(self.options, device)
            over = over_memory(settings, device)
            if over:
                self.note(over)
                warnings.warn(f"outcore: {over}", stacklevel=2)
            if device.type == "cpu" and frozen_objects():
                self.note(FROZEN)
            self.engine = Engine(settings, device)
            self.engine.recorder.asked += self.recordings_asked
        elif self.engine.device != device:
            reason = f"one budget covers one device: {self.engine.device}, not also {device}"
            raise CaptureError(reason=reason)
        return self.engine

    def refuse(self, error: CaptureError) -> None:
        """Warn and note that a graph cannot be planned and runs in-core; raise with `strict`."""
        if self.options.strict:
            raise error
        self.note(str(error))
        warnings.warn(f"outcore runs a graph in-core: {error}", stacklevel=2)
