"""trace: print and read the text form of a Trace."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from outcore.ir.text.args import (
    arg_text,
    read_args,
    read_call,
    read_new_value,
    read_value,
    read_values,
    value_name,
)
from outcore.ir.text.rows import Lines, comma, only, read_rows, row
from outcore.ir.text.scan import INTEGER, KIND, Line, bare, quoted
from outcore.ir.trace import Buffer, Donation, Effect, Op, Phase, Role, Trace, Value

_INTS = re.compile(rf"\((?:{INTEGER.pattern}(?:, {INTEGER.pattern})*,?)?\)", re.ASCII)


def print_trace(trace: Trace) -> Iterator[str]:
    """The lines of a Trace."""
    yield f"trace boundary {trace.boundary}"
    yield from map(_buffer_text, trace.buffers)
    yield from map(_value_text, trace.values)
    yield row("inputs", comma(map(value_name, trace.inputs)))
    yield from map(op_text, trace.ops[: trace.boundary])
    yield row("outputs", comma(map(arg_text, trace.outputs)))
    yield row("tangents", comma(map(value_name, trace.tangents)))
    yield from map(op_text, trace.ops[trace.boundary :])
    yield row("gradients", comma(map(arg_text, trace.gradients)))
    for d in trace.donations:
        yield f"donate {d.op}: %{d.source} -> %{d.target}"


def _buffer_text(buffer: Buffer) -> str:
    return row(
        f"buffer {buffer.id} {buffer.role.value} {buffer.nbytes} B",
        "borrowed" if buffer.borrowed else "",
        quoted(buffer.name) if buffer.name else "",
    )


def _value_text(value: Value) -> str:
    shape, stride = arg_text(value.shape), arg_text(value.stride)
    text = f"value %{value.id} on {value.buffer} {bare(value.dtype)} {shape} stride {stride}"
    return row(
        text,
        f"offset {value.offset}" if value.offset else "",
        "conj" if value.conj else "",
        "neg" if value.neg else "",
    )


def op_text(op: Op) -> str:
    """One op: `op 12 forward aten.relu.default(%3) -> %4 !random @ "layer1 (net.py:41)"`."""
    kwargs = (f"{bare(name, KIND)}={arg_text(arg)}" for name, arg in op.kwargs)
    args = comma((*map(arg_text, op.args), *kwargs))
    outputs = comma("_" if v is None else value_name(v) for v in op.outputs)
    return row(
        f"op {op.id} {op.phase.value} {bare(op.target)}({args})",
        f"-> {outputs}" if outputs else "",
        *sorted(f"!{effect.value}" for effect in op.effects),
        f"@ {quoted(op.site)}" if op.site else "",
    )


def read_trace(lines: Lines) -> Trace:
    """A Trace from its lines. Raises ParseError."""
    head, *rest = lines
    head.expect("trace", "boundary")
    boundary = head.integer()
    head.end()
    rows = read_rows(rest, {**_THINGS, **_LISTS}, once=_LISTS)
    for line in rest:
        for column, value in line.values:
            if value >= len(rows["value"]):
                line.fail(f"%{value} is not a value of this trace", column)
    returned = {word: only(rows, word, ()) for word in _LISTS}
    return Trace(
        rows["buffer"],
        rows["value"],
        rows["op"],
        boundary,
        donations=rows["donate"],
        **returned,
    )


def _buffer(line: Line) -> Buffer:
    number, role, nbytes = line.integer(), line.member(Role), line.nbytes()
    return Buffer(number, nbytes, role, line.accept("borrowed"), line.string() or "")


def _value(line: Line) -> Value:
    number = read_new_value(line)
    line.expect("on")
    buffer, dtype, shape = line.integer(), line.name(), _ints(line)
    line.expect("stride")
    stride = _ints(line)
    offset = line.integer() if line.accept("offset") else 0
    conj, neg = line.accept("conj"), line.accept("neg")
    return Value(number, buffer, dtype, shape, stride, offset, conj, neg)


def _ints(line: Line) -> tuple[int, ...]:
    found = line.take(_INTS, "a tuple of integers")
    return tuple(int(item) for item in found.strip("()").split(",") if item)


def _op(line: Line) -> Op:
    number, phase, target = line.integer(), line.member(Phase), line.name()
    args, kwargs = read_call(line)
    outputs: list[int | None] = []
    if line.accept("->"):
        outputs.append(_output(line))
        while line.accept(","):
            outputs.append(_output(line))
    effects = set()
    while line.accept("!"):
        effects.add(line.member(Effect))
    site = line.string() if line.accept("@") else ""
    if site is None:
        line.miss("a quoted site")
    return Op(number, target, args, tuple(outputs), phase, kwargs, frozenset(effects), site)


def _output(line: Line) -> int | None:
    return None if line.accept("_") else read_value(line)


def _donation(line: Line) -> Donation:
    op = line.integer()
    line.expect(":")
    source = read_value(line)
    line.expect("->")
    return Donation(op, source, read_value(line))


_THINGS: dict[str, Callable[[Line], Any]] = {
    "buffer": _buffer,
    "value": _value,
    "op": _op,
    "donate": _donation,
}
_LISTS: dict[str, Callable[[Line], Any]] = {
    "inputs": read_values,
    "outputs": read_args,
    "tangents": read_values,
    "gradients": read_args,
}
