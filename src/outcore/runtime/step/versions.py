"""versions: read how often tensors were written, by torch's own count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def versions_of(things: Sequence[Any], may_change: Sequence[Any]) -> list[int | None]:
    """For each thing, how often it was written so far.

    None for what is not a tensor, is an inference tensor, or is in `may_change`.
    """
    exempt = {id(t) for t in may_change}
    return [None if id(t) in exempt else _version(t) for t in things]


def _version(thing: Any) -> int | None:
    watched = isinstance(thing, torch.Tensor) and not thing.is_inference()
    return int(thing._version) if watched else None
