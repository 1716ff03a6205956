"""recurrent: end graphs at calls of torch's RNN, GRU and LSTM, and begin new ones after them.

By default, dynamo compiles nothing more of code that mentions such a layer. If it is allowed to
trace them, it takes them apart into the ops of each time step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.utils import rnn

from outcore.capture.compiler.compat import DISABLED, SETTINGS_OF_THREADS, dynamo_config

KINDS = nn.RNN, nn.GRU, nn.LSTM


def is_recurrent(model: nn.Module) -> bool:
    """Whether graphs of `model` should end at recurrent layers.

    Not if a recurrent layer has its own `forward`: dynamo would trace into that. Not with a version
    of torch that lacks the setting, either.
    """
    forwards = [type(layer).forward for layer in recurrent_layers(model)]
    known = hasattr(dynamo_config, "allow_rnn") and all(each in _forwards() for each in forwards)
    return bool(forwards) and known


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules in `model` that are of torch's recurrent classes."""
    return [module for module in model.modules() if isinstance(module, KINDS)]


def _forwards() -> list[Any]:
    return [kind.forward for kind in KINDS]


class _Apart:
    """Counts, over all threads, the calls that keep recurrent layers out of graphs."""

    def __init__(self) -> None:
        self._lock, self._wanted = threading.Lock(), 0
        self._marked: list[Any] = []
        self._before = False
        """The process's setting when the first of these calls began."""

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Keep recurrent layers out of graphs, unless dynamo was already set to trace them."""
        before = self._begin()
        try:
            yield
        finally:
            self._end(before=before)

    def _begin(self) -> bool:
        """Mark the layers' code and set `allow_rnn`; return the setting before."""
        with self._lock:
            before = bool(dynamo_config.allow_rnn)
            if not self._wanted:
                self._before = before
            self._wanted += 1
            if not (self._marked or before):
                functions = [*_forwards(), rnn.pack_padded_sequence, rnn.pad_packed_sequence]
                self._marked = [each for each in functions if not hasattr(each, DISABLED)]
                for function in self._marked:
                    setattr(function, DISABLED, True)
            dynamo_config.allow_rnn = True
            return before

    def _end(self, *, before: bool) -> None:
        """Take back what `_begin` did, as far as no other call needs it."""
        with self._lock:
            self._wanted -= 1
            if not self._wanted:
                for function in self._marked:
                    delattr(function, DISABLED)
                self._marked = []
            if SETTINGS_OF_THREADS:
                dynamo_config.allow_rnn = before
            elif not (self._wanted or self._before):
                dynamo_config.allow_rnn = False


recurrent_apart = _Apart()
