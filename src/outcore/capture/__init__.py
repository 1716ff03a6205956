"""capture: a PyTorch training step -> Trace."""

from __future__ import annotations

from outcore.capture.graph import Captured, capture

__all__ = ["Captured", "capture"]
