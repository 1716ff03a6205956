"""versions: read how often tensors were written, by torch's own count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch


def versions_of(
    things: Sequence[Any], may_change: Sequence[Any], private: Collection[int] = ()
) -> list[range | None]:
    """For each thing, how often it was written so far, and may have been later if nobody writes it.

    AOTAutograd writes each input in `may_change` once, after the forward call. Views of one tensor
    have a common count. None for what is not a tensor, is an inference tensor, or may change, and
    at the positions `private`, of tensors that nobody else can write.
    """
    exempt, own = {id(tensor) for tensor in may_change}, frozenset(private)
    beside = Counter(map(_memory, may_change))
    return [
        None if i in own or id(t) in exempt or not _counts(t) else _range(t, beside)
        for i, t in enumerate(things)
    ]


def _counts(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor) and not thing.is_inference()


def _range(tensor: torch.Tensor, beside: Counter[int]) -> range:
    version = int(tensor._version)
    return range(version, version + 1 + (beside[_memory(tensor)] if beside else 0))


def _memory(tensor: torch.Tensor) -> int:
    """What tells the memory of `tensor` from that of others."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
