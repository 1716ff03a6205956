"""fuse: replace groups of ops by one op each, with a kernel compiled by Inductor (decision 0025).

What passes between the ops of a group is never in memory. A kernel may round sums differently than
the single ops do, so gradients are no longer bitwise equal to eager's. They are the same under any
plan.
"""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from outcore import aten
from outcore.capture.compiler.compat import by_inductor, clone_preserve_strides
from outcore.capture.fusion.absorb import absorb
from outcore.capture.fusion.groups import LEAST_BYTES, Group, groups
from outcore.capture.fusion.order import reorder
from outcore.capture.nodes.aliases import tensor_of, views
from outcore.capture.nodes.phases import phases
from outcore.capture.nodes.registered_ops import NamedOps
from outcore.capture.nodes.sites import is_in_module

log = logging.getLogger("outcore")

STATISTICS = "outcore_statistics"
"""Key in a node's metadata: positions of running statistics among the arguments, and of the new
ones among the results. The arguments reach only these results."""

INTO = "outcore_into"
"""Key in a node's metadata: pairs (argument, result), by position: the result may be written over
the argument."""

MOST_NAMES = 3
"""The most op names in the name of a group."""
MOST_FAILURES = 3
"""After this many groups that Inductor cannot compile, no more are tried."""

Layout = tuple[object, ...]


def fused(
    joint: GraphModule, forward_outputs: int, least_bytes: int = LEAST_BYTES
) -> tuple[GraphModule, list[str]]:
    """Return a copy of `joint` with groups of ops fused, and reasons why some are not.

    A group that Inductor cannot compile stays as it is, with a reason. After `MOST_FAILURES` such
    groups, no more is tried. `joint` itself is returned if it writes into its arguments (then no
    reordering is known to be safe), or if the passes fail.
    """
    if any(isinstance(n.target, OpOverload) and aten.mutates(n.target) for n in joint.graph.nodes):
        return joint, []
    try:
        copied = _copied(joint)
        return copied, _fuse(copied, forward_outputs, least_bytes)
    except Exception as error:  # noqa: BLE001 - a failure to fuse must not stop training
        return joint, [f"{type(error).__name__}: {error}"]


def _copied(joint: GraphModule) -> GraphModule:
    """Return a copy of `joint`, with the output node's metadata."""
    graph = Graph()
    found: Any = graph.graph_copy(joint.graph, {}, return_output_node=True)
    returned, output = found
    graph.output(returned).meta = dict(output.meta)
    copied = GraphModule(joint, graph)
    copied.meta = dict(joint.meta)
    return copied


def _fuse(joint: GraphModule, forward_outputs: int, least_bytes: int) -> list[str]:
    """Apply the passes of decision 0025 to `joint` in place; return why some groups failed."""
    absorb(joint, forward_outputs, least_bytes)
    reorder(joint, forward_outputs)
    parts = [set(nodes) for nodes in phases(joint, forward_outputs)]
    reasons: list[str] = []
    found = groups(joint, forward_outputs, least_bytes)
    if found:
        log.info(
            "fuse: %d groups of ops; a kernel that torch has not cached takes seconds to compile",
            len(found),
        )
    for group in found:
        among = next(nodes for nodes in parts if group.ops[0] in nodes)
        kernel = _kernel(joint, group, group.into(among))
        if isinstance(kernel, str):
            reasons.append(f"{_name(group)}: {kernel}")
            if len(reasons) == MOST_FAILURES:
                break
            continue
        op = _ops.find(kernel)
        aten.WRITING_OVER[str(op)] = kernel.run_over
        among.add(_replace(joint.graph, group, op, kernel))
    joint.graph.lint()
    joint.recompile()
    return reasons


# ---- the kernel of a group ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kernel:
    """What a group does, compiled once for each combination of argument layouts."""

    module: GraphModule
    """The group's ops as a graph."""
    name: str
    """A short name (`_name`)."""
    identity: str
    """The graph's code and layouts as text, which identifies the kernel."""
    results: int
    """How many results the group has."""
    into: tuple[tuple[int, int], ...]
    """Pairs (argument, result), by position: results that are written over arguments.

    One kernel serves every plan, so that its results are bitwise the same. If a plan does not give
    an argument's memory away, the kernel gets a copy of the argument, whose memory becomes the
    result's.
    """
    compiled: dict[tuple[Layout, ...], Callable[..., Any]] = field(default_factory=dict)
    """Argument layouts -> the kernel for them."""
    function: object = None
    """Always None: the text says everything (`Nameable`)."""

    def compile(self, given: Sequence[Tensor]) -> Callable[..., Any]:
        """Return the kernel for tensors with the layouts of `given`, fake or real."""
        key = tuple(map(_layout, given))
        if key not in self.compiled:
            self.compiled[key] = by_inductor(_writing(self.module, self.into), given)
        return self.compiled[key]

    def run(self, given: list[Tensor]) -> list[Tensor]:
        """Return the group's results, in the order of `Group.escaping`."""
        return self.run_over(given, [])

    def run_over(self, given: list[Tensor], donated: list[int]) -> list[Tensor]:
        """Return the same results, which may be written over the `donated` arguments."""
        taken = list(given)
        for source, _ in self.into:
            if source not in donated:
                taken[source] = _own(taken[source])
        there = {t.untyped_storage().data_ptr() for t in taken}
        made = self._known(taken)(*taken)
        others = (_own(t) if t.untyped_storage().data_ptr() in there else t for t in made)
        written = {result: taken[source] for source, result in self.into}
        return [written[i] if i in written else next(others) for i in range(self.results)]

    def _known(self, given: Sequence[Tensor]) -> Callable[..., Any]:
        """Return the kernel for `given`, or the uncompiled ops if an unexpected layout fails."""
        try:
            return self.compile(given)
        except Exception:  # noqa: BLE001 - a compiler's failure must not end the step
            plain = self.compiled[tuple(map(_layout, given))] = _writing(self.module, self.into)
            return plain

    def describe(self, given: list[Tensor]) -> list[Tensor]:
        """Return the results for fake tensors, op by op."""
        return list(self.module(*given))


