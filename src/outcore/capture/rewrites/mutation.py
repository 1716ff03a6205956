"""mutation: let functionalized calls that write into their arguments do so without extra copies.

torch's functionalized graphs let such a call write into copies. An argument that was made only to
be written into needs no copy: it is made inside the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from outcore.capture.compiler.compat import (
    auto_functionalized_v2,
    auto_functionalized_v2_dense,
    clone_preserve_strides,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)

_aten = torch.ops.aten
EMPTY = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)
"""Ops that make uninitialized tensors."""


def made_for(node: Node) -> tuple[Node, ...]:
    """Return the uninitialized tensors that were made only for `node` to write into."""
    leaves = tree_leaves((node.args, dict(node.kwargs)))
    return tuple(
        each
        for each in _written(node)
        if each.target in EMPTY and len(each.users) == 1 and leaves.count(each) == 1
    )


def _written(node: Node) -> list[Node]:
    """Return the arguments that a call writes into."""
    arguments: dict[str, Any] = dict(node.kwargs)
    if node.target is triton_kernel_wrapper_functional:
        return [arguments["kwargs"][name] for name in arguments["tensors_to_clone"]]
    if node.target is auto_functionalized_v2:
        return [each for each in arguments["_all_bases"] if isinstance(each, Node)]
    return []


def write_into(node: Node, fresh: Sequence[Node]) -> None:
    """Let `node` write into its arguments `fresh` themselves, and into copies of the others."""
    arguments: dict[str, Any] = dict(node.kwargs)
    if node.target is triton_kernel_wrapper_functional:
        names = [n for n in arguments["tensors_to_clone"] if arguments["kwargs"][n] in fresh]
        node.target, node.kwargs = launch, arguments | {"fresh": names}
    elif node.target is auto_functionalized_v2:
        bases = arguments["_all_bases"]
        copied = tuple(i for i, base in enumerate(bases) if base not in fresh)
        node.target = auto_functionalized_v2_dense
        node.kwargs = arguments | {"_only_clone_these_bases": copied}


def launch(
    *, kwargs: dict[str, Any], tensors_to_clone: list[str], fresh: list[str], **how: Any
) -> dict[str, Tensor]:
    """Run a Triton kernel that writes into `fresh` arguments themselves; return what it wrote."""
    copied = [name for name in tensors_to_clone if name not in fresh]
    copies = {name: clone_preserve_strides(kwargs[name]) for name in copied}  # type: ignore[no-untyped-call]  # torch's
    given = kwargs | copies
    triton_kernel_wrapper_mutation(**how, kwargs=given)
    return {name: given[name] for name in given if name in tensors_to_clone}
