"""Inputs that a kernel looks at no more of than how they lie: an op of ours is told that instead.

It runs torch's op with a tensor that has sides and strides but no memory. What lay there need not
be kept until then, nor held beside what the op makes (docs/decisions/0030, 0032).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from outcore.capture.compat import without_memory

LEAST_BYTES = 1 << 20
"""Where less would be free earlier calls stay as they are: others take some microseconds more."""

INPUT = "outcore_input"
"""Of a node of such a call: which one the input was."""

_library = torch.library.Library("outcore", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's
_laid_out: dict[OpOverload, Callable[[Node], Tensor]] = {}


def define(
    schema: str,
    run: Callable[..., Tensor],
    describe: Callable[..., Tensor],
    laid_out: Callable[[Node], Tensor],
) -> OpOverload:
    """An op whose second and third arguments are the sides and strides of an input.

    `laid_out`: of a node of it, a tensor that lies as the input does by now.
    """
    name = schema.partition("(")[0]
    _library.define(schema)  # type: ignore[no-untyped-call]  # torch's
    _library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # torch's
    torch.library.register_fake(f"outcore::{name}", describe, lib=_library)
    op: OpOverload = getattr(torch.ops.outcore, name).default
    _laid_out[op] = laid_out
    return op


def worth_it(node: Node, *, anywhere: bool) -> bool:
    """Whether `node` makes a tensor of known sides, and of enough bytes; `anywhere`: of any."""
    made = node.meta.get("val")
    if not isinstance(made, Tensor) or not all(isinstance(n, int) for n in made.shape):
        return False
    return anywhere or made.nbytes >= LEAST_BYTES


def args_of(node: Node) -> tuple[Any, ...]:
    """Those of a call, as what they are: its op says."""
    return node.args


def lying(tensor: Tensor) -> tuple[list[int], list[int]]:
    """The sides and strides of a tensor."""
    return list(tensor.shape), list(tensor.stride())


def lay_out_again(node: Node) -> None:
    """Let a call say how its input lies by now. Does nothing with nodes of other ops."""
    if INPUT in node.meta:
        made = _laid_out[node.target](node)  # type: ignore[index]  # it is one of those
        node.args = (node.args[0], *lying(made), *node.args[3:])


def with_memory(sides: Sequence[int], strides: Sequence[int], like: Tensor) -> Tensor:
    """A tensor that lies so, of the dtype and on the device of `like`."""
    return torch.empty_strided(sides, strides, dtype=like.dtype, device=like.device)


def stand_in(
    sides: Sequence[int], strides: Sequence[int], like: Tensor, unread: Callable[[Tensor], bool]
) -> Tensor:
    """A tensor that lies so. It has no memory where it is `unread`.

    Else torch has come to take another kernel since the graph was captured, which may look for it:
    then this takes more memory than was planned for, and what is made is right all the same.
    """
    made = without_memory(sides, strides, like)
    return made if unread(made) else with_memory(sides, strides, like)
