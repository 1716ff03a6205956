"""arithmetic: count the floating-point operations of an op from its shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TypeAlias

from outcore.estimate.shapes import Shape, Shapes, name_of
from outcore.ir.trace import Arg, Op

Formula: TypeAlias = Callable[[Op, Shapes], float]


def flops_of(op: Op, shapes: Shapes) -> float:
    """Floating-point operations of `op`. A multiplication and an addition count as two.

    Only convolutions, matrix products and attention are counted; all other ops have 0.
    """
    name = name_of(op.target)
    if "scaled_dot_product" in name:
        return _attention(op, shapes)
    formula = _FORMULAS.get(name)
    return 0.0 if formula is None else formula(op, shapes)


def _convolution(op: Op, shapes: Shapes) -> float:
    source, weight = op.args[0], op.args[1]
    (result,) = (value for value in shapes.outputs(op) if value is not None)
    return _convolution_flops(shapes.shape(source), shapes.shape(weight), result.shape, op.args[6])


def _convolution_backward(op: Op, shapes: Shapes) -> float:
    gradient, source, weight = (shapes.shape(arg) for arg in op.args[:3])
    once = _convolution_flops(source, weight, gradient, op.args[7])
    return once * sum(value is not None for value in shapes.outputs(op)[:2])


def _convolution_input_gradient(op: Op, shapes: Shapes) -> float:
    gradient, weight = (shapes.shape(op.args[i]) for i in (0, 3))
    (made,) = (value for value in shapes.outputs(op) if value is not None)
    return _convolution_flops(made.shape, weight, gradient, op.args[8])


def _convolution_flops(source: Shape, weight: Shape, result: Shape, transposed: Arg) -> float:
    """Each element of the smaller side's map meets each weight of one channel of the other side."""
    spread = source if transposed else result
    return 2.0 * prod(spread) * prod(weight[1:])


def _mm(op: Op, shapes: Shapes) -> float:
    return _product(shapes.shape(op.args[0]), shapes.shape(op.args[1]))


def _addmm(op: Op, shapes: Shapes) -> float:
    return _product(shapes.shape(op.args[1]), shapes.shape(op.args[2]))


def _product(one: Sequence[int], other: Sequence[int]) -> float:
    return 2.0 * prod(one) * other[-1]


def _attention(op: Op, shapes: Shapes) -> float:
    """Two products of (..., s, d) with (..., t, d); backward has five, one of them recomputed."""
    backward = "backward" in op.target
    query, key = (shapes.shape(arg) for arg in op.args[backward : backward + 2])
    products = 5 if backward else 2
    return products * 2.0 * prod(query) * key[-2]


_FORMULAS: dict[str, Formula] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "convolution_input_gradient": _convolution_input_gradient,
    "mm": _mm,
    "bmm": _mm,
    "addmm": _addmm,
    "baddbmm": _addmm,
}
