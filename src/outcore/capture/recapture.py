"""recapture: capture a graph again after a kernel returned something else than torch described."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Node
from torch.fx.node import map_arg

from outcore.capture.captured import Captured, Joint
from outcore.capture.compiler.layouts import VIEWS
from outcore.capture.compiler.tracing import as_kernels
from outcore.capture.graph import capture
from outcore.capture.nodes.call_memory import attribute
from outcore.capture.rewrites.metadata_only import INPUT, lay_out_again
from outcore.errors import CaptureError
from outcore.ir.trace import Value

REAL = "outcore_real"
"""Key in a node's metadata: position -> (Value, storage bytes) of results that differ from torch's
description."""


def capture_again(captured: Captured, op: int, real: Sequence[tuple[int, Value, int]]) -> Captured:
    """Capture the graph again, with results of `op` as they really are.

    `real`: position, Value and storage bytes of each result that differs. Everything made from
    these results, views included, is described anew. Other ops of the same kind are assumed to do
    likewise:

    - if only the dtype differs, they make that dtype;
    - if only dimensions of size 1 differ, they lay these out by the same rule;
    - else, they do the same if the same was expected of them.

    These assumptions are checked against kernels as before. Raises CaptureError if something cannot
    be described, and as `capture`.
    """
    joint = captured.source()
    if len(joint.nodes) != len(captured.trace.ops):
        raise CaptureError(reason="it took over a trace that was corrected for an earlier graph")
    try:
        _describe(joint, _changed(joint, joint.nodes[op], real))
    except Exception as error:  # ops may raise anything under fake tensors
        raise CaptureError(reason=f"the ops after it cannot be traced again: {error}") from error
    return capture(joint.module, joint.forward_outputs, joint.static_inputs)


def _changed(joint: Joint, node: Node, real: Sequence[tuple[int, Value, int]]) -> set[Node]:
    """Record what `node` really makes, also for ops of its kind; return the nodes that change."""
    changed = {node}
    kind = (n for n in joint.nodes if n.target is node.target and n is not node)
    alike = [n for n in kind if REAL not in n.meta]
    for position, value, nbytes in real:
        described = _results(node)[position]
        node.meta.setdefault(REAL, {})[position] = value, nbytes
        layout = _layout(described)
        another = getattr(torch, value.dtype) is not described.dtype
        dtype_alone = another and layout == (value.shape, value.stride, value.offset)
        for other in alike:
            tensor = next(iter(_results(other)[position : position + 1]), None)
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != described.dtype:
                continue
            likewise = _with_dtype(value, tensor) if dtype_alone else None
            if _layout(tensor) == layout:
                likewise = value, nbytes
            elif likewise is None and not another:
                likewise = _with_sides(value, layout, tensor)
            if likewise is None:
                continue
            other.meta.setdefault(REAL, {})[position] = likewise
            changed.add(other)
    return changed


def _layout(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())


def _with_dtype(value: Value, tensor: torch.Tensor) -> tuple[Value, int]:
    """Return `tensor` with the dtype of `value`, and the bytes of its storage then."""
    shape, stride, _ = _layout(tensor)
    items = tensor.untyped_storage().nbytes() // tensor.itemsize
    size = items * getattr(torch, value.dtype).itemsize
    return replace(value, shape=shape, stride=stride, offset=0), size


def _with_sides(
    value: Value,
    described: tuple[tuple[int, ...], tuple[int, ...], int],
    tensor: torch.Tensor,
) -> tuple[Value, int] | None:
    """Return `tensor` with its dimensions of size 1 laid out as in `value`, and its storage bytes.

    The layout follows a rule that is derived from `value`: the stride of a dimension equals that of
    another one, or that stride times that dimension's size. A network of many widths has many such
    layouts. Returns None if there is no rule, or if more than dimensions of size 1 differ. If a
    guess is wrong, the op's own kernel shows it later.
    """
    shape, stride, offset = _layout(tensor)
    ones = [d for d, n in enumerate(shape) if n == 1]
    alike = [d for d, n in enumerate(described[0]) if n == 1] == ones
    differ = [d for d, (a, b) in enumerate(zip(value.stride, described[1], strict=True)) if a != b]
    whole = (value.shape, value.offset) == (described[0], described[2])
    if not (whole and alike and len(shape) == len(value.shape) and set(differ) <= set(ones)):
        return None
    order = sorted(range(len(shape)), key=ones.__contains__)
    made = list(stride)
    for side in differ:
        rules = ((d, times) for times in (False, True) for d in order)
        found = (r for r in rules if _by(r, described[0], described[1]) == value.stride[side])
        rule = next(found, None)
        if rule is None:
            return None
        made[side] = _by(rule, shape, stride)
    real = replace(value, shape=shape, stride=tuple(made), offset=offset)
    return real, tensor.untyped_storage().nbytes()


def _by(rule: tuple[int, bool], shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    side, times = rule
    return stride[side] * (shape[side] if times else 1)


def _results(node: Node) -> Sequence[Any]:
    made = node.meta["val"]
    return made if isinstance(made, list | tuple) else [made]


def _describe(joint: Joint, changed: set[Node]) -> None:
    """Update the metadata of `changed`, and of everything made from them, to what is real."""
    mode = _mode_of(next(iter(changed)))
    with as_kernels(), mode:
        dirty = set(changed)
        for node in joint.module.graph.nodes:
            given = [*node.all_input_nodes, node.meta.get(INPUT)]
            if node.op == "call_function" and not dirty.isdisjoint(given):
                dirty.add(node)
                lay_out_again(node)
                try:
                    made = _described(joint, mode, node)
                except (RuntimeError, ValueError):
                    if node.target not in VIEWS:
                        raise
                    dirty.add(_copied_first(joint, mode, node))
                    made = _described(joint, mode, node)
                node.meta["val"] = _real(node, made)
            elif node in changed:
                node.meta["val"] = _real(node, node.meta["val"])


def _described(joint: Joint, mode: FakeTensorMode, node: Node) -> Any:
    """Return what a node makes of what is known about its arguments."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: _known(joint, mode, n))
    return node.target(*args, **kwargs)  # type: ignore[operator]  # it is a call


