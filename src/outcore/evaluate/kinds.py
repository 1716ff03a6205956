"""kinds: the choices for a gap as small integers."""

from __future__ import annotations

KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_STAY = range(4)
"""OFFLOAD is to the nearest outer tier; RECOMPUTE_STAY is `Recompute(stay=True)`."""

NO_HINT = -1
"""The plan has no hint: lowering decides."""
