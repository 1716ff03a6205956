"""snapshots: copies of tensors, which do not follow what happens to them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from outcore.optimizers.parameter_state import is_plain


def tensors_in(tree: object) -> list[torch.Tensor]:
    """The tensors in nested dicts, lists and tuples."""
    return [value for value in tree_leaves(tree) if isinstance(value, torch.Tensor)]


class Snapshots:
    """Copies some tensors one by one. Those that share memory have copies that share memory."""

    def __init__(self, tensors: Iterable[torch.Tensor], *, on_host: bool = False) -> None:
        """`on_host`: large ones are copied to host memory, unless others share theirs."""
        self._times = Counter(map(_address, tensors))
        self._on_host = on_host
        self._memo: dict[int, Any] = {}

    def is_shared(self, tensor: torch.Tensor) -> bool:
        """Whether others of the tensors have parts of the same memory."""
        address = _address(tensor)
        return address != 0 and self._times[address] > 1

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of one of the tensors."""
        with torch.inference_mode(mode=False), torch.no_grad():
            if self.is_shared(tensor):
                return copy.deepcopy(tensor.detach(), self._memo)
            if self._on_host and is_plain(tensor):
                return tensor.to("cpu", copy=True)
            return tensor.clone()


def _address(tensor: torch.Tensor) -> int:
    """Where the tensor's memory begins; 0 if it has none, or is no ordinary tensor."""
    ordinary = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if ordinary else 0
