"""effect_tokens: unwrap ops with an effect from the calls that pass torch's tokens along.

torch keeps such ops in order by a token that each passes on to the next.
"""

from __future__ import annotations

import operator
from typing import Any

from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from outcore.capture.compiler.compat import with_effects


def without_tokens(joint: GraphModule) -> GraphModule:
    """Return a copy of `joint` that calls these ops directly; `joint` itself if there are none.

    The copy is only for a Trace, whose ops all run in order: in it, an op that only has an effect
    has no users.
    """
    if not any(map(_is_within, joint.graph.nodes)):
        return joint
    graph = Graph()
    results: Any = graph.graph_copy(joint.graph, {})
    output = joint.graph.output_node()
    graph.output(results).meta = dict(output.meta)
    for node in [n for n in graph.nodes if _is_within(n)]:
        _unwrap(graph, node)
    graph.lint()
    return GraphModule(joint, graph)


def _is_within(node: Node) -> bool:
    return node.target is with_effects and isinstance(node.args[1], OpOverload)


def _unwrap(graph: Graph, node: Node) -> None:
    """Replace a call that passes a token along by the op inside; users get the earlier token."""
    token, op, *args = node.args
    assert isinstance(token, Node)  # noqa: S101 - torch's calling convention
    assert isinstance(op, OpOverload)  # noqa: S101 - `_is_within` checked it
    _, *described = node.meta["val"]
    several = len(op._schema.returns) > 1
    with graph.inserting_before(node):
        made = graph.call_function(op, tuple(args), node.kwargs)
        made.meta = dict(node.meta)
        made.meta["val"] = tuple(described) if several else next(iter(described), None)
        for user in list(node.users):
            position: Any = user.args[1]
            result = token if position == 0 else made
            if position and several:
                result = graph.call_function(operator.getitem, (made, position - 1))
                result.meta = dict(user.meta)
            user.replace_all_uses_with(result)
            graph.erase_node(user)
    graph.erase_node(node)
