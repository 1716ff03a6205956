"""figures: memory and FLOP of each network's step, computed by `python -m benchmarks.networks`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

FILE = "figures.json"


@dataclass(frozen=True, slots=True)
class Figures:
    """Size of a network and of its training step.

    Per-sample figures are what one more sample in the batch adds.
    """

    parameters: int
    """Number of parameters."""
    saved_bytes: int
    """Bytes per sample that wait from forward to backward."""
    flop: float
    """FLOP per sample, forward and backward: convolutions, matrix products and attention only.

    A multiplication and an addition count as two.
    """


def figures() -> Mapping[str, Figures]:
    """The figures of every network in the table, by name."""
    text = (files(__package__) / FILE).read_text(encoding="utf-8")
    return {name: Figures(**found) for name, found in json.loads(text).items()}