def _copied_first(joint: Joint, mode: FakeTensorMode, node: Node) -> Node:
    """Let a view that does not fit the real tensor view a copy instead. Returns the copy.

    In the model it was a `reshape`: torch traces a view if it assumes that one fits.
    """
    graph, whole = joint.module.graph, node.args[0]
    with graph.inserting_before(node):
        copy = graph.call_function(
            torch.ops.aten.clone.default, (whole,), {"memory_format": torch.contiguous_format}
        )
    copy.meta = {key: kept for key, kept in node.meta.items() if key not in (REAL, "val")}
    copy.meta["val"] = _described(joint, mode, copy)
    node.args = (copy, *node.args[1:])
    return copy


def _mode_of(node: Node) -> FakeTensorMode:
    made = _results(node)
    return next(t.fake_mode for t in made if isinstance(t, torch._subclasses.FakeTensor))


def _known(joint: Joint, mode: FakeTensorMode, node: Node) -> Any:
    """Return what is known of a node; constants are real tensors, turned into fake ones."""
    if node.op == "get_attr":
        return mode.from_tensor(attribute(joint.module, node), static_shapes=True)
    return node.meta.get("val")


def _real(node: Node, described: Any) -> Any:
    """Return what a node makes, with known differences. Call it in the graph's fake mode."""
    known = node.meta.get(REAL)
    if not known:
        return described
    several = isinstance(described, list | tuple)
    made = list(described) if several else [described]
    for position, (value, nbytes) in known.items():
        dtype = getattr(torch, value.dtype)
        whole = torch.empty(-(-nbytes // dtype.itemsize), dtype=dtype, device=made[position].device)
        made[position] = whole.as_strided(value.shape, value.stride, value.offset)
    return made if several else made[0]
