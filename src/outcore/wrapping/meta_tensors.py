"""meta_tensors: call compiled code with plain tensors in place of MONAI's MetaTensors.

torch.compile does not follow the bookkeeping of a MetaTensor, and ends a graph at each layer.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

T = TypeVar("T")


def plainly(given: T) -> tuple[T, list[Any]]:
    """The arguments of a call with plain tensors for MetaTensors, and those; `given` if none is."""
    module = sys.modules.get("monai.data.meta_tensor")
    if module is None:
        return given, []
    leaves, spec = pytree.tree_flatten(given)
    metas = [leaf for leaf in leaves if isinstance(leaf, module.MetaTensor)]
    if not metas:
        return given, []
    plain = (leaf.as_tensor() if isinstance(leaf, module.MetaTensor) else leaf for leaf in leaves)
    return pytree.tree_unflatten(list(plain), spec), metas


def as_theirs(results: T, metas: list[Any]) -> T:
    """The results of a call that was given `metas`, with the metadata that MONAI's ops give them.

    They have all of it. Without outcore, a result that depends on no MetaTensor has none.
    """
    if not metas:
        return results
    kind = type(metas[0])

    def theirs(leaf: Any) -> Any:
        if type(leaf) is not torch.Tensor:
            return leaf
        (found,) = kind.update_meta([leaf.as_subclass(kind)], None, metas, {})
        return found

    converted: T = pytree.tree_map(theirs, results)
    return converted
