"""aliases: tell which nodes of a joint graph make tensors, and which are views of others."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from outcore import aten
from outcore.capture.nodes.storages import storage_id


def is_view(node: Node) -> bool:
    """Whether a call only returns views of its first argument, computing nothing."""
    op = node.target
    if not isinstance(op, OpOverload) or not aten.may_alias(op) or aten.mutates(op):
        return False
    base = node.args[0] if node.args else None
    if not isinstance(base, Node):
        return False
    tensors = [*leaves(base.meta.get("val")), *leaves(node.meta.get("val"))]
    if not all(isinstance(t, Tensor) for t in tensors):
        return False
    return len({storage_id(t) for t in tensors}) == 1


def is_call_of_op(node: Node) -> bool:
    """Whether the node computes something: it is no view, and selects none of several results."""
    called = node.op == "call_function"
    return called and node.target is not operator.getitem and not is_view(node)


def op_of(node: Node) -> Node:
    """Return the op (or graph argument) that made a node, or made the tensor that it views."""
    while node.op == "call_function" and not is_call_of_op(node):
        node = node.args[0]  # type: ignore[assignment]  # such calls begin with what they view
    return node


def root_of(node: Node) -> Node:
    """Return the tensor that `node` is or is a view of: the selected one if its op has several."""
    root = node
    while root.op == "call_function" and not is_call_of_op(root):
        node, root = root, root.args[0]  # type: ignore[assignment]  # as above
    return node if node.target is operator.getitem and is_call_of_op(root) else root


def results(op: Node) -> list[Node]:
    """Return the tensors that an op makes: its node, or those of several results that are used."""
    if isinstance(op.meta["val"], Tensor):
        return [op]
    taken = (user for user in op.users if user.target is operator.getitem)
    return [item for item in taken if isinstance(item.meta["val"], Tensor)]


def views(op: Node) -> list[Node]:
    """Return all nodes that select one of an op's results or view it, directly or not, in order."""
    found: set[Node] = set()
    stack = [op]
    while stack:
        near = {u for u in stack.pop().users if u.op == "call_function" and not is_call_of_op(u)}
        stack += near - found
        found |= near
    return sorted(found)


def readers(node: Node) -> Iterator[Node]:
    """Yield what reads a tensor or a view of it: ops, and the output node of the graph."""
    for user in node.users:
        if user.op == "call_function" and not is_call_of_op(user):
            yield from readers(user)
        else:
            yield user


def tensor_of(node: Node) -> Tensor:
    """Return the fake tensor that describes a node, which must be a single tensor."""
    made = node.meta["val"]
    assert isinstance(made, Tensor)  # noqa: S101 - callers pass only nodes checked by `fusible`
    return made


def storage_bytes(node: Node) -> int:
    """Bytes of the storage that holds a node's tensor."""
    nbytes: int = tensor_of(node).untyped_storage().nbytes()
    return nbytes


def leaves(made: Any) -> Sequence[Any]:
    """Return what an op returns or gets as a sequence: a list as it is, anything else in a list."""
    return made if isinstance(made, list | tuple) else [made]
