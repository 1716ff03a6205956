"""order: reorder a joint graph's ops so that more of them can be fused."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.fx import GraphModule, Node

from outcore.capture.fusion.groups import fusible
from outcore.capture.nodes.aliases import is_call_of_op, op_of, readers, storage_bytes, views
from outcore.capture.nodes.phases import phases


def reorder(joint: GraphModule, forward_outputs: int) -> None:
    """Put all of forward before all of backward, and ops next to what reads them. In place.

    An elementwise op moves down to its first reader, past matrix products and the like, if the
    reader can be fused too and no more memory is held on the way. Raises CaptureError as `phases`.
    """
    output = joint.graph.output_node()
    parts = phases(joint, forward_outputs)
    for nodes in parts:
        for node in nodes:
            output.prepend(node)
    for nodes in parts:
        _sink(nodes)


def _sink(nodes: Sequence[Node]) -> None:
    """Move elementwise ops of one phase down to their first readers, as `reorder` describes."""
    barriers = {n for n in nodes if is_call_of_op(n) and not fusible(n)}
    among = set(nodes)
    near: dict[Node, Node] = {}
    """Op -> the first op after it that cannot be fused."""
    barrier: Node | None = None
    for node in reversed(nodes):
        if barrier is not None:
            near[node] = barrier
        barrier = node if node in barriers else barrier
    for node in reversed(nodes):
        if node in barriers or not is_call_of_op(node) or node not in near:
            continue
        first = min(readers(node), default=None)
        if first is None or first not in among or first in barriers or first < near[node]:
            continue
        if _is_free(node):
            for each in (node, *views(node)):
                first.prepend(each)


def _is_free(op: Node) -> bool:
    """Whether running `op` later holds no more memory: its result is at least what it frees."""
    made = op.meta["val"]
    if not isinstance(made, Tensor):
        return False
    ending = {op_of(n): n for n in op.all_input_nodes if max(readers(op_of(n))) <= op}
    return sum(map(storage_bytes, ending.values())) <= made.nbytes
