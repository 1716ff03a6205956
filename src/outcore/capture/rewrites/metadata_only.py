"""metadata_only: run ops without an input of which the kernel uses only the layout.

An op of outcore gets the input's shape and strides, and runs torch's op with a tensor that has
these but no memory. The input need not be kept until then, nor be in memory together with the op's
result (docs/decisions/0030, 0032).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from outcore.capture.compiler.compat import without_memory
from outcore.capture.nodes.registered_ops import OURS, register

LEAST_BYTES = 1 << 20
"""Calls with smaller inputs stay as they are: the replacing ones take some microseconds more."""

INPUT = "outcore_input"
"""Key in the metadata of such a call's node: the node of the input that it does without."""

_laid_out: dict[OpOverload, Callable[[Node], Tensor]] = {}
"""op -> `laid_out` of `define`."""


def define(
    schema: str,
    run: Callable[..., Tensor],
    describe: Callable[..., Tensor],
    laid_out: Callable[[Node], Tensor],
) -> OpOverload:
    """Define an op of outcore whose second and third arguments are an input's shape and strides.

    `run` computes it, `describe` does so for fake tensors. `laid_out` returns, for a node of the
    op, a tensor with the layout that the input has by now.
    """
    op = register(OURS, schema, run, describe)
    _laid_out[op] = laid_out
    return op


class LargeInputs:
    """Where calls had a large input, in each graph: at smaller sizes they are replaced, too.

    A graph then has the same ops at all sizes once it came with its largest, such as those of a
    whole batch. Plans can go from one size to another.
    """

    def __init__(self) -> None:
        self._places: dict[bytes, set[int]] = {}
        """Digest of the ops of a joint graph -> the places of such calls among them."""

    def sites(self, joint: GraphModule, *, anywhere: bool) -> Sites:
        """The calls of `joint`, as traced. `anywhere`: any input counts as large."""
        nodes = [node for node in joint.graph.nodes if isinstance(node.target, OpOverload)]
        ops = "\n".join(str(node.target) for node in nodes)
        large = self._places.setdefault(blake2b(ops.encode()).digest(), set())
        return Sites({node: place for place, node in enumerate(nodes)}, large, anywhere, [])


class Sites(NamedTuple):
    """The calls of one joint graph: node -> place, and the places where inputs are `large`."""

    places: dict[Node, int]
    large: set[int]
    anywhere: bool
    small: list[tuple[Tensor, Callable[[Tensor], bool]]]
    """What was small where calls stay as they are for that, and how to tell if it is large."""

    def is_large(self, node: Node) -> bool:
        """Whether the second argument of `node` has a known shape, and enough bytes somewhere."""
        made = args_of(node)[1].meta.get("val")
        if not isinstance(made, Tensor) or not all(isinstance(n, int) for n in made.shape):
            return False
        return self.anywhere or self.becomes_large(node, made, _is_large)

    def becomes_large(self, node: Node, made: Tensor, large: Callable[[Tensor], bool]) -> bool:
        """Whether `made` is `large`, or what `node` made or read was so at some sizes."""
        if large(made) or self.places[node] in self.large:
            return True
        self.small.append((made, large))
        return False

    def replaced(self, node: Node) -> None:
        """Note that `node` was replaced at these sizes."""
        self.large.add(self.places[node])


def _is_large(made: Tensor) -> bool:
    return made.nbytes >= LEAST_BYTES


def args_of(node: Node) -> tuple[Any, ...]:
    """The arguments of a call, typed as Any: the op's schema says what they are."""
    return node.args


def lying(tensor: Tensor) -> tuple[list[int], list[int]]:
    """The shape and strides of a tensor."""
    return list(tensor.shape), list(tensor.stride())


def lay_out_again(node: Node) -> None:
    """Update the shape and strides that a call gets for its input; skip nodes of other ops."""
    if INPUT in node.meta:
        made = _laid_out[node.target](node)  # type: ignore[index]  # it is one of those
        node.args = (node.args[0], *lying(made), *node.args[3:])


def with_memory(sides: Sequence[int], strides: Sequence[int], like: Tensor) -> Tensor:
    """Return a tensor of this shape and strides, with the dtype and device of `like`."""
    return torch.empty_strided(sides, strides, dtype=like.dtype, device=like.device)


def stand_in(
    sides: Sequence[int], strides: Sequence[int], like: Tensor, unread: Callable[[Tensor], bool]
) -> Tensor:
    """Return a tensor of this shape and strides, without memory if its contents are `unread`.

    If they are not, torch has changed to a kernel that may read them, since the graph was captured.
    Then this uses more memory than was planned for, but the result is still right.
    """
    made = without_memory(sides, strides, like)
    return made if unread(made) else with_memory(sides, strides, like)
