"""Gradients of cross-entropy made some rows at a time, where log-softmax lay.

torch has a call for the gradient of log-softmax, as large as the logits and zeros but for a number
a row, and one that makes that of the logits of it. Both go by rows: of some rows at a time there is
no more of the first than of those (docs/decisions/0033).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from outcore import aten
from outcore.capture.aliases import is_call_of_op, readers
from outcore.capture.call_memory import BYTES
from outcore.capture.metadata_only import args_of

OF_LOSS = torch.ops.aten.nll_loss_backward.default
OF_LOG_SOFTMAX = torch.ops.aten._log_softmax_backward_data.default
_WITHIN = torch.ops.aten._log_softmax_backward_data.out
_PLAIN_VIEWS = torch.ops.aten.detach.default, torch.ops.aten.alias.default
"""What autograd puts around what it saves: the second by torch 2.14, in some of its traces."""

ROWS = 2
"""Sides of logits that are rows, of a class each."""

MOST_BLOCKS = 16
"""Blocks of rows that there are at most: each costs the launches of torch's two ops."""

LEAST_BLOCK_BYTES = 1 << 20
"""What is less is made at once."""

LEAST_ROW_BYTES = 1 << 14
"""Of a row of logits that count as many whatever the batch: of some thousand classes."""

ROWS_ALIKE = 16
"""Blocks begin at multiples of so many rows. So each row lies as far from where a vector of CUDA's
kernels (16 bytes) begins as it does in the whole."""


def by_rows(joint: GraphModule, *, anywhere: bool = False) -> None:
    """Let gradients of cross-entropy in `joint` be made some rows at a time. In place.

    Where the logits are large, and log-softmax is read by nothing after. `anywhere`: where a row of
    them is, however many there are.
    """
    changed = False
    for node in joint.graph.find_nodes(op="call_function", target=OF_LOSS):
        last = _of_logits(node)
        if last is None or not _goes_by_rows(node, last):
            continue
        if _large(last.meta["val"], anywhere=anywhere):
            _replace(node, last)
            changed = True
    if changed:
        joint.graph.lint()
        joint.recompile()


def _of_logits(node: Node) -> Node | None:
    """The call that makes the gradient of the logits of `node` and nothing else does."""
    users = list(_users(node))
    if len(users) != 1 or users[0].target is not OF_LOG_SOFTMAX:
        return None
    last = users[0]
    if node.kwargs or last.kwargs or len(args_of(node)) != len(OF_LOSS._schema.arguments):
        return None
    gradient, output, *_ = args_of(last)
    return last if _whole(gradient) is node and _whole(output) is _whole(args_of(node)[1]) else None


def _users(node: Node) -> Iterator[Node]:
    """What takes a node, itself or a plain view of it."""
    for user in node.users:
        if user.target in _PLAIN_VIEWS:
            yield from _users(user)
        else:
            yield user


def _whole(node: Node) -> Node:
    """What a node is, itself or a plain view of it."""
    while node.target in _PLAIN_VIEWS:
        (node,) = args_of(node)
    return node


def _goes_by_rows(node: Node, last: Node) -> bool:
    """Whether all is of one dtype and in order, and log-softmax of no more use after."""
    _, _, dim, dtype = args_of(last)
    output = _whole(args_of(node)[1])
    made = [each.meta.get("val") for each in (output, node, last)]
    tensors = [each for each in made if isinstance(each, Tensor) and _in_order(each)]
    if not is_call_of_op(output) or len(tensors) < len(made):
        return False
    alike = {dtype} == {tensor.dtype for tensor in tensors}
    return alike and dim in (1, -1) and all(reader <= last for reader in readers(output))


def _in_order(tensor: Tensor) -> bool:
    """Whether it is rows one after the other, as many and as long as is known."""
    known = all(isinstance(n, int) for n in (*tensor.shape, *tensor.stride()))
    rows = known and tensor.dim() == ROWS
    return rows and tensor.stride() == (max(tensor.shape[1], 1), 1)


def _large(made: Tensor, *, anywhere: bool) -> bool:
    """Whether it would be several blocks. `anywhere`: whatever the batch, of a vocabulary."""
    if anywhere:
        return made.shape[1] * made.itemsize >= LEAST_ROW_BYTES
    return _rows_at_once(made) < len(made)


def _replace(node: Node, last: Node) -> None:
    gradient, output, *rest = args_of(node)
    with last.graph.inserting_before(last):
        made = last.graph.call_function(GRADIENT, (gradient, _whole(output), *rest))
    made.meta = {**last.meta, BYTES: _block_bytes(last.meta["val"])}
    last.replace_all_uses_with(made)
    unused = [last]
    while unused[-1] is not node:
        unused.append(args_of(unused[-1])[0])
    for each in unused:
        last.graph.erase_node(each)


# ---- the op -------------------------------------------------------------------------------------


def _rows_at_once(output: Tensor) -> int:
    """Those of a block: of a share of all, or of so many bytes, if that is more."""
    row_bytes = max(output.shape[1] * output.itemsize, 1)
    least = max(-(-output.shape[0] // MOST_BLOCKS), LEAST_BLOCK_BYTES // row_bytes, 1)
    return -(-least // ROWS_ALIKE) * ROWS_ALIKE


def _block_bytes(output: Tensor) -> int:
    """What is held besides where the result is written over `output`."""
    return min(_rows_at_once(output), len(output)) * output.shape[1] * output.itemsize


def _run(gradient: Tensor, output: Tensor, *rest: Any) -> Tensor:
    """The gradient of the logits, in memory of its own: that of log-softmax becomes it."""
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
    """The same some rows at a time, written into `out`, which may be `output`."""
    at_once = _rows_at_once(output)
    for start in range(0, len(output), at_once):
        rows = slice(start, start + at_once)
        tangents = gradient if reduction else gradient[rows]
        of_loss = OF_LOSS(tangents, output[rows], target[rows], weight, reduction, *rest)
        _WITHIN(of_loss, output[rows], 1, output.dtype, out=out[rows])
        del of_loss  # before there is another one
    return out


def _described(gradient: Tensor, output: Tensor, *rest: Any) -> Tensor:
    """The same as torch makes it."""
    of_loss = OF_LOSS(gradient, output, *rest)
    made: Tensor = OF_LOG_SOFTMAX(of_loss, output, 1, output.dtype)
    return made


_library = torch.library.Library("outcore", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's


def _defined() -> OpOverload:
    """An op that takes what torch's takes for the gradient of log-softmax, and one that writes."""
    name = aten.CROSS_ENTROPY.removeprefix("outcore.").removesuffix(".default")
    takes = str(OF_LOSS._schema).partition("(")[2].partition(") -> ")[0]
    takes = takes.replace("Tensor grad_output, Tensor self", "Tensor gradient, Tensor output")
    for overload, schema, run in (
        (name, f"{name}({takes}) -> Tensor", _run),
        (f"{name}.out", f"{name}.out({takes}, *, Tensor(a!) out) -> Tensor(a!)", _run_over),
    ):
        _library.define(schema)  # type: ignore[no-untyped-call]  # torch's
        _library.impl(overload, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # torch's
    torch.library.register_fake(f"outcore::{name}", _described, lib=_library)
    return aten.resolve(aten.CROSS_ENTROPY)


GRADIENT = _defined()
