"""cross_entropy: make the gradient of cross-entropy block by block, over log-softmax's memory.

torch has one call that makes the gradient of log-softmax, a tensor as large as the logits with one
number per row that is not zero. A second call makes the gradient of the logits from it. Both work
row by row: in blocks of rows, only one block of the first gradient exists at a time
(docs/decisions/0033).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from outcore import aten
from outcore.capture.nodes.aliases import is_call_of_op, readers
from outcore.capture.nodes.call_memory import BYTES
from outcore.capture.nodes.registered_ops import OURS, register
from outcore.capture.rewrites.metadata_only import Sites, args_of

OF_LOSS = torch.ops.aten.nll_loss_backward.default
OF_LOG_SOFTMAX = torch.ops.aten._log_softmax_backward_data.default
_WITHIN = torch.ops.aten._log_softmax_backward_data.out
_PLAIN_VIEWS = torch.ops.aten.detach.default, torch.ops.aten.alias.default
"""Views that autograd puts around what it saves; `alias` by torch 2.14, in some of its traces."""

ROWS = 2
"""Dimensions of logits that are rows, each with the scores of all classes."""

MOST_BLOCKS = 16
"""The most blocks of rows: each costs the launches of torch's two ops."""

LEAST_BLOCK_BYTES = 1 << 20
"""Smaller logits are one block."""

LEAST_ROW_BYTES = 1 << 14
"""Bytes of a row of logits from which they count as large whatever the batch: some thousand
classes."""

ROWS_ALIKE = 16
"""Blocks begin at multiples of this many rows. So each row has the same offset from the vectors of
CUDA's kernels (16 bytes) as in the whole tensor."""


def by_rows(joint: GraphModule, sites: Sites) -> None:
    """Let gradients of cross-entropy in `joint` be made block by block. In place.

    Applies to logits that are large at any of the graph's sizes, if nothing reads log-softmax
    afterwards.
    """
    changed = False
    for node in joint.graph.find_nodes(op="call_function", target=OF_LOSS):
        last = _of_logits(node)
        if last is None or not _goes_by_rows(node, last):
            continue
        large = _has_large_rows if sites.anywhere else _has_blocks
        if sites.becomes_large(node, last.meta["val"], large):
            sites.replaced(node)
            _replace(node, last)
            changed = True
    if changed:
        joint.graph.lint()
        joint.recompile()


def _of_logits(node: Node) -> Node | None:
    """Return the call that makes the logits' gradient, if nothing else reads `node`."""
    users = list(_users(node))
    if len(users) != 1 or users[0].target is not OF_LOG_SOFTMAX:
        return None
    last = users[0]
    if node.kwargs or last.kwargs or len(args_of(node)) != len(OF_LOSS._schema.arguments):
        return None
    gradient, output, *_ = args_of(last)
    return last if _whole(gradient) is node and _whole(output) is _whole(args_of(node)[1]) else None


def _users(node: Node) -> Iterator[Node]:
    """Yield what reads a node, directly or through a plain view."""
    for user in node.users:
        if user.target in _PLAIN_VIEWS:
            yield from _users(user)
        else:
            yield user


def _whole(node: Node) -> Node:
    """Return the node that `node` is a plain view of, or `node` itself."""
    while node.target in _PLAIN_VIEWS:
        (node,) = args_of(node)
    return node


def _goes_by_rows(node: Node, last: Node) -> bool:
    """Whether dtypes agree, all is 2-D and contiguous, and log-softmax is not read afterwards."""
    _, _, dim, dtype = args_of(last)
    output = _whole(args_of(node)[1])
    made = [each.meta.get("val") for each in (output, node, last)]
    tensors = [each for each in made if isinstance(each, Tensor) and _in_order(each)]
    if not is_call_of_op(output) or len(tensors) < len(made):
        return False
    alike = {dtype} == {tensor.dtype for tensor in tensors}
    return alike and dim in (1, -1) and all(reader <= last for reader in readers(output))


