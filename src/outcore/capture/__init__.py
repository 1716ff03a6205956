"""capture: a PyTorch training step -> Trace."""

from __future__ import annotations

from outcore.capture.compat import (
    aot_autograd,
    default_partition,
    hooks_active,
    keeps_graph,
)
from outcore.capture.graph import Captured, capture
from outcore.capture.shells import Shells, shells

__all__ = [
    "Captured",
    "Shells",
    "aot_autograd",
    "capture",
    "default_partition",
    "hooks_active",
    "keeps_graph",
    "shells",
]
