"""opaque: turn higher-order calls (Triton kernels, ops that write, conditions) into ordinary ops.

torch traces them as calls that take more than tensors and numbers: kernels, other ops, graphs. Each
becomes an op that takes tensors and returns tensors, and runs the call as torch does without a
compiler. outcore does not know what is inside, so the op runs once.
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

from outcore.capture.nodes.call_memory import BYTES, attribute, working_bytes
from outcore.capture.nodes.registered_ops import NamedOps
from outcore.capture.nodes.storages import storage_id
from outcore.capture.rewrites.mutation import made_for, write_into
from outcore.capture.rewrites.triton_kernel import NUMBERS, TritonKernel, launches, triton_kernel

NAMESPACE = "outcore"

FEW = 4096
"""The most elements of a constant that is identified by its contents."""

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
"""Calls whose results depend only on their arguments and lie in new memory."""


def as_ops(joint: GraphModule) -> None:
    """Turn higher-order calls of `joint` into ops if they take and return tensors. In place.

    Other calls stay as they are.
    """
    changed = False
    for node in [n for n in joint.graph.nodes if _name(n) in CALLS]:
        call = _call(joint, node)  # only now: its arguments may come from a call just replaced
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
    """The name of the higher-order call that a node is; empty for other nodes."""
    return node.target.__name__ if isinstance(node.target, HigherOrderOperator) else ""


Place: TypeAlias = int | Node | None
"""Where a result of a call comes from: an index into its op's results, an argument, or nowhere
(None)."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A higher-order call, and the op that replaces it."""

    node: Node
    """The call's node in the joint graph."""
    given: tuple[Node, ...]
    """The tensors that the op gets, each once."""
    fresh: tuple[Node, ...]
    """Uninitialized tensors made for the call to write into; the op makes them itself."""
    op: OpOverload
    """The op that does the same."""
    places: tuple[Place, ...]
    """Where each result of the call comes from."""
    working_bytes: int
    """Bytes that graphs inside the call hold at least while it runs."""


def _call(joint: GraphModule, node: Node) -> _Call | None:
    """Return `node` as a call of an op; None if it takes or returns what an op cannot."""
    fresh = made_for(node)
    read = [m for n in node.all_input_nodes for m in (n.all_input_nodes if n in fresh else [n])]
    graphs = {n: g for n in read if isinstance(g := attribute(joint, n), GraphModule)}
    given = {n: n.meta.get("val", attribute(joint, n)) for n in read if n not in graphs}
    made = tree_leaves(node.meta.get("val"))
    tensors = [*given.values(), *(each for each in made if each is not None)]
    if not all(isinstance(each, Tensor) for each in tensors) or not _gives_items_alone(node):
        return None
    if any(map(launches, graphs.values())):
        return None  # they name kernels by table indices, which are not updated inside graphs
    places = _places(given, made)
    own = [leaf for leaf, place in enumerate(places or ()) if isinstance(place, int)]
    if places is None or not own:
        return None
    alone = _alone(joint, node, tuple(given), fresh, own)
    held = working_bytes(graphs.values())
    return _Call(node, tuple(given), fresh, _ops.find(alone), places, held)


def _places(given: dict[Node, Tensor], made: list[Any]) -> tuple[Place, ...] | None:
    """Where each result comes from; None if one is a view of another or of an argument."""
    known: dict[int, tuple[Node, Tensor]] = {}
    for node, tensor in given.items():
        known.setdefault(storage_id(tensor), (node, tensor))
    places: list[Place] = []
    own: set[int] = set()
    for each in made:
        storage = None if each is None else storage_id(each)
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
    """Whether two tensors in one storage are the same view of it."""
    layouts = [
        (t.dtype, t.shape, t.stride(), t.storage_offset(), t.is_conj(), t.is_neg())
        for t in (tensor, other)
    ]
    return layouts[0] == layouts[1]


# ---- the op of a call ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Alone:
    """A higher-order call alone in a module, with what identifies it (`Nameable`)."""

    module: GraphModule
    """The call as a module."""
    own: list[int]
    """Positions of results that are neither None nor an argument."""
    name: str
    """A short name."""
    identity: str
    """All that the call does, as text."""
    kernel: TritonKernel | None = None
    """The Triton kernel that the call launches; None if it launches none."""

    @property
    def function(self) -> object:
        """What the text does not express: the kernel function itself."""
        return None if self.kernel is None else self.kernel.function

    def run(self, given: list[Tensor]) -> list[Tensor]:
        """Return the op's results: those at `own`."""
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
    """Return the call alone, as a module that takes only tensors and makes `fresh` itself."""
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
    identity = [module.code, str(own), *(_told(attribute(joint, n)) for n in inside)]
    if kernel is not None:
        return _Alone(module, own, kernel.name, "\n".join([*identity, kernel.identity]), kernel)
    wrapped = (each._opname for each in node.args if isinstance(each, OpOverload))
    return _Alone(module, own, next(wrapped, _name(node)), "\n".join(identity))


def _again(graph: Graph, node: Node, new: dict[Node, Node], name: str) -> Node:
    """Copy a call into `graph`, with arguments from `new`, under a fixed `name`.

    Names are part of the code that identifies the op.
    """
    args, kwargs = map_arg((node.args, node.kwargs), new.__getitem__)
    return graph.create_node("call_function", node.target, args, kwargs, name)


def _told(module: GraphModule) -> str:
    """The code of a graph and of the graphs inside it, and their constants, as text."""
    graphs = [m for m in module.modules() if isinstance(m, GraphModule)]
    held = [
        attribute(m, n)
        for m in graphs
        for n in m.graph.find_nodes(op="get_attr")
        if not isinstance(attribute(m, n), GraphModule)
    ]
    return "\n".join([*(m.code for m in graphs), *map(_told_constant, held)])


def _told_constant(held: Any) -> str:
    """A constant's contents if it has few elements; else the id of the object."""
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
    """Replace the call by its op, and the call's results by the op's."""
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
    """Whether a node that is several results is only used by selecting one, at every level."""
    if not isinstance(node.meta["val"], list | tuple | dict):
        return True
    users = list(node.users)
    return all(user.target is operator.getitem and _gives_items_alone(user) for user in users)


def _with_items(node: Node) -> Iterator[Node]:
    """Yield `node`, and the nodes that select a result from it, at every level."""
    yield node
    for user in list(node.users):
        if user.target is operator.getitem:
            yield from _with_items(user)


def _results_of(node: Node, places: Any) -> Iterator[tuple[Node, Place]]:
    """Yield the nodes that are one result of `node`, each with its place."""
    if isinstance(places, list | tuple | dict):
        for user in list(node.users):
            yield from _results_of(user, places[user.args[1]])  # type: ignore[index]  # by position, or by name
    else:
        yield node, places


def _forget(node: Node) -> None:
    """Replace `node`, which is None, by None in all nodes that use it."""
    for user in list(node.users):
        user.args = map_arg(user.args, lambda n: None if n is node else n)
        user.kwargs = map_arg(user.kwargs, lambda n: None if n is node else n)
