"""graph: turn AOTAutograd's joint forward and backward graph into a Trace.

This is where storages are resolved. If a node's result shares the storage of an argument, it
becomes a Value on that argument's buffer. Every other tensor gets a new buffer. Buffers and values
are identified by their place in the graph, never by an address.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from outcore import aten
from outcore.capture.captured import Captured, Joint
from outcore.capture.compiler.compat import mutated_inputs
from outcore.capture.fusion.fuse import INTO, STATISTICS
from outcore.capture.memory import Memory, OutsideError, fits_over
from outcore.capture.nodes.call_memory import BYTES, attribute
from outcore.capture.nodes.phases import arguments, phases
from outcore.capture.nodes.sites import site
from outcore.capture.nodes.storages import parts_of_storages, storage_id
from outcore.capture.sizes.described import SizedFloat, SizedInt
from outcore.errors import CaptureError
from outcore.ir.trace import (
    Arg,
    Donation,
    Effect,
    Op,
    Phase,
    Ref,
    Role,
    Symbol,
    Trace,
    refs,
)

FIXED = 3
"""Position of the offset among the arguments of `as_strided`."""

_NUMBERS = (bool, int, float)
"""Types that an op may return in addition to tensors: on CUDA, attention returns lengths. Such a
result becomes None in the trace."""


def capture(
    joint: GraphModule, forward_outputs: int, static_inputs: Iterable[int] = ()
) -> Captured:
    """Return the Trace of a joint forward and backward graph.

    `forward_outputs` is how many of the graph's outputs the forward call returns. `static_inputs`
    are the positions of inputs that persist from step to step (parameters and module buffers).

    Raises CaptureError if the graph holds what a Trace cannot express: sizes and other values read
    on the host, higher-order ops, tensor subclasses, in-place ops, or several devices (except
    scalars on the host, which ops of any device accept).
    """
    static, parts = frozenset(static_inputs), parts_of_storages(joint)
    while True:
        try:
            return _Capture(joint, forward_outputs, static, parts).run()
        except OutsideError as error:  # then its inputs count as all of that storage
            parts = {n: p for n, p in parts.items() if storage_id(_fake(n)) != error.storage}


class _Capture:
    """Walks a joint graph once and collects the parts of its Trace."""

    def __init__(
        self,
        joint: GraphModule,
        forward_outputs: int,
        static: frozenset[int],
        parts: Mapping[Node, range],
    ) -> None:
        self.joint, self.forward_outputs, self.static = joint, forward_outputs, static
        self.parts = parts
        """Inputs that share a storage -> the bytes of it that the input's buffer stands for."""
        self.memory = Memory()
        self.ops: list[Op] = []
        self.nodes: list[Node] = []
        """The node of each op, by op id."""
        self.donations: list[Donation] = []
        self.results: dict[Node, Any] = {}
        """Node -> Value id, None, or a list of these."""
        self.constants: list[torch.Tensor] = []
        self.unstable: set[int] = set()
        """Ids of buffers that are overwritten between the forward and the backward call."""
        self.renewed: dict[int, int] = {}
        """Buffers of new running statistics that a rerun would make of overwritten ones -> the op.
        The rest of what that op makes does not depend on them."""
        self.fixed: set[int] = set()
        """Ids of buffers with views from fixed places."""
        self.read: set[int] = set()
        """Ids of buffers that results depend on which are not new running statistics."""

    def run(self) -> Captured:
        primals, tangents = arguments(self.joint)
        output = self.joint.graph.output_node()
        results = output.args[0]
        assert isinstance(results, list | tuple)  # noqa: S101 - an output node holds a sequence
        gradients = results[self.forward_outputs :]
        for index, node in enumerate(primals):
            trained = index < len(gradients) and gradients[index] is not None
            self._input(node, self._role(index, trained=trained), node.name)
        overwritten = frozenset(mutated_inputs(output, primals))
        self.unstable = {self._buffer(primals[i]) for i in overwritten}
        attributes = self.joint.graph.find_nodes(op="get_attr")
        # A graph is not a constant: it belongs to the call that gets it.
        graphs = [n for n in attributes if isinstance(attribute(self.joint, n), GraphModule)]
        constants = [node for node in attributes if node not in graphs]
        for node in constants:
            self._constant(node)
        for node in tangents:
            self._input(node, Role.GRAD, node.name)
        forward, backward = phases(self.joint, self.forward_outputs)
        for node in forward:
            self._node(node, Phase.FORWARD)
        boundary = len(self.ops)
        for node in backward:
            self._node(node, Phase.BACKWARD)
        self._refuse_reruns(results[: self.forward_outputs])
        device = self.memory.device()
        trace = Trace(
            buffers=tuple(self.memory.buffers),
            values=tuple(self.memory.values),
            ops=tuple(self.ops),
            boundary=boundary,
            inputs=tuple(self.results[n] for n in (*primals, *constants)),
            outputs=tuple(self._arg(r) for r in results[: self.forward_outputs]),
            tangents=tuple(self.results[n] for n in tangents),
            gradients=tuple(self._arg(r) for r in results[self.forward_outputs :]),
            donations=tuple(d for d in self.donations if self._near(d)),
        )
        nodes = tuple(self.nodes)
        joint = Joint(self.joint, self.forward_outputs, self.static, nodes, self.results)
        within = {op: n.meta[BYTES] for op, n in enumerate(self.nodes) if n.meta.get(BYTES)}
        values = [self.memory.values[v] for v in trace.inputs]
        turned = tuple(i for i, value in enumerate(values) if value.conj or value.neg)
        held = tuple(self.constants)
        placed = enumerate(values[: len(primals)])
        fixed = tuple((i, v.offset) for i, v in placed if v.buffer in self.fixed)
        return Captured(trace, held, overwritten, turned, device, lambda: joint, fixed, within)

    def _near(self, donation: Donation) -> bool:
        """Whether the donated memory is device memory."""
        return not any(map(self.memory.on_host, (donation.source, donation.target)))

    # ---- inputs ---------------------------------------------------------------------------------

    def _role(self, index: int, *, trained: bool) -> Role:
        """Return the role of an input: parameters and module buffers are static."""
        if index not in self.static:
            return Role.INPUT
        return Role.PARAM if trained else Role.STATE

    def _input(self, node: Node, role: Role, name: str) -> None:
        """Record an input.

        If it is read as a conjugate or a negative, it becomes a view of what is in memory.
        """
        tensor = _fake(node)
        lying = torch._conj(tensor) if tensor.is_conj() else tensor
        lying = torch._neg_view(lying) if lying.is_neg() else lying
        buffer = self.memory.buffer(lying, role, name, borrowed=True, part=self.parts.get(node))
        self.memory.value(buffer, lying)
        self.results[node] = self.memory.value(buffer, tensor)

    def _constant(self, node: Node) -> None:
        tensor = attribute(self.joint, node)
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError(reason=f"attribute {node.target} is not a tensor", site=site(node))
        self.constants.append(tensor)
        buffer = self.memory.buffer(tensor, Role.STATE, node.name, borrowed=True)
        self.results[node] = self.memory.value(buffer, tensor)

    def _of(self, ref: Ref) -> int:
        return self.memory.buffer_of(ref.value)

    def _buffer(self, node: Node) -> int:
        return self.memory.buffer_of(self.results[node])

    # ---- nodes ----------------------------------------------------------------------------------

    def _node(self, node: Node, phase: Phase) -> None:
        """Record `node` as what it is: a selected result, a wait, a view or an op."""
        if node.target is operator.getitem:
            source, index = node.args
            self.results[node] = self.results[source][index]  # type: ignore[index]  # a list
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            inside = next(
                (f" ({a})" for a in node.args if isinstance(a, torch._ops.OpOverload)), ""
            )
            reason = f"op {node.target}{inside} is not an ATen op"
            raise CaptureError(reason=reason, site=site(node))
        if aten.is_wait(node.target):
            self._wait(node)
            return
        if aten.mutates(node.target):
            raise CaptureError(reason=f"in-place op {node.target}", site=site(node))
        self._check_fixed(node)
        if aten.may_alias(node.target) and self._view(node):
            return
        self._op(node, node.target, phase)

    def _check_fixed(self, node: Node) -> None:
        """Note a view of an input from a fixed place of its storage (`Captured.fixed`).

        Raises CaptureError if the input is not all of its storage, or is a tangent: the next one
        may begin elsewhere then, and torch's compiler does not check that. If inputs overlap and
        one is overwritten, AOTAutograd passes all of their storage instead.
        """
        if node.target is not torch.ops.aten.as_strided.default:
            return
        offset = node.args[FIXED] if len(node.args) > FIXED else node.kwargs.get("storage_offset")
        source = node.args[0]
        assert isinstance(source, Node)  # noqa: S101 - it is a tensor
        buffer, given = self.memory.buffers[self._buffer(source)], _fake(source)
        whole = given.is_contiguous() and given.nbytes == given.untyped_storage().nbytes()
        if offset is not None and buffer.borrowed:
            if not whole or buffer.role is Role.GRAD:
                raise CaptureError(reason="as_strided with an offset, of an input", site=site(node))
            self.fixed.add(buffer.id)

    def _wait(self, node: Node) -> None:
        """Record a wait for a collective as its argument: collectives are waited for as they run.

        `aten.callable_of` does that. So no collective is in progress when the plan moves, frees or
        overwrites what it reads or makes.
        """
        source = node.args[0]
        assert isinstance(source, Node)  # noqa: S101 - it takes one tensor
        if self.memory.buffers[self._buffer(source)].borrowed:
            reason = "it waits for a collective that was started outside of it"
            raise CaptureError(reason=reason, site=site(node))
        self.results[node] = self.results[source]

    def _view(self, node: Node) -> bool:
        """Record `node` as views of an argument's buffer; return False if it shares no storage."""
        made = node.meta["val"]
        tensors = made if isinstance(made, list | tuple) else [made]
        bases = {
            storage_id(_fake(n)): self._buffer(n)
            for n in node.all_input_nodes
            if isinstance(n.meta.get("val"), torch.Tensor)
        }
        shared = [bases.get(storage_id(t)) for t in tensors]
        if any(b is None for b in shared):
            return False
        pairs = zip(shared, tensors, strict=True)
        ids = [self.memory.value(b, t) for b, t in pairs if b is not None]
        self.results[node] = ids if isinstance(made, list | tuple) else ids[0]
        return True

    def _op(self, node: Node, op: torch._ops.OpOverload, phase: Phase) -> None:
        """Record `node` as an op: its results, arguments, effects and donations."""
        made = node.meta.get("val") if op._schema.returns else ()
        several = isinstance(made, list | tuple)
        results = [_tensor(t) for t in made] if several else [made]  # type: ignore[union-attr]  # a sequence
        ids = [self._made(node, t, phase) for t in results]
        self.results[node] = ids if several else ids[0]
        args = tuple(self._arg(a) for a in node.args)
        kwargs = tuple((k, self._arg(v)) for k, v in node.kwargs.items())
        index = len(self.ops)
        effects = aten.effects(op) | self._stale(node, index, args, kwargs)
        effects |= aten.effects_on_cuda(op, node.args, node.meta.get("val"))
        if aten.draws_nothing(op, node.args, node.kwargs):
            effects -= {Effect.RANDOM}
        self.nodes.append(node)
        self.ops.append(Op(index, str(op), args, tuple(ids), phase, kwargs, effects, site(node)))
        if INTO in node.meta:
            given: Any = args[0]
            for source, result in node.meta[INTO]:
                self._donation(index, given[source], given, ids[result])
        elif str(op) in aten.DONATIONS:
            for position in aten.DONATIONS[str(op)][0]:
                self._donation(index, args[position], args, ids[0])

    def _made(self, node: Node, tensor: Any, phase: Phase) -> int | None:
        """Return the Value id of a result on a new buffer; None for a result that is None."""
        if tensor is None:
            return None
        if not isinstance(tensor, torch.Tensor):
            reason = f"{node.target} returns {type(tensor).__name__} to the host"
            raise CaptureError(reason=reason, site=site(node))
        role = Role.GRAD if phase is Phase.BACKWARD else Role.ACTIVATION
        return self.memory.value(self.memory.buffer(tensor, role, node.name), tensor)

    def _stale(
        self, node: Node, op: int, args: Sequence[Arg], kwargs: Sequence[Any]
    ) -> frozenset[Effect]:
        """Return UNREPEATABLE if an argument is overwritten before a rerun could read it again."""
        safe, new = aten.statistics(str(node.target), args)
        if STATISTICS in node.meta:
            (args,), (safe, new) = args, node.meta[STATISTICS]  # type: ignore[assignment]  # one list
        read, updated = set[int](), set[int]()
        for position, arg in enumerate((*args, *(v for _, v in kwargs))):
            buffers = {self._of(r) for r in refs(arg)}
            (updated if position in safe else read).update(buffers)
        self.read |= read
        if read & self.unstable:
            return frozenset({Effect.UNREPEATABLE})
        if updated & (self.unstable | self.renewed.keys()):
            made = self.results[node]
            values = [made[i] for i in new] if isinstance(made, list) else [made] * len(new)
            self.renewed |= {self.memory.buffer_of(v): op for v in values if v is not None}
        return frozenset()

    def _refuse_reruns(self, outputs: Sequence[Any]) -> None:
        """Mark ops UNREPEATABLE whose new running statistics are read, and would be others.

        Those that the forward call returns are held, so nothing makes them again. A random op on
        the host in the graph of another device is marked, too: reruns restore that device's
        generator.
        """
        held = {self._of(ref) for each in outputs for ref in refs(self._arg(each))}
        again = {op for buffer, op in self.renewed.items() if buffer in self.read - held}
        again |= {
            op.id
            for op in self.ops
            if Effect.RANDOM in op.effects
            and any(self.memory.on_host(v) for v in op.outputs if v is not None)
        }
        for op in again:
            effects = self.ops[op].effects | {Effect.UNREPEATABLE}
            self.ops[op] = replace(self.ops[op], effects=effects)

    def _donation(self, index: int, given: Arg, args: Sequence[Arg], result: int | None) -> None:
        """Let the op write `result` over the argument `given`, if it reads nothing else there."""
        if not isinstance(given, Ref) or result is None:
            return
        source = self.memory.values[given.value]
        read = [r.value for a in args for r in refs(a) if self._of(r) == source.buffer]
        donation = Donation(index, source.id, result)
        target = self.ops[index].target
        values, buffers = self.memory.values, self.memory.buffers
        if read == [source.id] and fits_over(donation, target, values, buffers):
            self.donations.append(donation)

    # ---- arguments ------------------------------------------------------------------------------

    def _arg(self, arg: Any) -> Arg:
        """Return an argument of a node as an argument of an op in a Trace."""
        if isinstance(arg, Node):
            result = self.results[arg]
            if isinstance(arg.meta.get("val"), _NUMBERS):
                reason = (
                    f"an op or a result reads {arg.name}, a number that another op returns to the "
                    "host"
                )
                raise CaptureError(reason=reason, site=site(arg))
            if isinstance(result, list):
                return tuple(None if v is None else Ref(v) for v in result)
            return None if result is None else Ref(result)
        if isinstance(arg, list | tuple):
            return tuple(self._arg(a) for a in arg)
        if isinstance(arg, SizedInt | SizedFloat):
            return arg.plain()
        if arg is None or isinstance(arg, bool | int | float | str):
            return arg
        return _symbol(arg)


def _fake(node: Node) -> torch.Tensor:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        reason = f"{node.name} is a {type(value).__name__}, not a tensor"
        raise CaptureError(reason=reason, site=site(node))
    return value


def _tensor(result: Any) -> Any:
    """One of several results of an op; None for a number."""
    return None if isinstance(result, _NUMBERS) else result


def _symbol(arg: Any) -> Symbol:
    """Return a constant of the framework, such as a dtype, as a Symbol."""
    kinds = {
        complex: "complex",
        torch.dtype: "dtype",
        torch.device: "device",
        torch.layout: "layout",
        torch.memory_format: "memory_format",
    }
    kind = kinds.get(type(arg))
    if kind is None:
        raise CaptureError(reason=f"an argument of type {type(arg).__name__}")
    return Symbol(kind, str(arg).removeprefix("torch."))