def _own(tensor: Tensor) -> Tensor:
    """Return a copy of the tensor in separate memory, with the same layout."""
    copy: Tensor = clone_preserve_strides(tensor)  # type: ignore[no-untyped-call]  # torch's
    return copy


def _layout(tensor: Tensor) -> Layout:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


_ops = NamedOps(aten.FUSED)
_kernels: dict[str, _Kernel | str] = {}
"""`_Kernel.identity` -> its kernel, or why it cannot be compiled. Entries stay for the life of the
process, as the ops do."""


def _kernel(joint: GraphModule, group: Group, into: tuple[tuple[int, int], ...]) -> _Kernel | str:
    """Return the compiled kernel of a group, or why it cannot be compiled."""
    graph, given, escaping = Graph(), group.given(), group.escaping()
    new = {n: graph.placeholder(f"given_{i}") for i, n in enumerate(given)}

    def copied(node: Node) -> Node:
        if node not in new:
            args, kwargs = map_arg((node.args, node.kwargs), copied)
            new[node] = graph.create_node("call_function", node.target, args, kwargs)
        return new[node]

    for op in group.ops:
        copied(op)
    graph.output([copied(n) for n in escaping])
    module = GraphModule(joint, graph)
    ends = [tensor_of(n) for n in (*given, *escaping)]
    layouts = [(*_layout(t), t.storage_offset()) for t in ends]
    identity = "\n".join([module.code, *map(str, (*layouts, into, torch.get_default_dtype()))])
    if identity not in _kernels:
        kernel = _Kernel(module, _name(group), identity, len(escaping), into)
        try:
            kernel.compile(ends[: len(given)])
            _kernels[identity] = kernel
        except Exception as error:  # noqa: BLE001 - a compiler may raise anything
            _kernels[identity] = f"{type(error).__name__}: {error}"
    if into and isinstance(
        _kernels[identity], str
    ):  # torch cannot compile some that write in place
        return _kernel(joint, group, ())
    return _kernels[identity]


def _writing(module: GraphModule, into: Sequence[tuple[int, int]]) -> GraphModule:
    """Return a copy of `module` that writes some results over arguments and returns the others."""
    graph = Graph()
    output: Any = graph.graph_copy(module.graph, {})
    written = {result for _, result in into}
    given = graph.find_nodes(op="placeholder")
    for source, result in into:
        graph.call_function(torch.ops.aten.copy_.default, (given[source], output[result]))
    graph.output([n for i, n in enumerate(output) if i not in written])
    return GraphModule(module, graph)


def _name(group: Group) -> str:
    """A short name for what the group does: `batch_norm_relu`."""
    packets = (str(op.target).split(".")[1] for op in group.ops)
    plain = (re.sub("^_*(native_)?|_legit|_functional|_default", "", p) for p in packets)
    names = list(dict.fromkeys(plain))
    more = ["and_more"] if len(names) > MOST_NAMES else []
    return "_".join([*names[:MOST_NAMES], *more])


# ---- in the graph -------------------------------------------------------------------------------


def _replace(graph: Graph, group: Group, op: OpOverload, kernel: _Kernel) -> Node:
    """Put the op in the place of the group's last op, and its results in place of the group's."""
    escaping, given, members = group.escaping(), group.given(), set(group.ops)
    facts = {
        "val": [tensor_of(n) for n in escaping],
        STATISTICS: group.statistics(),
        INTO: kernel.into,
    }
    after = sorted(view for each in group.ops for view in views(each))
    gone = sorted((*group.ops, *after), reverse=True)
    with graph.inserting_after(group.ops[-1]):
        made = graph.call_function(op, (given,))
    in_modules = (each for each in group.ops if is_in_module(each))
    made.meta = dict(next(in_modules, group.ops[0]).meta) | facts
    place = made
    for position, result in enumerate(escaping):
        with graph.inserting_after(place):
            item = graph.call_function(operator.getitem, (made, position))
        item.meta = dict(result.meta)
        result.replace_all_uses_with(item, lambda user: user not in members)
        place = item
    for view in after:
        place.append(view)
        place = view
    for node in gone:
        if not node.users:
            graph.erase_node(node)
    return made
