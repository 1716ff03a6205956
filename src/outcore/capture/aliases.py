"""Which nodes of a joint graph are tensors of their own, and which are views of others."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from outcore import aten


def is_view(node: Node) -> bool:
    """Whether a call gives its first argument again, in another shape, and does no more."""
    op = node.target
    if not isinstance(op, OpOverload) or not aten.may_alias(op) or aten.mutates(op):
        return False
    base = node.args[0] if node.args else None
    if not isinstance(base, Node):
        return False
    tensors = [*leaves(base.meta.get("val")), *leaves(node.meta.get("val"))]
    if not all(isinstance(t, Tensor) for t in tensors):
        return False
    return len({t.untyped_storage()._cdata for t in tensors}) == 1


def is_call_of_op(node: Node) -> bool:
    """Whether it computes something: it is no view, and takes none of several results."""
    called = node.op == "call_function"
    return called and node.target is not operator.getitem and not is_view(node)


def op_of(node: Node) -> Node:
    """The op, or the argument of the graph, that made what `node` is, or is a view of."""
    while node.op == "call_function" and not is_call_of_op(node):
        node = node.args[0]  # type: ignore[assignment]  # such calls begin with what they view
    return node


def root_of(node: Node) -> Node:
    """The tensor that `node` is, or is a view of: of several results of an op the one."""
    root = node
    while root.op == "call_function" and not is_call_of_op(root):
        node, root = root, root.args[0]  # type: ignore[assignment]  # as above
    return node if node.target is operator.getitem and is_call_of_op(root) else root


def results(op: Node) -> list[Node]:
    """The tensors that an op makes: itself, or those of several that somebody takes."""
    if isinstance(op.meta["val"], Tensor):
        return [op]
    taken = (user for user in op.users if user.target is operator.getitem)
    return [item for item in taken if isinstance(item.meta["val"], Tensor)]


def views(op: Node) -> list[Node]:
    """All that is one of several results, or a view, of what an op makes; in order."""
    found: set[Node] = set()
    stack = [op]
    while stack:
        near = {u for u in stack.pop().users if u.op == "call_function" and not is_call_of_op(u)}
        stack += near - found
        found |= near
    return sorted(found)


def readers(node: Node) -> Iterator[Node]:
    """What reads a tensor or a view of it: ops, and the output of the graph."""
    for user in node.users:
        if user.op == "call_function" and not is_call_of_op(user):
            yield from readers(user)
        else:
            yield user


def tensor_of(node: Node) -> Tensor:
    """What a node that is one tensor is described as."""
    made = node.meta["val"]
    assert isinstance(made, Tensor)  # noqa: S101 - asked of what `fusible` has seen alone
    return made


def storage_bytes(node: Node) -> int:
    """Bytes of the memory in which its tensor lies."""
    nbytes: int = tensor_of(node).untyped_storage().nbytes()
    return nbytes


def leaves(made: Any) -> Sequence[Any]:
    """What an op makes or is given, one by one."""
    return made if isinstance(made, list | tuple) else [made]
