"""How long ops take where nothing is computed: by arithmetic and memory, at a large GPU's rates."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

SLOWNESS = float(os.environ.get("SIMULATED_GPU_SLOWNESS", "1"))
"""How much longer all takes: Python plays the kernels, and should not be what is measured."""
FLOP_PER_SECOND = 4e13 / SLOWNESS
BYTES_PER_SECOND = 3e12 / SLOWNESS
"""Of device memory."""
LEAST_SECONDS = 5e-6


def seconds(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], made: Sequence[Any]
) -> float:
    """For one op: the larger of its arithmetic and of what it reads and writes."""
    moved: float = sum(
        each.nbytes for each in tree_leaves((args, kwargs, made)) if _on_device(each)
    )
    arithmetic = _flop(op, args, made) / FLOP_PER_SECOND
    return max(LEAST_SECONDS, moved / BYTES_PER_SECOND, arithmetic)


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cuda


def _flop(op: torch._ops.OpOverload, args: Iterable[Any], made: Sequence[Any]) -> float:
    from torch.utils.flop_counter import flop_registry  # noqa: PLC0415 - it needs all of torch

    count: Any = flop_registry.get(op.overloadpacket)
    if count is None:
        return 0.0
    result: float = count(*args, out_val=made[0] if len(made) == 1 else tuple(made))
    return result
