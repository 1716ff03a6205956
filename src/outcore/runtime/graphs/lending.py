"""lending: what a plan for larger sizes says about the same graph at smaller ones.

A plan names gaps: buffers and the ops around them. At other sizes these are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from outcore.estimate import columns, flops
from outcore.estimate.shapes import INPUT_GRADIENT
from outcore.ir.once import once_per_trace
from outcore.ir.profile import Profile, Source
from outcore.ir.trace import Role, Trace

CONVOLUTION_BACKWARD = "aten.convolution_backward.default"

_WEIGHTS = Role.PARAM, Role.STATE


@dataclass(frozen=True, slots=True)
class Origin:
    """The place of a graph in the model and in the step, whatever its sizes."""

    kind: tuple[str, ...]
    """As `GraphStatus.kind`."""
    place: int
    """As `GraphStatus.place`."""
    weights: tuple[int, ...]
    """Addresses of its parameters and module buffers."""
    around: frozenset[tuple[tuple[str, ...], tuple[int, ...]]]
    """Kind and weights of the graphs whose calls were outstanding at its first call."""


def weights_of(trace: Trace, inputs: Sequence[Any]) -> tuple[int, ...]:
    """Addresses of the parameters and module buffers among the forward `inputs`."""
    roles = (trace.buffers[trace.values[value].buffer].role for value in trace.inputs)
    # Constants come last, and are not passed. torch passes None for tokens, which order effects.
    pairs = zip(inputs, roles, strict=False)
    given = (each for each, role in pairs if role in _WEIGHTS and each is not None)
    return tuple(each.data_ptr() for each in given)


def covers(larger: Trace, trace: Trace) -> bool:
    """Whether `trace` has the ops and buffers of `larger`, and no buffer is larger.

    Op by op, with the same buffers read and made, so that each plan for one is one for the other.
    Parameters have the same size. Linear in the number of ops and buffers.
    """
    if len(larger.buffers) != len(trace.buffers):
        return False
    pairs = zip(larger.buffers, trace.buffers, strict=True)
    if any(most.nbytes < each.nbytes for most, each in pairs):
        return False
    return all(a == b for a, b in zip(_outline(larger), _outline(trace), strict=True))


@once_per_trace
def total_bytes(trace: Trace) -> int:
    """Bytes of all buffers together."""
    return sum(buffer.nbytes for buffer in trace.buffers)


def _outline(trace: Trace) -> Iterator[object]:
    """What of a trace does not depend on sizes."""
    yield len(trace.ops), trace.boundary
    sizes = (b.nbytes if b.role in _WEIGHTS else None for b in trace.buffers)
    yield [(b.role, b.borrowed, size) for b, size in zip(trace.buffers, sizes, strict=True)]
    yield [(op.target, op.phase, op.effects) for op in trace.ops]
    yield trace.reads
    yield trace.writes
    for values in (trace.inputs, trace.tangents):
        yield [trace.values[value].buffer for value in values]
    for results in (trace.outputs, trace.gradients):
        yield [trace.value_buffers(result) for result in results]
    buffers = [value.buffer for value in trace.values]
    yield [(d.op, buffers[d.source], buffers[d.target]) for d in trace.donations]


def scaled(profile: Profile, larger: Trace, trace: Trace, *, on_cpu: bool) -> Profile:
    """An estimate of the profile of `trace`, from that of `larger`, which `covers` it.

    The time of an op shrinks with its arithmetic, or with its bytes if it has none.
    """
    work, most = _work(trace), _work(larger)
    parts = (min(1.0, some / all_) if all_ else 1.0 for some, all_ in zip(work, most, strict=True))
    seconds = tuple(s * part for s, part in zip(profile.seconds, parts, strict=True))
    workspace_bytes = workspaces(profile.workspace_bytes, larger, trace, on_cpu=on_cpu)
    return Profile(seconds, workspace_bytes, Source.ESTIMATED)


def workspaces(
    known: Sequence[int], other: Trace, trace: Trace, *, on_cpu: bool
) -> tuple[int, ...]:
    """An estimate of the workspaces of `trace`, from those `known` of ops in `other` (`alike`).

    They grow with the bytes of an op, but do not shrink: for smaller sizes, a library may choose
    another algorithm.
    """
    least = columns(trace) if on_cpu else (0,) * len(trace.ops)
    counterparts = _counterparts(known, other, trace)
    grown = (n * here // there if here > there > 0 else n for n, here, there in counterparts)
    return tuple(map(max, grown, least))


def alike(one: Trace, other: Trace) -> bool:
    """Whether two traces have the same ops, however each makes the gradients of large inputs.

    outcore has ops of its own for those (`capture.rewrites`). For convolutions there are two, one
    after the other, in place of one.
    """
    return _names(one) == _names(other)


@once_per_trace
def _names(trace: Trace) -> tuple[str, ...]:
    targets = (trace.ops[first].target for first, *_ in _units(trace))
    alone = {INPUT_GRADIENT: CONVOLUTION_BACKWARD}
    return tuple(
        alone.get(each, each).removeprefix("outcore.").removeprefix("aten.") for each in targets
    )


@once_per_trace
def _units(trace: Trace) -> list[list[int]]:
    """All ops in order, with those together that make the gradients of one convolution."""
    units: list[list[int]] = []
    for op in trace.ops:
        before = trace.ops[units[-1][-1]].target if units else ""
        if op.target == INPUT_GRADIENT and before == CONVOLUTION_BACKWARD:
            units[-1].append(op.id)
        else:
            units.append([op.id])
    return units


def _counterparts(
    known: Sequence[int], other: Trace, trace: Trace
) -> Iterator[tuple[int, int, int]]:
    """Per op of `trace`: what is `known` of its counterpart in `other`, and the bytes of both."""
    here, there = list(_moved(trace)), list(_moved(other))
    for ours, theirs in zip(_units(trace), _units(other), strict=True):
        if len(ours) == len(theirs):
            for op, of in zip(ours, theirs, strict=True):
                yield known[of], here[op], there[of]
        else:  # both kernels count for each
            most = max(known[of] for of in theirs)
            bytes_of_all = sum(here[op] for op in ours), sum(there[of] for of in theirs)
            yield from ((most, *bytes_of_all) for _ in ours)


def _work(trace: Trace) -> list[float]:
    """Per op, its floating-point operations; if it has none, the bytes that it reads and makes."""
    return [some or float(n) for some, n in zip(flops(trace), _moved(trace), strict=True)]


def _moved(trace: Trace) -> Iterator[int]:
    """Per op, the bytes that it reads and makes."""
    for read, made in zip(trace.reads, trace.writes, strict=True):
        yield sum(trace.buffers[b].nbytes for b in (*read, *made))
