"""zeros: which nodes of a joint graph are zeros if gradients of forward results are."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from outcore.capture.compiler.compat import with_effects
from outcore.capture.rewrites.metadata_only import args_of
from outcore.capture.rewrites.views import is_view

_aten = torch.ops.aten

FIRST = frozenset((
    "_fft_c2c", "_fft_c2r", "_fft_r2c", "_to_copy", "_unsafe_view", "clone", "constant_pad_nd",
    "cumsum", "diag_embed", "div", "flip", "gather", "index", "index_select", "masked_fill", "mean",
    "neg", "repeat", "reshape", "roll", "sum", "tril", "triu",
))  # fmt: skip
"""Ops that, as views do, return zeros if their first argument is zeros, whatever the others are."""

OTHER_VIEWS = ("as_strided", "indices", "values")
"""Endings of the names of views that may return more than zeros: what lies beside their argument,
or parts of a sparse tensor."""

ANY = frozenset(("bmm", "linalg_cross", "mm", "mul", "mv"))
"""Ops that return zeros if one of their first two arguments is zeros."""

ITEMS = {
    "_sparse_coo_tensor_with_dims_and_tensors": (4,),
    "add": (0, 1),
    "cat": (0,),
    "copy": (1,),
    "diagonal_scatter": (0, 1),
    "index_add": (0, 3),
    "index_fill": (0, 3),
    "index_put": (0, 2),
    "linalg_solve_triangular": (1,),
    "scatter": (0, 3),
    "scatter_add": (0, 3),
    "select_scatter": (0, 1),
    "slice_scatter": (0, 1),
    "stack": (0,),
    "sub": (0, 1),
    "where": (1, 2),
}
"""Ops that return zeros if all is zeros that they take items from -> where these arguments are."""

NAMED = ("other", "source", "src", "value")
"""Names of such arguments, which may be given by name."""

FILLED = {"constant_pad_nd": 2, "masked_fill": 2}
"""Those of `FIRST` that also return items of a number -> its position."""


def args_in(node: Node, some: Collection[Node]) -> list[Node]:
    """The arguments of `node` that are among `some`."""
    return [each for each in node.all_input_nodes if each in some]


def zeros_of(joint: GraphModule, tangents: list[Node]) -> dict[Node, int]:
    """Node -> the tangents such that it is zeros if they are missing, as a set of bits; 0: never.

    Only nodes that depend on tangents.
    """
    found = {tangent: 1 << i for i, tangent in enumerate(tangents)}
    if any(node.target is with_effects for node in joint.graph.nodes):
        return dict.fromkeys(found, 0)  # tokens that are passed along shift positions
    for node in joint.graph.nodes:
        if node.op == "call_function" and args_in(node, found):
            found[node] = _of_call(node, found)
    return found


def _of_call(node: Node, found: Mapping[Node, int]) -> int:
    """As `zeros_of`, for a call that depends on tangents."""
    op, args = node.target, args_of(node)
    if op is operator.getitem:
        return found[args[0]]
    if not isinstance(op, OpOverload) or op.namespace != "aten" or op._schema.is_mutable:
        return 0
    if any(isinstance(each, Node) for each in node.kwargs.values()):
        return 0
    _, _, name = op._schema.name.partition("::")
    return _of_backward(node, op, found) if "backward" in name else _of_linear(node, name, found)


def _of_linear(node: Node, name: str, found: Mapping[Node, int]) -> int:
    args = args_of(node)
    if _is_of_first(node, name):
        return found.get(args[0], 0)
    if name in ANY:
        return next((found[each] for each in args[:2] if found.get(each, 0)), 0)
    if name in ITEMS:
        taken = (args[i] for i in ITEMS[name] if i < len(args))
        named = (each for key, each in node.kwargs.items() if key in NAMED)
        return _of_all((*taken, *named), found)
    return 0


def _is_of_first(node: Node, name: str) -> bool:
    """Whether a call returns items of its first argument, or sums of them, or zeros."""
    if is_view(node.target):
        return not name.endswith(OTHER_VIEWS)
    beside = (*args_of(node)[FILLED[name] :], *node.kwargs.values()) if name in FILLED else ()
    return name in FIRST and all(map(_is_full_of_zeros, beside))


def _of_backward(node: Node, op: OpOverload, found: Mapping[Node, int]) -> int:
    """What the derivative of an op returns is linear in the gradients that it is given."""
    named = zip(op._schema.arguments, args_of(node), strict=False)
    gradients = [given for argument, given in named if _is_gradient(argument)]
    others = set(args_in(node, found)).difference(tree_leaves(gradients))
    return 0 if others else _of_all(gradients, found)


def _is_gradient(argument: Any) -> bool:
    return argument.name.startswith("grad") and "Tensor" in str(argument.type)


def _of_all(given: Iterable[Any], found: Mapping[Node, int]) -> int:
    """The tangents of all that is `given`; 0 if something of it may be more than zeros."""
    union = 0
    for each in tree_leaves(list(given)):
        if not _is_full_of_zeros(each):
            if not found.get(each, 0):
                return 0
            union |= found[each]
    return union


def _is_full_of_zeros(given: Any) -> bool:
    """Whether an argument is the number 0 or a tensor of zeros, or is not there."""
    if not isinstance(given, Node):
        return given is None or (isinstance(given, int | float) and given == 0)
    op, args = given.target, given.args
    if op in (_aten.zeros.default, _aten.new_zeros.default, _aten.zeros_like.default):
        return True
    if op is _aten.full.default:
        return _is_full_of_zeros(args[1])
    return op is _aten.scalar_tensor.default and _is_full_of_zeros(args[0])
