"""What a training step of each network takes, worked out once: `python -m benchmarks.networks`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

FILE = "figures.json"


@dataclass(frozen=True, slots=True)
class Figures:
    """Parameters; and per sample, bytes that wait from forward to backward, and FLOP of both.

    Per sample: what one more in the batch takes. Convolutions, matrix products and attention count,
    a multiplication and an addition as two.
    """

    parameters: int
    saved_bytes: int
    flop: float


def figures() -> Mapping[str, Figures]:
    """The figures of every network in the table, by name."""
    text = (files(__package__) / FILE).read_text(encoding="utf-8")
    return {name: Figures(**found) for name, found in json.loads(text).items()}
