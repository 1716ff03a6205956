"""call_memory: count what graphs inside a call (conditions, loops) hold while they run.

The count is from torch's fake tensors. Measuring would not do: a step shows only the branch of a
condition that it took.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from torch.fx import Graph, GraphModule, Node

from outcore.capture.nodes.storages import storage_id, tensors_in

BYTES = "outcore_within_bytes"
"""Key in a node's metadata: the `working_bytes` of the call."""


def attribute(module: GraphModule, node: Node) -> Any:
    """Return the graph or constant that a `get_attr` node names; None for other nodes."""
    if node.op != "get_attr":
        return None
    try:
        return operator.attrgetter(str(node.target))(module)
    except AttributeError:
        return None


def working_bytes(graphs: Iterable[GraphModule]) -> int:
    """Peak bytes of a call that runs one of `graphs`, in addition to its arguments and results.

    Taken from the graph that holds the most. Memory that kernels allocate for themselves is not
    included.
    """
    return max(map(_beside_results, graphs), default=0)


def _beside_results(module: GraphModule) -> int:
    """Peak bytes of a graph that is run in the order of its code, less its results."""
    ends = _ends(module.graph)
    given = {s for n in module.graph.nodes if n.op != "call_function" for s, _ in _storages(n)}
    names: Counter[int] = Counter()
    """Storage -> how many live nodes lie in it."""
    held = peak = 0
    for node in module.graph.nodes:
        if node.op == "output":
            break
        for storage, nbytes in _storages(node):
            held += nbytes * (storage not in given and not names[storage])
            names[storage] += 1
        inside = (attribute(module, n) for n in node.all_input_nodes)
        deeper = working_bytes(each for each in inside if isinstance(each, GraphModule))
        peak = max(peak, held + deeper)
        for gone in ends.get(node, ()):
            for storage, nbytes in _storages(gone):
                names[storage] -= 1
                held -= nbytes * (storage not in given and not names[storage])
    return peak - held


def _ends(graph: Graph) -> dict[Node, list[Node]]:
    """Node -> the nodes whose last use it is."""
    last = {n: n for n in graph.nodes}
    last |= {n: user for user in graph.nodes for n in user.all_input_nodes}
    ends: dict[Node, list[Node]] = {}
    for node, user in last.items():
        ends.setdefault(user, []).append(node)
    return ends


def _storages(node: Node) -> Iterator[tuple[int, int]]:
    """Yield each storage of a node's results once, with its bytes."""
    made = tensors_in(node.meta.get("val"))
    storages = {storage_id(each): each.untyped_storage() for each in made}
    for key, storage in storages.items():
        nbytes = storage.nbytes()
        if isinstance(nbytes, int):
            yield key, nbytes
