"""groups: find groups of ops that one kernel can run: elementwise ops and normalizations.

A group is a run of connected ops of one phase with no other kind of op in between, so nothing that
the group makes is needed before the group is done. Views are not ops: they belong to what reads
them.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from outcore import aten
from outcore.capture.nodes.aliases import (
    is_call_of_op,
    leaves,
    op_of,
    readers,
    results,
    root_of,
    storage_bytes,
    tensor_of,
)
from outcore.capture.nodes.phases import phases
from outcore.capture.nodes.storages import storage_id

LEAST_BYTES = 1 << 20
"""The least bytes of reads and writes that a group must save: a kernel takes seconds to compile."""

MOST_OPS = 64
"""The most ops in a group."""
MOST_ENDS = 2.0
"""The most memory a group may need at once, as a multiple of what its largest op needs alone."""

_aten = torch.ops.aten
REDUCTIONS = frozenset(
    {
        _aten._log_softmax.default,
        _aten._log_softmax_backward_data.default,
        _aten._native_batch_norm_legit.no_stats,
        _aten._native_batch_norm_legit_functional.default,
        _aten._softmax.default,
        _aten._softmax_backward_data.default,
        _aten._to_copy.default,
        _aten.full.default,
        _aten.full_like.default,
        _aten.mean.dim,
        _aten.native_batch_norm_backward.default,
        _aten.native_group_norm.default,
        _aten.native_group_norm_backward.default,
        _aten.native_layer_norm.default,
        _aten.native_layer_norm_backward.default,
        _aten.sum.dim_IntList,
        _aten.var.correction,
        _aten.var_mean.correction,
    }
)
"""What a kernel can compute in addition to elementwise ops, which torch marks with a tag."""

NORMALIZATIONS = frozenset(op for op in REDUCTIONS if "_norm" in str(op))
"""Normalizations. If their parameters have more precision than what they normalize, their kernels
on a CPU return statistics as precise as the parameters, and torch's compiler rounds them."""

EQUALITIES = frozenset({_aten.eq.Tensor, _aten.eq.Scalar, _aten.ne.Tensor, _aten.ne.Scalar})
"""On floating-point numbers, these depend on the last bit, as in the derivative of a maximum. So
what is compared must be what was stored, not what a kernel has before it rounds."""

DTYPES = frozenset(
    {
        torch.bfloat16,
        torch.bool,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int32,
        torch.int64,
        torch.uint8,
    }
)
"""Dtypes of the tensors that a group may read and make."""


