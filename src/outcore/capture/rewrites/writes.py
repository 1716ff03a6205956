"""writes: let a write into a part of an input copy the input, not all of its storage.

A functionalized graph writes into copies. torch's kernels copy the whole storage, so a batch that
is a slice of a data set would cost as much memory as the data set, wherever the batch begins in it.
Neither is known: the storage of the next batch may be larger, and torch's compiler does not check
that. The ops that are defined here have the same results, in memory of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from outcore import aten
from outcore.capture.compiler.tracing import as_kernels
from outcore.capture.nodes.aliases import root_of
from outcore.capture.nodes.registered_ops import OURS, register
from outcore.capture.rewrites.views import describe_again, may_be_view

ANEW = "outcore_described_anew"
"""Key in the metadata of nodes whose results lie otherwise than torch described."""

_aten = torch.ops.aten
_BEYOND: Final = (_aten.as_strided.default, _aten.as_strided_scatter.default)
"""Ops that may reach memory of the storage that their argument does not cover."""
_PARTS: Final[dict[OpOverload, OpOverload]] = {
    _aten.diagonal_scatter.default: _aten.diagonal.default,
    _aten.select_scatter.default: _aten.select.int,
    _aten.slice_scatter.default: _aten.slice.Tensor,
}
"""A write -> what returns the part that it writes into."""


def of_what_is_covered(joint: GraphModule) -> None:
    """Let writes into inputs of `joint`, or into views of them, copy these alone. In place.

    Writes into what such a write returns need no change: it has a storage of its own. Writes stay
    as they are if tensors overlap themselves, or if memory beside them may be read later.
    """
    writes = [node for node in joint.graph.nodes if _is_fit(node)]
    if not writes:
        return
    anew = {each for node in writes for each in _in_its_memory(node)}
    for node in writes:
        node.target = WRITES[node.target]
    with as_kernels():
        for node in joint.graph.nodes:
            if node in anew:
                describe_again(node)
                node.meta[ANEW] = True
    joint.recompile()


def _is_fit(node: Node) -> bool:
    """Whether a node is a write into an input of which only what it covers is read later."""
    into = node.args[0] if node.target in WRITES else None
    return (
        isinstance(into, Node)
        and root_of(into).op == "placeholder"
        and _is_plain(into.meta.get("val"))
        and not any(after.target in _BEYOND for after in _in_its_memory(node))
    )


def _is_plain(into: Any) -> bool:
    """Whether each element has its own place in memory, and is read as it is there."""
    if not isinstance(into, Tensor) or into.is_conj() or into.is_neg():
        return False
    if not all(isinstance(number, int) for number in (*into.shape, *into.stride())):
        return False
    covered = 1
    for stride, side in sorted(zip(into.stride(), into.shape, strict=True)):
        if side > 1 and stride < covered:
            return not into.numel()
        covered += (side - 1) * stride
    return True


def _in_its_memory(node: Node) -> list[Node]:
    """The node, and all that view what it returns or write into that, directly or not."""
    found = [node]
    for each in found:
        found += [user for user in each.users if _lies_as(each, user)]
    return found


def _lies_as(node: Node, user: Node) -> bool:
    """Whether it follows from `node` where the results of `user` lie in their storage."""
    by_first = may_be_view(user) or str(user.target) in aten.WRITES
    return by_first and user.args[:1] == (node,)


# ---- the ops ------------------------------------------------------------------------------------


def _like(into: Tensor, *_: Any, **__: Any) -> Tensor:
    """An uninitialized tensor that lies like `into`, in a storage of what it covers."""
    return torch.empty_strided(into.shape, into.stride(), dtype=into.dtype, device=into.device)


def _writing(write: OpOverload) -> Callable[..., Tensor]:
    def run(into: Tensor, source: Tensor, *where: Any, **options: Any) -> Tensor:
        if write not in _PARTS:  # all of it is written
            return _like(into).copy_(source, *where, **options)
        made = _like(into).copy_(into)
        _PARTS[write](made, *where, **options).copy_(source)
        return made

    return run


def _defined(write: OpOverload) -> OpOverload:
    """Define an op with the name and the arguments of torch's."""
    schema = str(write._schema).removeprefix("aten::")
    return register(OURS, schema, _writing(write), _like)


WRITES = {op: _defined(op) for op in map(aten.resolve, aten.COVERED_WRITES.values())}
"""torch's op -> outcore's op."""
