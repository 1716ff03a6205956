"""Higher-order calls as ops: a kernel in Triton, an op that writes what it is given, a condition.

torch traces them as calls that take more than tensors and numbers: kernels, other ops, graphs. Each
becomes an op of its own, which takes tensors and gives tensors, and runs as torch runs the call
without a compiler. Nothing is known of what is inside, so it runs once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_leaves

from outcore.capture.call_memory import BYTES, attribute, working_bytes
from outcore.capture.mutation import made_for, write_into
from outcore.capture.named import NamedOps
from outcore.capture.triton_kernel import NUMBERS, TritonKernel, launches, triton_kernel

NAMESPACE = "outcore"

FEW = 4096
"""Elements of a constant up to which it is known by its contents."""

CALLS = frozenset(
    {
        "associative_scan",
        "auto_functionalized",
        "auto_functionalized_v2",
        "cond",
        "map_impl",
        "scan",
        "triton_kernel_wrapper_functional",
    }
)
"""Calls whose results depend on their arguments alone, and lie in memory of their own."""


def as_ops(joint: GraphModule) -> None:
    """Let the higher-order calls of `joint` be ops, if they take and give tensors. In place.

    Others stay as they are.
    """
    changed = False
    for node in [n for n in joint.graph.nodes if _name(n) in CALLS]:
        call = _call(joint, node)  # not before: what it is given may be of one before it
        if call is not None:
            _replace(joint.graph, call)
            changed = True
    if changed:
        for node in reversed(joint.graph.find_nodes(op="get_attr")):
            if not node.users and isinstance(attribute(joint, node), GraphModule):
                joint.graph.erase_node(node)
        joint.graph.lint()
        joint.recompile()


def _name(node: Node) -> str:
    """Of the call that a node is; empty where it is another kind of node."""
    return node.target.__name__ if isinstance(node.target, HigherOrderOperator) else ""


Place: TypeAlias = int | Node | None
"""Where a result of a call is: one of its op's, a tensor that it was given, or nowhere (None)."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call, the tensors it is given, each once, an op that does the same, and its results."""

    node: Node
    given: tuple[Node, ...]
    fresh: tuple[Node, ...]
    """What is made for it to write into, which the op makes itself."""
    op: OpOverload
    places: tuple[Place, ...]
    working_bytes: int


def _call(joint: GraphModule, node: Node) -> _Call | None:
    """`node` as a call of an op; None where it takes or gives what no op does."""
    fresh = made_for(node)
    read = [m for n in node.all_input_nodes for m in (n.all_input_nodes if n in fresh else [n])]
    graphs = {n: g for n in read if isinstance(g := attribute(joint, n), GraphModule)}
    given = {n: n.meta.get("val", attribute(joint, n)) for n in read if n not in graphs}
    made = tree_leaves(node.meta.get("val"))
    tensors = [*given.values(), *(each for each in made if each is not None)]
    if not all(isinstance(each, Tensor) for each in tensors) or not _gives_items_alone(node):
        return None
    if any(map(launches, graphs.values())):
        return None  # by numbers that nobody keeps up to date in there
    places = _places(given, made)
    own = [leaf for leaf, place in enumerate(places or ()) if isinstance(place, int)]
    if places is None or not own:
        return None
    alone = _alone(joint, node, tuple(given), fresh, own)
    held = working_bytes(graphs.values())
    return _Call(node, tuple(given), fresh, _ops.find(alone), places, held)


def _places(given: dict[Node, Tensor], made: list[Any]) -> tuple[Place, ...] | None:
    """Where each result is; None where one is a view of another, or of what is given."""
    known: dict[int, tuple[Node, Tensor]] = {}
    for node, tensor in given.items():
        known.setdefault(tensor.untyped_storage()._cdata, (node, tensor))
    places: list[Place] = []
    own: set[int] = set()
    for each in made:
        storage = None if each is None else each.untyped_storage()._cdata
        if storage is None:
            places.append(None)
        elif storage not in known and storage not in own:
            places.append(len(own))
            own.add(storage)
        elif storage in known and _lie_alike(known[storage][1], each):
            places.append(known[storage][0])
        else:
            return None
    return tuple(places)


