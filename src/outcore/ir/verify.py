"""verify_trace: check the rules of a Trace, in the order of docs/ir.md.

Whatever makes a Trace calls it. One rule, that every Value a Trace names is listed, is checked by
Trace itself. The other nouns are checked by `verify_problem`, `verify_plan` and `verify_program`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from outcore.errors import VerifyError
from outcore.ir.trace import Buffer, Donation, Op, Phase, Ref, Trace, Value, refs

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8, "complex64": 8,
    "complex128": 16,
}  # fmt: skip


def verify_trace(trace: Trace) -> None:
    """Raise VerifyError if `trace` breaks a rule. Linear in ops and values."""
    _verify_ids("buffer", trace.buffers)
    _verify_ids("value", trace.values)
    _verify_ids("op", trace.ops)
    if not 0 <= trace.boundary <= len(trace.ops):
        rule = "the boundary is the first op of the backward call, or the end"
        _fail("the boundary", rule, f"it is {trace.boundary}, and there are {len(trace.ops)} ops")
    for buffer in trace.buffers:
        if buffer.nbytes < 0:
            _fail(f"buffer {buffer.id}", "no size is negative", f"it has {buffer.nbytes} B")
    met: set[int] = set()
    for value in trace.values:
        _verify_value(trace, value)
        if value.buffer not in met and (value.conj or value.neg):
            rule = "the first value on a buffer is read as it lies"
            _fail(f"value %{value.id}", rule, "it is read as the conjugate or the negative")
        met.add(value.buffer)
    _verify_order(trace)
    _verify_borrowed(trace)
    for donation in trace.donations:
        _verify_donation(trace, donation)


def _fail(where: str, rule: str, detail: str) -> NoReturn:
    raise VerifyError(noun="trace", rule=rule, where=where, detail=detail)


def _verify_ids(kind: str, items: Iterable[Buffer | Value | Op]) -> None:
    for index, item in enumerate(items):
        if item.id != index:
            _fail(f"{kind} {index}", "ids index", f"it has the id {item.id}")


# ---- values --------------------------------------------------------------------------------------


def _verify_value(trace: Trace, value: Value) -> None:
    where = f"value %{value.id}"
    if not 0 <= value.buffer < len(trace.buffers):
        _fail(where, "a value lies on a listed buffer", f"it lies on buffer {value.buffer}")
    if value.dtype not in ITEM_BYTES:
        _fail(where, "the dtype is a known one", f"unknown dtype {value.dtype}")
    if len(value.shape) != len(value.stride):
        detail = f"shape {value.shape}, stride {value.stride}"
        _fail(where, "there is a stride per dimension", detail)
    if min((*value.shape, *value.stride, value.offset), default=0) < 0:
        detail = f"shape {value.shape}, stride {value.stride}, offset {value.offset}"
        _fail(where, "no size, stride or offset is negative", detail)
    needed, size = _end_bytes(value), trace.buffers[value.buffer].nbytes
    if needed > size:
        detail = f"it ends at byte {needed} of buffer {value.buffer}, which has {size} B"
        _fail(where, "a value is inside its buffer", detail)


def _end_bytes(value: Value) -> int:
    """Bytes from the start of the buffer to the end of the last element; 0 without elements."""
    if not all(value.shape):
        return 0
    last = sum((n - 1) * step for n, step in zip(value.shape, value.stride, strict=True))
    return (value.offset + last + 1) * ITEM_BYTES[value.dtype]


# ---- order ---------------------------------------------------------------------------------------


def _verify_order(trace: Trace) -> None:
    """Check that ops read what exists and make what is new, and that what is returned exists."""
    made = set(_buffers(trace, trace.inputs))
    for op in trace.ops:
        if op.id == trace.boundary:
            _cross_boundary(trace, made)
        _verify_op(trace, op, made)
        made |= set(trace.writes[op.id])
    if trace.boundary == len(trace.ops):
        _cross_boundary(trace, made)
    _verify_results(trace, made, "gradients")


def _buffers(trace: Trace, values: Iterable[int]) -> tuple[int, ...]:
    return trace.value_buffers(tuple(map(Ref, values)))


def _cross_boundary(trace: Trace, made: set[int]) -> None:
    """Check what the forward call returns, and add the tangents of the backward call to `made`."""
    _verify_results(trace, made, "outputs")
    for buffer in _buffers(trace, trace.tangents):
        if buffer in made:
            _fail("tangents", "what is passed in is new", f"buffer {buffer} is there already")
        made.add(buffer)


def _verify_op(trace: Trace, op: Op, made: set[int]) -> None:
    where = f"op {op.id} {op.target} {op.site}".rstrip()
    if (op.phase is Phase.FORWARD) != (op.id < trace.boundary):
        detail = f"phase {op.phase.value}, and the boundary is {trace.boundary}"
        _fail(where, "the forward ops are those before the boundary", detail)
    for buffer in trace.reads[op.id]:
        if buffer not in made:
            rule = "what is read was passed in or made before"
            _fail(where, rule, f"buffer {buffer} is not there")
    for buffer in trace.writes[op.id]:
        if buffer in made:
            _fail(where, "a buffer is made once", f"buffer {buffer} is there already")


def _verify_borrowed(trace: Trace) -> None:
    """Check that what is the caller's exists: it is there at the end of every step."""
    there = {*_buffers(trace, trace.inputs), *_buffers(trace, trace.tangents)}.union(*trace.writes)
    for buffer in trace.buffers:
        if buffer.borrowed and buffer.id not in there:
            rule = "what is the caller's is passed in or made"
            _fail(f"buffer {buffer.id}", rule, "no op makes it, and it is not passed in")


def _verify_results(trace: Trace, made: set[int], name: str) -> None:
    for buffer in trace.value_buffers(getattr(trace, name)):
        if buffer not in made:
            _fail(name, "what a call returns was made by its end", f"buffer {buffer} was not")


# ---- donations -----------------------------------------------------------------------------------


def _verify_donation(trace: Trace, donation: Donation) -> None:
    """Check that the result may lie exactly over the argument, which the op reads no other way."""
    where = f"donation of %{donation.source} to %{donation.target} by op {donation.op}"
    if not 0 <= donation.op < len(trace.ops):
        _fail(where, "a donation names an op", f"there are {len(trace.ops)} ops")
    op = trace.ops[donation.op]
    source, target = trace.values[donation.source], trace.values[donation.target]
    read = {r.value for r in refs(op.arguments) if trace.values[r.value].buffer == source.buffer}
    if source.id not in read:
        _fail(where, "the op reads what is donated", f"it does not read %{source.id}")
    if read != {source.id}:
        others = ", ".join(f"%{v}" for v in sorted(read - {source.id}))
        detail = f"it reads {others} too, on buffer {source.buffer}"
        _fail(where, "the op reads what is donated through one value", detail)
    if target.id not in op.outputs or target.buffer not in trace.writes[op.id]:
        _fail(where, "the op makes what takes the memory over", f"it does not make %{target.id}")
    sizes = trace.buffers[source.buffer].nbytes, trace.buffers[target.buffer].nbytes
    if sizes[0] != sizes[1]:
        _fail(where, "both buffers have one size", f"they have {sizes[0]} B and {sizes[1]} B")
    if _layout(source) != _layout(target):
        detail = f"%{source.id} is {_layout(source)}, %{target.id} is {_layout(target)}"
        _fail(where, "both values have one dtype and layout", detail)


def _layout(value: Value) -> tuple[object, ...]:
    return value.dtype, value.shape, value.stride, value.offset, value.conj, value.neg
