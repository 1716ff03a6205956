"""winograd: convolutions with less arithmetic and a workspace, as alternatives of ops.

Minimal filtering F(m x m, r x r) computes m x m results of one map from a tile of inputs of side
m + r - 1. It needs one multiplication per element of the tile, instead of m * m * r * r (Lavin and
Gray, arXiv 1509.09308, section 4). This models that family in its basic form, in which all tiles
are written to memory and read back. It does not describe what cuDNN does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from outcore.estimate.roofline import Roofline
from outcore.estimate.shapes import Shapes, name_of
from outcore.ir.profile import Cost
from outcore.ir.trace import Arg, Op, Value
from outcore.ir.verify import ITEM_BYTES

TILE_SIDE = 6
RESULTS_SIDE = {3: 4, 5: 2}
"""r -> m: the kernel sizes for which a tile has side `TILE_SIDE`."""
GRADIENTS = {"convolution_backward": 4, "convolution_input_gradient": 5}
"""Ops that compute gradients of convolutions -> the index of the strides among their arguments."""
DTYPES = frozenset({"float32", "float16"})


@dataclass(frozen=True, slots=True)
class _Pass:
    """One convolution: forward, or for the gradient of the input, or of the weight.

    All three multiply two of the tiled input, weight and result, and make the third. `made`: its
    elements for one place in the tile.
    """

    tiles: int
    weight: Value
    operands: tuple[Value, Value]
    result: Value
    made: int


def winograd(op: Op, shapes: Shapes, machine: Roofline) -> Cost | None:
    """The cost of `op` by this algorithm; None if it does not apply to the op.

    It applies to 2D convolutions in float32 and float16, with kernels of 3 x 3 or 5 x 5, stride and
    dilation 1 and one group; and to their backward ops. There are three phases, each with its
    launch and at the roofline. First the two operands are read and written as tiles. Then,
    for each of the 36 places in a tile, two matrices are multiplied. Last, the tiles of the result
    are read, and the result is written. Gradients are computed one after the other, in the same
    workspace.
    """
    costs = [_cost(op, one, shapes, machine) for one in _passes(op, shapes)]
    if not costs:
        return None
    return Cost(sum(cost.seconds for cost in costs), max(cost.workspace_bytes for cost in costs))


def _cost(op: Op, one: _Pass, shapes: Shapes, machine: Roofline) -> Cost:
    maps, channels = one.weight.shape[:2]
    place_bytes = TILE_SIDE**2 * ITEM_BYTES[one.weight.dtype]
    tiled = place_bytes * (one.tiles * channels + one.tiles * maps + maps * channels)
    made = place_bytes * one.made
    memory, compute = machine.memory_rate(), machine.compute_rate(op, shapes)
    count = 2.0 * TILE_SIDE**2 * one.tiles * channels * maps
    to_tiles = (sum(map(shapes.nbytes, one.operands)) + tiled - made) / memory
    products = max(count / compute, tiled / memory)
    from_tiles = (made + shapes.nbytes(one.result)) / memory
    launches = 3 * machine.hardware.op_overhead_seconds
    return Cost(to_tiles + products + from_tiles + launches, tiled)


def _passes(op: Op, shapes: Shapes) -> list[_Pass]:
    """The convolutions that `op` consists of; none if the algorithm does not apply."""
    name, outputs = name_of(op.target), shapes.outputs(op)
    if name == "convolution":
        x, w = (shapes.value(arg) for arg in op.args[:2])
        (y,) = (value for value in outputs if value is not None)
        if not _fits(w, op.args[3], op.args[5], op.args[6], op.args[8]):
            return []
        return [_Pass(_tiles(y, w), w, (x, w), y, _tiles(y, w) * w.shape[0])]
    return list(_backward_passes(op, shapes)) if name in GRADIENTS else []


def _backward_passes(op: Op, shapes: Shapes) -> Iterator[_Pass]:
    """The convolutions for the gradient of the input and for the gradient of the weight."""
    at = GRADIENTS[name_of(op.target)]
    gradient, w = shapes.value(op.args[0]), shapes.value(op.args[at - 2])
    of_input, of_weight = (*shapes.outputs(op), None)[:2]
    if not _fits(w, op.args[at], op.args[at + 2], op.args[at + 3], op.args[at + 5]):
        return
    if of_input is not None:
        tiles = _tiles(of_input, w)
        yield _Pass(tiles, w, (gradient, w), of_input, tiles * w.shape[1])
    if of_weight is not None:
        read = gradient, shapes.value(op.args[1])
        yield _Pass(_tiles(gradient, w), w, read, of_weight, w.shape[0] * w.shape[1])


def _fits(weight: Value, stride: Arg, dilation: Arg, transposed: Arg, groups: Arg) -> bool:
    sides = weight.shape[2:]
    known = sides in {(side, side) for side in RESULTS_SIDE}
    plain = _ones(stride) and _ones(dilation) and not transposed and groups == 1
    return known and plain and weight.dtype in DTYPES


def _ones(steps: Arg) -> bool:
    return isinstance(steps, tuple) and all(step == 1 for step in steps)


def _tiles(maps: Value, weight: Value) -> int:
    """Tiles of m x m that cover all `maps`; those at the edges count as whole."""
    samples, _, height, width = maps.shape
    side = RESULTS_SIDE[weight.shape[2]]
    return samples * ceil(height / side) * ceil(width / side)