@dataclass(frozen=True, slots=True)
class Group:
    """Ops in the order in which they run, all of one phase."""

    ops: tuple[Node, ...]

    def escaping(self) -> list[Node]:
        """Return the results that ops outside the group read, directly or as views, in order."""
        members = set(self.ops)
        made = (n for op in self.ops for n in results(op))
        return [n for n in made if any(reader not in members for reader in readers(n))]

    def given(self) -> list[Node]:
        """Return the tensors or views that the ops read from outside the group, each once."""
        members = set(self.ops)
        read = (n for op in self.ops for n in op.all_input_nodes)
        return list(dict.fromkeys(n for n in read if op_of(n) not in members))

    def statistics(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Running statistics that the group updates while it trains, and their new values.

        As positions in `given` and in `escaping`. Nothing else that the group makes depends on
        them.
        """
        members, safe, other = set(self.ops), set[object](), set[object]()
        made = set[Node]()
        for op in self.ops:
            positions, new = aten.statistics(str(op.target), op.args)
            for item in op.users:
                taken = item.target is operator.getitem and item.args[1] in new
                if taken and not members.isdisjoint(readers(item)):
                    return (), ()
                made |= {item} if taken else set()
            for position, arg in enumerate((*op.args, *op.kwargs.values())):
                (safe if position in positions else other).update(leaves(arg))
        before = tuple(i for i, n in enumerate(self.given()) if n in safe - other)
        return before, tuple(i for i, n in enumerate(self.escaping()) if n in made)

    def into(self, among: Collection[Node]) -> tuple[tuple[int, int], ...]:
        """Pairs of positions (in `given`, in `escaping`): results that may overwrite arguments.

        Such an argument is made by a node `among` those of the same phase, is alone in its storage,
        and is not read later.
        """
        given, escaping = self.given(), self.escaping()
        storages = [storage_id(tensor_of(n)) for n in given]
        dying = [
            i
            for i, n in enumerate(given)
            if storages.count(storages[i]) == 1
            and op_of(n) in among
            and max(readers(root_of(n))) <= self.ops[-1]
        ]
        pairs = []
        for position, result in enumerate(escaping):
            alike = (i for i in dying if _lie_alike(tensor_of(given[i]), tensor_of(result)))
            source = next(alike, None)
            if source is not None:
                pairs.append((source, position))
                dying.remove(source)
        return tuple(pairs)

    def ends_bytes(self) -> int:
        """Bytes that the group needs at once: all its arguments and all its results."""
        ends = {storage_id(tensor_of(n)): n for n in (*self.given(), *self.escaping())}
        return sum(map(storage_bytes, ends.values()))

    def spared_bytes(self) -> int:
        """Bytes of reads and writes that one kernel saves."""
        members = set(self.ops)
        escaping = set(self.escaping())
        spared = 0
        for result in (n for op in self.ops for n in results(op)):
            reads = len([1 for reader in readers(result) if reader in members])
            writes = 1 if reads and result not in escaping else 0
            spared += (reads + writes) * tensor_of(result).nbytes
        return spared


def groups(joint: GraphModule, forward_outputs: int, least_bytes: int = LEAST_BYTES) -> list[Group]:
    """Return the groups of at least two ops that save `least_bytes`, in execution order.

    Raises CaptureError as `phases`.
    """
    found = (g for nodes in phases(joint, forward_outputs) for g in _of_phase(nodes))
    return [g for g in found if len(g.ops) > 1 and g.spared_bytes() >= least_bytes]


def _of_phase(nodes: Sequence[Node]) -> Iterator[Group]:
    """Yield all groups of one phase, including groups of one op.

    Several groups may grow at once. They read nothing from each other, and since the first of them
    began there were only ops of these groups. So everything that a group reads from outside exists
    before all of them.
    """
    growing: list[Group] = []
    for node in filter(is_call_of_op, nodes):
        if not fusible(node):
            yield from growing
            growing = []
            continue
        sources = {op_of(n) for n in node.all_input_nodes}
        near = [g for g in growing if not sources.isdisjoint(g.ops)]
        joined = Group((*sorted(n for g in near for n in g.ops), node))
        if near and not _fits(joined):
            yield from growing
            growing, near, joined = [], [], Group((node,))
        growing = [*(g for g in growing if g not in near), joined]
    yield from growing


def _fits(group: Group) -> bool:
    most = max(Group((op,)).ends_bytes() for op in group.ops)
    return len(group.ops) <= MOST_OPS and group.ends_bytes() <= MOST_ENDS * most


def fusible(op: Node) -> bool:
    """Whether a kernel can run the op, repeatably, on plain tensors of one device."""
    if not isinstance(op.target, OpOverload) or op.target.namespace not in ("aten", "prims"):
        return False
    random = torch.Tag.nondeterministic_seeded in op.target.tags
    if random or not (is_elementwise(op) or op.target in REDUCTIONS):
        return False
    if aten.effects(op.target) or aten.may_alias(op.target) or str(op.target) in aten.WRITES:
        return False
    if any(u.meta.get("val") is None for u in op.users if u.target is operator.getitem):
        return False
    made = [t for t in leaves(op.meta.get("val")) if t is not None]
    tensors = [*(n.meta.get("val") for n in op.all_input_nodes), *made]
    plain = all(isinstance(t, Tensor) and _is_plain(t) for t in tensors)
    if not plain or len({t.device for t in tensors}) != 1:
        return False
    return not (asks_for_bits(op) or rounds_statistics(op))


def is_elementwise(op: Node) -> bool:
    """Whether each element of the result depends only on the arguments' elements at its place."""
    called = op.target
    return isinstance(called, OpOverload) and torch.Tag.pointwise in called.tags


def asks_for_bits(op: Node) -> bool:
    """Whether the op compares floating-point numbers for equality."""
    values = (n.meta.get("val") for n in op.all_input_nodes)
    return op.target in EQUALITIES and any(
        isinstance(t, Tensor) and t.is_floating_point() for t in values
    )


def rounds_statistics(op: Node) -> bool:
    """Whether a fused kernel's statistics would be less precise than those of plain PyTorch."""
    if op.target not in NORMALIZATIONS:
        return False
    given = (n.meta["val"] for n in op.all_input_nodes)
    floats = [t for t in given if t.is_floating_point()]
    return floats[0].device.type == "cpu" and len({t.dtype for t in floats}) > 1


def _is_plain(tensor: Tensor) -> bool:
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return (
        tensor.layout is torch.strided
        and tensor.dtype in DTYPES
        and not tensor.is_conj()
        and not tensor.is_neg()
        and all(isinstance(n, int) for n in sizes)
    )


def _lie_alike(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same dtype, layout and storage size."""
    layouts = [
        (t.dtype, t.shape, t.stride(), t.storage_offset(), t.untyped_storage().nbytes())
        for t in (tensor, other)
    ]
    return layouts[0] == layouts[1]
