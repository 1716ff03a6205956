"""recurrent: graphs that end where torch's RNN, GRU or LSTM is called, and begin again behind it.

Left to itself, dynamo compiles nothing more of code that mentions one; told that it may trace them,
it takes them apart into ops of each step in time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.utils import rnn

from outcore.capture.compat import DISABLED, SETTINGS_OF_THREADS, dynamo_config

KINDS = nn.RNN, nn.GRU, nn.LSTM


def is_recurrent(model: nn.Module) -> bool:
    """Whether graphs of `model` are to end at recurrent layers.

    Not where one has a `forward` of its own: dynamo would go into that. Nor with a torch that has
    no such setting (any more).
    """
    forwards = [type(layer).forward for layer in recurrent_layers(model)]
    known = hasattr(dynamo_config, "allow_rnn") and all(each in _forwards() for each in forwards)
    return bool(forwards) and known


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """Those of torch's kinds in `model`."""
    return [module for module in model.modules() if isinstance(module, KINDS)]


def _forwards() -> list[Any]:
    return [kind.forward for kind in KINDS]


class _Apart:
    """Who wants recurrent layers to be kept out of graphs, on whatever thread."""

    def __init__(self) -> None:
        self._lock, self._wanted = threading.Lock(), 0
        self._marked: list[Any] = []
        self._before = False
        """What the process had set when the first one began to want it."""

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Keep them out. Where somebody has told dynamo to trace them, that stays so."""
        before = self._begin()
        try:
            yield
        finally:
            self._end(before=before)

    def _begin(self) -> bool:
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
