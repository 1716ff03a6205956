"""A graph captured again, once a kernel turned out to do otherwise than torch describes it."""

from __future__ import annotations

from itertools import dropwhile
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Node
from torch.fx.node import map_arg

from outcore.capture.graph import Captured, Joint, capture
from outcore.capture.layouts import kernel_layouts
from outcore.errors import CaptureError
from outcore.ir.trace import Value

REAL = "outcore_real"
"""In a node's metadata: by position, the results that are not as torch describes them."""


def capture_again(captured: Captured, op: int, position: int, real: Value, nbytes: int) -> Captured:
    """The graph with result `position` of `op` laid out as `real`, in a storage of `nbytes`.

    All that is made from it is described anew, views of it too. Raises CaptureError where that
    cannot be, and as `capture`.
    """
    joint = captured.joint
    if joint is None:
        raise CaptureError(reason="its graph is gone")
    node = joint.nodes[op]
    node.meta.setdefault(REAL, {})[position] = real, nbytes
    try:
        _describe(joint, node)
    except (RuntimeError, TypeError, ValueError) as error:
        raise CaptureError(reason=f"what follows cannot be described: {error}") from error
    return capture(joint.module, joint.forward_outputs, joint.static_inputs)


def _describe(joint: Joint, changed: Node) -> None:
    """Let the metadata of `changed`, and of all that comes from it, say what is real."""
    mode = _mode_of(changed)
    with kernel_layouts(), mode:
        changed.meta["val"] = _real(changed, changed.meta["val"])
        dirty = {changed}
        later = dropwhile(lambda node: node is not changed, joint.module.graph.nodes)
        for node in later:
            if node.op == "call_function" and not dirty.isdisjoint(node.all_input_nodes):
                dirty.add(node)
                args, kwargs = map_arg((node.args, node.kwargs), lambda n: _known(joint, mode, n))
                node.meta["val"] = _real(node, node.target(*args, **kwargs))


def _mode_of(node: Node) -> FakeTensorMode:
    found = node.meta["val"]
    tensors = found if isinstance(found, list | tuple) else [found]
    return next(t.fake_mode for t in tensors if isinstance(t, torch._subclasses.FakeTensor))


def _known(joint: Joint, mode: FakeTensorMode, node: Node) -> Any:
    """What is known of a node; constants are real."""
    if node.op == "get_attr":
        return mode.from_tensor(getattr(joint.module, str(node.target)))
    return node.meta.get("val")


def _real(node: Node, described: Any) -> Any:
    """What a node makes, with what is known to be otherwise. Under the graph's fake mode."""
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
