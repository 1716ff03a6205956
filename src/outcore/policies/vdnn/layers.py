"""layers: vDNN's view of a step: layers that retain their input, and when its copies run.

One stream for compute and one for copies meet at the end of each layer (vDNN, section III). An
input leaves while the layer that uses it last runs. It comes back during the backward of another
layer, one that runs before the backward of its own layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from outcore.ir.hardware import Tier
from outcore.ir.liveness import liveness
from outcore.ir.plan import Choice, Gap, Offload
from outcore.ir.problem import Problem
from outcore.ir.trace import Op, Ref, Trace
from outcore.policies.candidates import away, candidates
from outcore.policies.superneurons.superneurons import CONVOLUTIONS

READ_RESULT = frozenset(
    {
        "threshold_backward",
        "relu_backward",
        "sigmoid_backward",
        "tanh_backward",
        "_softmax_backward_data",
        "_log_softmax_backward_data",
        "nll_loss_backward",
        "nll_loss2d_backward",
        "cross_entropy_backward",
        "softmax_cross_entropy_backward",
    }
)
"""Backward ops that need only the result: of ops that may run in place, and of the network's end.

Names are without namespace and overload; Chainer's are among them."""

POOLING = ("pool2d", "pool3d")
"""Parts of the names of ops whose input the paper retains, though no gradient may read it."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer, represented by its backward op."""

    op: int
    """The backward op, which reads what the forward pass retained."""
    gaps: tuple[Gap, ...]
    """Gaps that end at this op: what it is the first to read. What it shares with a layer whose
    backward op comes earlier belongs to that layer."""
    inputs: tuple[Gap, ...] = ()
    """The part of `gaps` whose buffers feed a convolution, this layer's or another's."""
    convolution: bool = False
    """Whether this layer is a convolution."""


def layers(problem: Problem, min_bytes: int) -> tuple[Layer, ...]:
    """The layers that retain at least `min_bytes` in one buffer, in backward order.

    What is retained only for an activation that may run in place, for a softmax or for the loss is
    left out, and so are their backward ops; but what pooling reads is not left out. Linear in ops.
    """
    trace = problem.trace
    forward, backward = trace.ops[: trace.boundary], trace.ops[trace.boundary :]
    needed = {b for op in backward if not _named(op, READ_RESULT) for b in trace.reads[op.id]}
    needed |= {b for op in forward if _pools(op) for b in trace.reads[op.id]}
    retained = {g.buffer: g for g in candidates(problem, min_bytes) if g.buffer in needed}
    read = {op.id: [retained[b] for b in trace.reads[op.id] if b in retained] for op in backward}
    convolutions = {op.id for op in backward if _named(op, CONVOLUTIONS)}
    inputs = {retained[b] for b in _inputs(trace, convolutions) if b in retained}
    found = []
    for op in backward:
        first = tuple(gap for gap in read[op.id] if gap.before == op.id)
        if first or (read[op.id] and not _named(op, READ_RESULT)):
            shared = tuple(gap for gap in first if gap in inputs)
            found.append(Layer(op.id, first, shared, op.id in convolutions))
    return tuple(found)


def _inputs(trace: Trace, convolutions: Iterable[int]) -> Iterator[int]:
    """The buffers of their inputs: of each, the first from before the boundary that it reads."""
    before = {*trace.value_buffers(tuple(map(Ref, trace.inputs)))}
    before.update(*(trace.writes[op] for op in range(trace.boundary)))
    for op in convolutions:
        yield from [b for b in trace.reads[op] if b in before][:1]


def _named(op: Op, names: frozenset[str]) -> bool:
    """Whether the op has one of these names."""
    return not names.isdisjoint(op.target.split("."))


def _pools(op: Op) -> bool:
    """Whether the op is a pool."""
    return any(part in op.target for part in POOLING)


def all_gaps(order: Sequence[Layer]) -> frozenset[Gap]:
    """What `vdnn-all` offloads: all but what the last layer (the first here) retains."""
    return frozenset(gap for layer in order[1:] for gap in layer.gaps)


def convolution_gaps(order: Sequence[Layer]) -> frozenset[Gap]:
    """What `vdnn-conv` offloads: inputs of convolutions, except the last layer's."""
    return frozenset(gap for layer in order[1:] for gap in layer.inputs)


def find_prefetch(order: Sequence[Layer], offloaded: Collection[Gap]) -> dict[int, int]:
    """Layer (its index in `order`) -> the layer during whose backward pass it is fetched.

    Each layer looks for the closest layer after it, in backward order, that is offloaded and not
    fetched yet. It looks no further than the first convolution. A layer that is not found is not
    listed. Linear in layers.
    """
    wanted = (i for i, layer in enumerate(order) if not set(layer.gaps).isdisjoint(offloaded))
    missing = deque(wanted)
    convolutions = list(accumulate((layer.convolution for layer in order), initial=0))
    found: dict[int, int] = {}
    for now in range(len(order)):
        while missing and missing[0] <= now:
            missing.popleft()
        # What was fetched already comes before the closest that was not: one look is enough.
        if missing and convolutions[missing[0]] == convolutions[now + 1]:
            found[missing.popleft()] = now
    return found


def placed(
    problem: Problem, min_bytes: int, select: Callable[[Sequence[Layer]], frozenset[Gap]]
) -> dict[Gap, Choice]:
    """The choices that offload what `select` returns; none if there is no outer tier.

    Each copy is done within the layer that it runs in parallel with. Near-linear in ops.
    """
    leave = away(problem)
    if not isinstance(leave, Offload):
        return {}
    order = layers(problem, min_bytes)
    offloaded = select(order)
    issued = find_prefetch(order, offloaded)
    producer = liveness(problem.trace).producer
    found: dict[Gap, Choice] = {}
    for place, layer in enumerate(order):
        beside = order[issued[place]].op if place in issued else None
        for gap in offloaded.intersection(layer.gaps):
            made_here = producer[gap.buffer] == gap.after
            found[gap] = _offload(gap, leave.tier, beside, made_here=made_here)
    return found


def _offload(gap: Gap, tier: Tier, beside: int | None, *, made_here: bool) -> Offload:
    """The offload for `gap`.

    It leaves in parallel with the last use, or with the op after it if that use made the buffer. It
    comes back in parallel with op `beside`; if no layer fetches it (None), when it is needed.
    """
    return Offload(
        tier,
        depart=None if made_here else gap.after,
        release=min(gap.after + (2 if made_here else 1), gap.before),
        prefetch=gap.before if beside is None else beside,
        arrive=None if beside is None else beside + 1,
    )
