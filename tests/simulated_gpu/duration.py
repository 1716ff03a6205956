"""duration: give ops the times and workspaces of a large GPU, for runs that compute nothing."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

SLOWNESS = float(os.environ.get("SIMULATED_GPU_SLOWNESS", "1"))
"""Factor on all times. Python plays the kernels: a large factor makes its own time negligible."""
FLOP_PER_SECOND = 4e13 / SLOWNESS
BYTES_PER_SECOND = 3e12 / SLOWNESS
"""Rate of device memory."""
LEAST_SECONDS = 5e-6
WORKSPACES = (0.0, 0.0, 0.02, 0.1, 0.3, 0.6)
"""Workspaces of convolutions, as fractions of their first result; the shapes select one."""

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot"})
KEPT_BYTES = 32 << 20
"""What cuBLAS keeps for each thread and stream that matrix products run on (on an H100)."""


def seconds(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], made: Sequence[Any]
) -> float:
    """The time of one op: the larger of the times for its arithmetic and for its memory traffic."""
    moved: float = sum(
        each.nbytes for each in tree_leaves((args, kwargs, made)) if _on_device(each)
    )
    arithmetic = _flop(op, args, made) / FLOP_PER_SECOND
    return max(LEAST_SECONDS, moved / BYTES_PER_SECOND, arithmetic)


def workspace_bytes(op: torch._ops.OpOverload, args: Sequence[Any], made: Sequence[Any]) -> int:
    """Device memory that one op needs while it runs, in addition to its results."""
    results = [each for each in tree_leaves(made) if _on_device(each)]
    if not results or not op.overloadpacket.__name__.startswith("convolution"):
        return 0
    shapes = [tuple(each.shape) for each in tree_leaves((args, made)) if isinstance(each, Tensor)]
    drawn = zlib.crc32(repr((op, shapes)).encode()) % len(WORKSPACES)
    return int(WORKSPACES[drawn] * results[0].nbytes)


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cuda


def _flop(op: torch._ops.OpOverload, args: Iterable[Any], made: Sequence[Any]) -> float:
    from torch.utils.flop_counter import flop_registry  # noqa: PLC0415 - it needs all of torch

    count: Any = flop_registry.get(op.overloadpacket)
    if count is None:
        return 0.0
    result: float = count(*args, out_val=made[0] if len(made) == 1 else tuple(made))
    return result
