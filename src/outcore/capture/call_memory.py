"""What graphs within a call hold while they run, as torch describes them.

Of a condition, no step shows more than the branch that it took.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

BYTES = "outcore_within_bytes"
"""In a node's metadata: the `working_bytes` of the call that it is."""


def attribute(module: GraphModule, node: Node) -> Any:
    """What a node names that is no call, such as a graph; None for other nodes."""
    if node.op != "get_attr":
        return None
    try:
        return operator.attrgetter(str(node.target))(module)
    except AttributeError:
        return None


def working_bytes(graphs: Iterable[GraphModule]) -> int:
    """What a call that runs one of `graphs` holds at its peak, beside what it is given and returns.

    Bytes; of the graph that holds the most. What kernels take for themselves is not in it.
    """
    return max(map(_beside_results, graphs), default=0)


def _beside_results(module: GraphModule) -> int:
    """The peak of a graph that is run as its code says, less its results. Bytes."""
    ends = _ends(module.graph)
    given = {s for n in module.graph.nodes if n.op != "call_function" for s, _ in _storages(n)}
    names: Counter[int] = Counter()
    """Per storage, the nodes alive that lie there."""
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
    """Per node, those that nobody takes after it."""
    last = {n: n for n in graph.nodes}
    last |= {n: user for user in graph.nodes for n in user.all_input_nodes}
    ends: dict[Node, list[Node]] = {}
    for node, user in last.items():
        ends.setdefault(user, []).append(node)
    return ends


def _storages(node: Node) -> Iterator[tuple[int, int]]:
    """Where the results of a node lie, each storage once, and its bytes."""
    leaves = [each for each in tree_leaves(node.meta.get("val")) if isinstance(each, Tensor)]
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in leaves}
    for key, storage in storages.items():
        nbytes = storage.nbytes()
        if isinstance(nbytes, int):
            yield key, nbytes
