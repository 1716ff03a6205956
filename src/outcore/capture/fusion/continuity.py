"""continuity: tell which ops turn nearly equal inputs into nearly equal results.

What another kernel recomputes differs in its last bits, and in half precision also by rounding that
the kernel leaves out. A sum or a sigmoid of it differs as little. A comparison does not: if two
numbers were equal because one was picked out of others, it then gives another answer. The same
holds for a quotient or a square root near zero.
"""

from __future__ import annotations

from torch import Tensor, ops
from torch._ops import OpOverload
from torch.fx import Node

from outcore.capture.fusion.groups import REDUCTIONS, is_elementwise
from outcore.capture.nodes.aliases import leaves

_aten = ops.aten
SMOOTH = frozenset(
    {
        _aten._to_copy,
        _aten.abs,
        _aten.add,
        _aten.addcmul,
        _aten.atan,
        _aten.celu,
        _aten.clamp,
        _aten.clamp_max,
        _aten.clamp_min,
        _aten.clone,
        _aten.cos,
        _aten.elu,
        _aten.erf,
        _aten.erfc,
        _aten.exp,
        _aten.expm1,
        _aten.gelu,
        _aten.gelu_backward,
        _aten.hardsigmoid,
        _aten.hardtanh,
        _aten.leaky_relu,
        _aten.lerp,
        _aten.masked_fill,
        _aten.maximum,
        _aten.minimum,
        _aten.mish,
        _aten.mul,
        _aten.neg,
        _aten.relu,
        _aten.rsub,
        _aten.sigmoid,
        _aten.sigmoid_backward,
        _aten.silu,
        _aten.silu_backward,
        _aten.sin,
        _aten.softplus,
        _aten.square,
        _aten.sub,
        _aten.tanh,
        _aten.tanh_backward,
        _aten.where,
        *(op.overloadpacket for op in REDUCTIONS),
    }
)
"""Ops that are continuous in all their arguments."""

SMOOTH_IN_FIRST = frozenset(
    {
        _aten.div.Scalar,
        _aten.div.Tensor,
        _aten.threshold_backward.default,
    }
)
"""Ops that are continuous in their first argument: a numerator, or the gradient of their result."""

THRESHOLD = 2
"""Position of softplus's threshold among its arguments."""
LEAST_THRESHOLD = 20
"""The smallest threshold of softplus that counts as smooth.

Past its threshold, softplus returns its argument: with a smaller one, there is a step.
"""


def rough(op: Node) -> list[Node]:
    """Return the floating-point arguments of an op in which its result is not continuous.

    These are all of them if the op makes integers, or is an elementwise op that is not known to be
    smooth; ops of `SMOOTH_IN_FIRST` are smooth in their first argument. Any other op has none: it
    is usually a sum, a matrix product, or the derivative of one.
    """
    if not isinstance(op.target, OpOverload) or _is_smooth(op):
        return []
    if not is_elementwise(op) and not _makes_integers(op):
        return []
    first = op.target in SMOOTH_IN_FIRST
    read = (n for arg in (*op.args[first:], *op.kwargs.values()) for n in leaves(arg))
    return [n for n in dict.fromkeys(read) if isinstance(n, Node) and _is_floating(n)]


def narrows(op: Node) -> bool:
    """Whether the op rounds to a smaller floating-point dtype: more than last bits change."""
    if op.target is not _aten._to_copy.default:
        return False
    made, (source, *_) = op.meta["val"], op.all_input_nodes
    given = source.meta["val"]
    return bool(given.dtype.is_floating_point and made.dtype.itemsize < given.dtype.itemsize)


def _is_smooth(op: Node) -> bool:
    """Whether the op is continuous in all floating-point arguments, as far as is known."""
    if op.target is _aten.pow.Tensor_Scalar:  # a negative base to a fractional power is NaN
        exponent = op.args[1]
        return isinstance(exponent, int | float) and exponent >= 1 and exponent == int(exponent)
    if op.target is _aten.softplus.default and len(op.args) > THRESHOLD:
        threshold = op.args[THRESHOLD]
        return isinstance(threshold, int | float) and threshold >= LEAST_THRESHOLD
    known = isinstance(op.target, OpOverload) and op.target.overloadpacket in SMOOTH
    return known and _is_floating(op)  # a cast to integers is not smooth


def _is_floating(node: Node) -> bool:
    return any(t.dtype.is_floating_point for t in _made(node))


def _makes_integers(node: Node) -> bool:
    return any(not t.dtype.is_floating_point for t in _made(node))


def _made(node: Node) -> list[Tensor]:
    return [t for t in leaves(node.meta["val"]) if isinstance(t, Tensor)]
