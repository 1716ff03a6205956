"""columns: the workspace of torch's own convolution on a CPU, which takes other memory than oneDNN.

For a small batch of one, torch does not call oneDNN. It writes what each result is computed from as
a column of a matrix. So a smaller input may need a much larger workspace.
"""

from __future__ import annotations

from math import prod

from outcore.estimate.shapes import Shape, Shapes, name_of
from outcore.ir.trace import Op
from outcore.ir.verify import ITEM_BYTES

MOST_NUMBERS = 20480
"""Batches of one with no more numbers than this are small. The last side of volumes is left out."""

LARGE_SIDE = 3
"""If both last sides of a kernel are longer than this, torch calls oneDNN."""

_ARGUMENTS = {
    "convolution": (None, 0, 1, 6),
    "convolution_backward": (0, 1, 2, 7),
    "convolution_input_gradient": (0, None, 3, 8),
}
"""Op -> the indices of the gradient, the source, the weight and whether it is transposed among its
arguments. None: a result."""


def columns_bytes(op: Op, shapes: Shapes) -> int:
    """The workspace of `op` if it is such a convolution, or makes gradients of one; else 0."""
    indices = _ARGUMENTS.get(name_of(op.target))
    if indices is None:
        return 0
    at_result, at_source, at_weight, at_transposed = indices
    (made, *_) = shapes.outputs(op)
    result = made if at_result is None else shapes.value(op.args[at_result])
    source = made if at_source is None else shapes.value(op.args[at_source])
    weight = shapes.shape(op.args[at_weight])
    transposed, groups = op.args[at_transposed], op.args[at_transposed + 2]
    if result is None or source is None or groups != 1 or not _is_small(source.shape, weight):
        return 0
    side = source if transposed else result
    numbers = prod(weight[1:]) * prod(side.shape[2:]) + max(map(prod, (source.shape, result.shape)))
    return numbers * ITEM_BYTES[source.dtype]


def _is_small(source: Shape, weight: Shape) -> bool:
    one_by_one, large = prod(weight[2:]) == 1, min(weight[-2:]) > LARGE_SIDE
    few = source[0] == 1 and prod(source[:4]) <= MOST_NUMBERS
    return few and len(source) == len(weight) and not (one_by_one or large)
