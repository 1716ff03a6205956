"""conjugates: turn conjugates of plain numbers into tensors, because a number has no views."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

_aten = torch.ops.aten


def as_tensors(joint: GraphModule) -> None:
    """Replace each conjugate of a number in `joint` by a tensor with its value. In place.

    The backward of `x * 1j` has such a call: torch conjugates a tensor made from the number.
    """
    found = joint.graph.find_nodes(op="call_function", target=_aten._conj.default)
    of_numbers = [node for node in found if not isinstance(node.args[0], Node)]
    for node in of_numbers:
        number = node.args[0]
        assert isinstance(number, bool | int | float | complex)  # noqa: S101 - as in torch
        dtype = node.meta["val"].dtype
        node.target = _aten.scalar_tensor.default
        node.args, node.kwargs = (number.conjugate(),), {"dtype": dtype}
    if of_numbers:
        joint.recompile()