def _in_order(tensor: Tensor) -> bool:
    """Whether the tensor consists of contiguous rows of known number and length."""
    known = all(isinstance(n, int) for n in (*tensor.shape, *tensor.stride()))
    rows = known and tensor.dim() == ROWS
    return rows and tensor.stride() == (max(tensor.shape[1], 1), 1)


def _has_blocks(made: Tensor) -> bool:
    """Whether there would be several blocks."""
    return _rows_at_once(made) < len(made)


def _has_large_rows(made: Tensor) -> bool:
    """Whether a row is so large that there would be several blocks if there are many rows."""
    return made.shape[1] * made.itemsize >= LEAST_ROW_BYTES


def _replace(node: Node, last: Node) -> None:
    """Replace both backward calls by outcore's op."""
    gradient, output, *rest = args_of(node)
    with last.graph.inserting_before(last):
        made = last.graph.call_function(GRADIENT, (gradient, _whole(output), *rest))
    made.meta = {**last.meta, BYTES: block_bytes(last.meta["val"])}
    last.replace_all_uses_with(made)
    unused = [last]
    while unused[-1] is not node:
        unused.append(args_of(unused[-1])[0])
    for each in unused:
        last.graph.erase_node(each)


# ---- the op -------------------------------------------------------------------------------------


def _rows_at_once(output: Tensor) -> int:
    """Rows of a block: a share of all rows, or `LEAST_BLOCK_BYTES` if that is more."""
    row_bytes = max(output.shape[1] * output.itemsize, 1)
    least = max(-(-output.shape[0] // MOST_BLOCKS), LEAST_BLOCK_BYTES // row_bytes, 1)
    return -(-least // ROWS_ALIKE) * ROWS_ALIKE


def block_bytes(output: Tensor) -> int:
    """Bytes held in addition if the result is written over `output`."""
    return min(_rows_at_once(output), len(output)) * output.shape[1] * output.itemsize


def _run(gradient: Tensor, output: Tensor, *rest: Any) -> Tensor:
    """Return the gradient of the logits in separate memory, that of log-softmax's gradient."""
    if not output.is_contiguous():
        return _described(gradient, output, *rest)
    of_loss: Tensor = OF_LOSS(gradient, output, *rest)
    _WITHIN(of_loss, output, 1, output.dtype, out=of_loss)
    return of_loss


def _run_over(
    gradient: Tensor,
    output: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    *rest: Any,
    out: Tensor,
) -> Tensor:
    """Write the gradient of the logits into `out`, which may be `output`, block by block."""
    at_once = _rows_at_once(output)
    for start in range(0, len(output), at_once):
        rows = slice(start, start + at_once)
        tangents = gradient if reduction else gradient[rows]
        of_loss = OF_LOSS(tangents, output[rows], target[rows], weight, reduction, *rest)
        _WITHIN(of_loss, output[rows], 1, output.dtype, out=out[rows])
        del of_loss  # freed before the next block is made
    return out


def _described(gradient: Tensor, output: Tensor, *rest: Any) -> Tensor:
    """Return the gradient of the logits as torch makes it, for fake tensors too."""
    of_loss = OF_LOSS(gradient, output, *rest)
    made: Tensor = OF_LOG_SOFTMAX(of_loss, output, 1, output.dtype)
    return made


def _defined() -> OpOverload:
    """Define the op, with the arguments of torch's `nll_loss_backward`, and its `out` overload."""
    name = aten.CROSS_ENTROPY.removeprefix("outcore.").removesuffix(".default")
    takes = str(OF_LOSS._schema).partition("(")[2].partition(") -> ")[0]
    takes = takes.replace("Tensor grad_output, Tensor self", "Tensor gradient, Tensor output")
    made = register(OURS, f"{name}({takes}) -> Tensor", _run, _described)
    register(OURS, f"{name}.out({takes}, *, Tensor(a!) out) -> Tensor(a!)", _run_over)
    return made


GRADIENT = _defined()