def _lie_alike(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors in one storage are the same."""
    layouts = [
        (t.dtype, t.shape, t.stride(), t.storage_offset(), t.is_conj(), t.is_neg())
        for t in (tensor, other)
    ]
    return layouts[0] == layouts[1]


# ---- the op of a call ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Alone:
    """A call as a module of its own, and what it is: by name, and in full."""

    module: GraphModule
    own: list[int]
    """Which of its results, by position, are neither None nor what it was given."""
    name: str
    told: str
    kernel: TritonKernel | None = None

    @property
    def function(self) -> object:
        """What no text tells: the kernel itself."""
        return None if self.kernel is None else self.kernel.function

    def run(self, given: list[Tensor]) -> list[Tensor]:
        """Its own results."""
        numbers = () if self.kernel is None else self.kernel.numbers()
        made = tree_leaves(self.module(*given, *numbers))
        return [made[leaf] for leaf in self.own]

    describe = run


def _alone(
    joint: GraphModule,
    node: Node,
    given: tuple[Node, ...],
    fresh: tuple[Node, ...],
    own: list[int],
) -> _Alone:
    """The call, to be given tensors alone. It makes `fresh` itself, to write into."""
    graph = Graph()
    new = {n: graph.placeholder(f"given_{i}") for i, n in enumerate(given)}
    kernel, inside = triton_kernel(node), list[Node]()
    numbers = {} if kernel is None else {name: graph.placeholder(name) for name in NUMBERS}
    for n in node.all_input_nodes:
        if n in fresh:
            new[n] = _again(graph, n, new, f"fresh_{len(new)}")
        elif n not in new:
            new[n] = graph.create_node("get_attr", str(n.target))
            inside.append(n)
    made = _again(graph, node, new, "made")
    made.kwargs = {**made.kwargs, **numbers}
    graph.output(made)
    if fresh:
        write_into(made, [new[n] for n in fresh])
    module = GraphModule(joint, graph)
    told = [module.code, str(own), *(_told(attribute(joint, n)) for n in inside)]
    if kernel is not None:
        return _Alone(module, own, kernel.name, "\n".join([*told, kernel.told]), kernel)
    wrapped = (each._opname for each in node.args if isinstance(each, OpOverload))
    return _Alone(module, own, next(wrapped, _name(node)), "\n".join(told))


def _again(graph: Graph, node: Node, new: dict[Node, Node], name: str) -> Node:
    """The same call in `graph`, of the `new` nodes there, under a name that any has there."""
    args, kwargs = map_arg((node.args, node.kwargs), new.__getitem__)
    return graph.create_node("call_function", node.target, args, kwargs, name)


def _told(module: GraphModule) -> str:
    """The text of a graph and those within, and their constants."""
    graphs = [m for m in module.modules() if isinstance(m, GraphModule)]
    held = [
        attribute(m, n)
        for m in graphs
        for n in m.graph.find_nodes(op="get_attr")
        if not isinstance(attribute(m, n), GraphModule)
    ]
    return "\n".join([*(m.code for m in graphs), *map(_told_constant, held)])


def _told_constant(held: Any) -> str:
    """Its contents where they are few; else which object it is."""
    if not isinstance(held, Tensor) or isinstance(held, FakeTensor) or held.numel() > FEW:
        return str(id(held))
    if held.layout is not torch.strided or held.is_quantized or held.is_conj() or held.is_neg():
        return str(id(held))
    layout = held.dtype, tuple(held.shape), held.stride(), held.device
    with unset_fake_temporarily():
        numbers = held.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist()
    return f"{layout} {numbers}"


_ops = NamedOps(NAMESPACE)


# ---- in the graph -------------------------------------------------------------------------------


def _replace(graph: Graph, call: _Call) -> None:
    """Put the op in the place of the call, and its results in those of the call's."""
    node = call.node
    leaves, spec = tree_flatten(node.meta["val"])
    own = [leaf for leaf, place in zip(leaves, call.places, strict=True) if isinstance(place, int)]
    with graph.inserting_before(node):
        made = graph.call_function(call.op, (list(call.given),))
        made.meta = dict(node.meta) | {"val": own, BYTES: call.working_bytes}
        for each, place in list(_results_of(node, spec.unflatten(call.places))):
            if isinstance(place, int):
                result = graph.call_function(operator.getitem, (made, place))
                result.meta = dict(each.meta)
                each.replace_all_uses_with(result)
            elif place is not None:
                each.replace_all_uses_with(place)
            else:
                _forget(each)
    for each in (*reversed(list(_with_items(node))), *call.fresh):
        graph.erase_node(each)


def _gives_items_alone(node: Node) -> bool:
    """Whether all that takes `node` takes one of its results, and so on, where it is several."""
    if not isinstance(node.meta["val"], list | tuple | dict):
        return True
    users = list(node.users)
    return all(user.target is operator.getitem and _gives_items_alone(user) for user in users)


def _with_items(node: Node) -> Iterator[Node]:
    """`node`, and what only takes one of the results that it is."""
    yield node
    for user in list(node.users):
        if user.target is operator.getitem:
            yield from _with_items(user)


def _results_of(node: Node, places: Any) -> Iterator[tuple[Node, Place]]:
    """Nodes that are one result of `node`, each with where that is."""
    if isinstance(places, list | tuple | dict):
        for user in list(node.users):
            yield from _results_of(user, places[user.args[1]])  # type: ignore[index]  # by position, or by name
    else:
        yield node, places


def _forget(node: Node) -> None:
    """Let all that takes `node`, which is None, take that."""
    for user in list(node.users):
        user.args = map_arg(user.args, lambda n: None if n is node else n)
        user.kwargs = map_arg(user.kwargs, lambda n: None if n is node else n)
