"""Kinds: choices as small integers."""

from __future__ import annotations

KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_STAY = range(4)
"""What is offloaded goes to the nearest outer tier; the last is `Recompute(stay=True)`."""

NO_HINT = -1
"""Lowering decides."""
