"""Which ops make nearly the same of what is nearly the same.

What another kernel makes again differs in its last bits, and in half precision by what was not
rounded. A sum or a sigmoid of it differs as little. A comparison does not: of two numbers that were
equal, as one that was picked out of others is, it tells another thing; nor do a quotient or a
square root near zero.
"""

from __future__ import annotations

from torch import Tensor, ops
from torch._ops import OpOverload
from torch.fx import Node

from outcore.capture.aliases import leaves
from outcore.capture.groups import REDUCTIONS, is_elementwise

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
"""In all that they read."""

SMOOTH_IN_FIRST = frozenset(
    {
        _aten.div.Scalar,
        _aten.div.Tensor,
        _aten.threshold_backward.default,
    }
)
"""In a numerator, or the gradient of what they made."""

THRESHOLD = 2
LEAST_THRESHOLD = 20
"""Of softplus, by position. Past it the result is what it is given: with less, there is a step."""


def rough(op: Node) -> list[Node]:
    """The floating point numbers that an op reads with which its result may change by much.

    All that it reads, if it makes integers of it, or is an elementwise op of which nothing is
    known. None, if it has a kernel of its own otherwise: that is a sum, a product of matrices, or
    the derivative of one, as a rule.
    """
    if not isinstance(op.target, OpOverload) or _is_smooth(op):
        return []
    if not is_elementwise(op) and not _makes_integers(op):
        return []
    first = op.target in SMOOTH_IN_FIRST
    read = (n for arg in (*op.args[first:], *op.kwargs.values()) for n in leaves(arg))
    return [n for n in dict.fromkeys(read) if isinstance(n, Node) and _is_floating(n)]


def narrows(op: Node) -> bool:
    """Whether it rounds to a smaller floating point dtype: what is left by that is no last bit."""
    if op.target is not _aten._to_copy.default:
        return False
    made, (source, *_) = op.meta["val"], op.all_input_nodes
    given = source.meta["val"]
    return bool(given.dtype.is_floating_point and made.dtype.itemsize < given.dtype.itemsize)


def _is_smooth(op: Node) -> bool:
    if op.target is _aten.pow.Tensor_Scalar:  # below zero, fractions of powers are no numbers
        exponent = op.args[1]
        return isinstance(exponent, int | float) and exponent >= 1 and exponent == int(exponent)
    if op.target is _aten.softplus.default and len(op.args) > THRESHOLD:
        threshold = op.args[THRESHOLD]
        return isinstance(threshold, int | float) and threshold >= LEAST_THRESHOLD
    known = isinstance(op.target, OpOverload) and op.target.overloadpacket in SMOOTH
    return known and _is_floating(op)  # no cast to integers


def _is_floating(node: Node) -> bool:
    return any(t.dtype.is_floating_point for t in _made(node))


def _makes_integers(node: Node) -> bool:
    return any(not t.dtype.is_floating_point for t in _made(node))


def _made(node: Node) -> list[Tensor]:
    return [t for t in leaves(node.meta["val"]) if isinstance(t, Tensor)]
