"""api: the public names that capture and train, and so import torch; `wrapping` has the others."""

from __future__ import annotations

from outcore.capture import trace
from outcore.runtime.backend import Backend

__all__ = ["Backend", "trace"]
