"""Verifiers: the rules of each noun. Run after every stage, by default, always.

verify_trace     ids index; a value is inside its buffer; an op reads what exists; a buffer is made
                 once; outputs are made by the forward part; no op takes what the caller passes late.
verify_plan      every gap is a gap of the trace; a recomputed buffer can be made again.

`verify_program` has a file of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from outcore.errors import VerifyError
from outcore.ir.liveness import gaps, liveness
from outcore.ir.plan import Plan, Recompute
from outcore.ir.problem import Problem
from outcore.ir.trace import Buffer, Op, Phase, Ref, Trace, Value

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8, "complex64": 8,
    "complex128": 16,
}  # fmt: skip


def verify_trace(trace: Trace) -> None:
    """Raise VerifyError where `trace` breaks a rule."""
    items: list[tuple[int, Buffer | Value | Op]] = [
        *enumerate(trace.buffers),
        *enumerate(trace.values),
        *enumerate(trace.ops),
    ]
    for index, item in items:
        _check(item.id == index, "trace", "ids index", f"index {index}: {item}")
    for value in trace.values:
        _verify_value(trace, value.id)
    made = set(trace.value_buffers(_refs(trace.inputs)))
    for op in trace.ops:
        where = f"op {op.id} {op.target} {op.site}".rstrip()
        if op.id == trace.boundary:
            _verify_results(trace, made, "outputs")
            made |= set(trace.value_buffers(_refs(trace.tangents)))
        forward = op.phase is Phase.FORWARD
        _check(forward == (op.id < trace.boundary), "trace", "phases split at the boundary", where)
        for buffer in trace.reads[op.id]:
            _check(buffer in made, "trace", f"buffer {buffer} read before it is made", where)
        for buffer in trace.writes[op.id]:
            _check(buffer not in made, "trace", f"buffer {buffer} made twice", where)
            made.add(buffer)
    if trace.boundary >= len(trace.ops):
        _verify_results(trace, made, "outputs")
    _verify_results(trace, made | set(trace.value_buffers(_refs(trace.tangents))), "gradients")


def _refs(values: Iterable[int]) -> tuple[Ref, ...]:
    return tuple(Ref(v) for v in values)


def _verify_value(trace: Trace, index: int) -> None:
    value = trace.values[index]
    where = f"value {index}"
    _check(0 <= value.buffer < len(trace.buffers), "trace", "value of an unknown buffer", where)
    _check(value.dtype in ITEM_BYTES, "trace", f"unknown dtype {value.dtype}", where)
    _check(len(value.shape) == len(value.stride), "trace", "a stride per dimension", where)
    last = value.offset + sum((n - 1) * s for n, s in zip(value.shape, value.stride, strict=True))
    needed = (last + 1) * ITEM_BYTES[value.dtype] if all(value.shape) else 0
    size = trace.buffers[value.buffer].nbytes
    rule = f"value ends at byte {needed} of a buffer of {size} B"
    _check(needed <= size and value.offset >= 0, "trace", rule, where)


def _verify_results(trace: Trace, made: set[int], name: str) -> None:
    for buffer in trace.value_buffers(getattr(trace, name)):
        _check(buffer in made, "trace", f"{name} name buffer {buffer}, not made by then", name)


def verify_plan(problem: Problem, plan: Plan) -> None:
    """Raise VerifyError where `plan` names no gap of the trace, or asks for the impossible."""
    trace = problem.trace
    live = liveness(trace)
    known = set(gaps(trace, live))
    for gap, choice in plan.choices:
        where = f"{gap} {trace.buffers[gap.buffer].name}".rstrip()
        _check(gap in known, "plan", "not a gap of this trace", where)
        if isinstance(choice, Recompute):
            producer = live.producer[gap.buffer]
            _check(producer is not None, "plan", "recompute of what no op makes", where)
            if producer is not None:
                op = trace.ops[producer]
                effects = ", ".join(sorted(e.value for e in op.effects))
                _check(op.repeatable, "plan", f"recompute of an op that is {effects}", where)


def _check(holds: bool, noun: str, rule: str, where: str) -> None:
    if not holds:
        raise VerifyError(noun=noun, rule=rule, where=where)
