"""layers: SuperNeurons' layers in a Trace: checkpoints, and the memory of each.

Every forward op is a layer. Checkpoints are chosen as in SuperNeurons' published code: convolutions
and linear layers, joins, concatenations and forks.
"""

from __future__ import annotations

from outcore.ir.liveness import Liveness, liveness
from outcore.ir.problem import Problem
from outcore.ir.trace import Trace
from outcore.policies.superneurons.segments import Layer
from outcore.policies.superneurons.superneurons import CONVOLUTIONS

LINEAR = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm"})
"""Names of ops, without namespace and overload: fully connected layers, and attention's
products."""
ATTENTION = "_scaled_dot_product"
"""The beginning of the names of fused attention ops."""
JOINS = frozenset({"add", "sub"})
"""Ops that join if they read what two forward ops made."""
CONCATENATIONS = frozenset({"cat", "stack"})
"""Ops that are checkpoints because they concatenate."""


def layers_of(problem: Problem) -> tuple[Layer, ...]:
    """The forward ops of the trace as layers, by op id. Linear in ops."""
    trace, live = problem.trace, liveness(problem.trace)
    own_backward = {b: op for op in _backward(trace) for b in trace.reads[op]}
    marks = _checkpoints(trace, live)
    layers = []
    for op in range(trace.boundary):
        # A layer's own backward comes after those of its readers, so the last backward op that
        # reads the layer's output is its own.
        ends = [own_backward[b] for b in trace.writes[op] if b in own_backward]
        layers.append(
            Layer(
                inputs=_makers(trace, live, op),
                checkpoint=marks[op],
                forward_bytes=_moving_bytes(trace, trace.writes[op]),
                backward_bytes=working_set_bytes(trace, max(ends)) if ends else 0,
            )
        )
    return tuple(layers)


def largest_backward_bytes(trace: Trace) -> int:
    """The paper's l_peak: the largest working set of any layer's backward."""
    return max((working_set_bytes(trace, op) for op in _backward(trace)), default=0)


def working_set_bytes(trace: Trace, op: int) -> int:
    """Bytes that `op` reads and makes, without what the caller holds (parameters, images)."""
    return _moving_bytes(trace, (*trace.reads[op], *trace.writes[op]))


def fetch_points(trace: Trace) -> list[int]:
    """Backward ops of compute-intensive layers that read something the forward call made."""
    makers = liveness(trace).producer

    def reads_forward(op: int) -> bool:
        made_by = (makers[b] for b in trace.reads[op])
        return any(maker is not None and maker < trace.boundary for maker in made_by)

    return [op for op in _backward(trace) if _is_intensive(trace, op) and reads_forward(op)]


def _backward(trace: Trace) -> range:
    """The backward ops."""
    return range(trace.boundary, len(trace.ops))


def _moving_bytes(trace: Trace, buffers: tuple[int, ...]) -> int:
    """Bytes of `buffers`, without the buffers that the caller holds."""
    return sum(trace.buffers[b].nbytes for b in buffers if not trace.buffers[b].borrowed)


def _makers(trace: Trace, live: Liveness, op: int) -> tuple[int, ...]:
    """The ops that made what `op` reads, each once, in order."""
    made_by = (live.producer[b] for b in trace.reads[op])
    return tuple(sorted({maker for maker in made_by if maker is not None}))


def _checkpoints(trace: Trace, live: Liveness) -> list[bool]:
    """Per forward op: whether it is a checkpoint.

    A checkpoint has to be available for the backward call. If no backward op reads it (a linear
    layer before a ReLU), the ops that do read it are the checkpoint instead: nothing else could be
    replayed from.
    """
    marks: list[bool] = []
    lost: set[int] = set()
    for op in range(trace.boundary):
        marked = (
            _is_intensive(trace, op)
            or _is_structure(trace, live, op)
            or not trace.ops[op].repeatable
            or not lost.isdisjoint(trace.reads[op])
        )
        marks.append(marked)
        if marked:
            lost |= {b for b in trace.writes[op] if not _crosses(trace, live, b)}
    return marks


def _crosses(trace: Trace, live: Liveness, buffer: int) -> bool:
    """Whether `buffer` is available for the backward call."""
    return live.held[buffer] or live.uses[buffer][-1] >= trace.boundary


def _is_structure(trace: Trace, live: Liveness, op: int) -> bool:
    """Whether `op` is a join, a concatenation, or what a fork hands to several layers."""
    names = _names(trace, op)
    if names & CONCATENATIONS or (names & JOINS and len(_makers(trace, live, op)) > 1):
        return True
    return any(_forward_readers(trace, live, b) > 1 for b in trace.writes[op])


def _forward_readers(trace: Trace, live: Liveness, buffer: int) -> int:
    """How many forward ops read `buffer`."""
    return sum(use < trace.boundary for use in live.uses[buffer]) - 1


def _is_intensive(trace: Trace, op: int) -> bool:
    """Whether `op` is a convolution, a linear layer or fused attention."""
    names = _names(trace, op)
    fused = any(name.startswith(ATTENTION) for name in names)
    return fused or not names.isdisjoint(CONVOLUTIONS | LINEAR)


def _names(trace: Trace, op: int) -> set[str]:
    """The parts of the op's full name, such as `aten`, `mm` and `default`."""
    return set(trace.ops[op].target.split("."))
