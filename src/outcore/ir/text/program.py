"""program: print and read the text form of a Program."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from outcore.ir.hardware import Tier
from outcore.ir.program import Action, Alloc, Copy, Free, Instruction, Program, Run, Slot, Stream
from outcore.ir.text.rows import Lines, named, only, read_rows, row
from outcore.ir.text.scan import DIGITS, INTEGER, Line

_SLOT = re.compile(rf"s{DIGITS}", re.ASCII)
_DONATED = re.compile(rf"{_SLOT.pattern}:{_SLOT.pattern}", re.ASCII)


def print_program(program: Program) -> Iterator[str]:
    """The lines of a Program."""
    yield row(
        f"program boundary {program.boundary}",
        named("trace", program.trace_digest),
        named("plan", program.plan_digest),
    )
    yield from map(_slot_text, program.slots)
    yield row("arguments", _slot_names(program.arguments))
    yield row("tangents", _slot_names(program.tangents))
    yield row("results", _slot_names(program.results))
    for position, instruction in enumerate(program.body):
        yield instruction_text(position, instruction)


def _slot_text(slot: Slot) -> str:
    text = f"slot s{slot.id} buffer {slot.buffer} {slot.tier.value} {slot.nbytes} B"
    return row(text, f"at {slot.offset}" if slot.offset else "")


def instruction_text(position: int, instruction: Instruction) -> str:
    """One instruction at its body position: `17: compute run 12 s3 s4 -> s9 after 15 16`."""
    return row(
        f"{position}: {instruction.stream.value} {_action_text(instruction.action)}",
        _positions("after", instruction.after),
        _positions("pace", instruction.pace),
    )


def _action_text(action: Action) -> str:
    if isinstance(action, Alloc):
        return f"alloc s{action.slot}"
    if isinstance(action, Free):
        return f"free s{action.slot}"
    if isinstance(action, Copy):
        return f"copy s{action.source} -> s{action.target}"
    donated = " ".join(f"s{source}:s{target}" for source, target in action.donate)
    return row(
        f"{'rerun' if action.again else 'run'} {action.op}",
        f"variant {action.variant}" if action.variant else "",
        _slot_names(action.reads),
        f"-> {_slot_names(action.writes)}" if action.writes else "",
        f"donate {donated}" if donated else "",
    )


def _slot_names(slots: Iterable[int]) -> str:
    return " ".join(f"s{slot}" for slot in slots)


def _positions(word: str, positions: tuple[int, ...]) -> str:
    return f"{word} {' '.join(map(str, positions))}" if positions else ""


def read_program(lines: Lines) -> Program:
    """A Program from its lines. Raises ParseError."""
    head, *rest = lines
    head.expect("program", "boundary")
    boundary = head.integer()
    trace_digest = head.name() if head.accept("trace") else ""
    plan_digest = head.name() if head.accept("plan") else ""
    head.end()
    body = [line for line in rest if line.sees(INTEGER)]
    others = [line for line in rest if not line.sees(INTEGER)]
    rows = read_rows(others, {"slot": _slot, **_LISTS}, once=_LISTS)
    return Program(
        slots=rows["slot"],
        body=tuple(_instruction(position, line) for position, line in enumerate(body)),
        boundary=boundary,
        **{word: only(rows, word, ()) for word in _LISTS},
        trace_digest=trace_digest,
        plan_digest=plan_digest,
    )


def _slots(line: Line) -> tuple[int, ...]:
    return line.integers("s")


def _slot_id(line: Line) -> int:
    return int(line.take(_SLOT, "a slot like s12")[1:])


def _slot(line: Line) -> Slot:
    number = _slot_id(line)
    line.expect("buffer")
    buffer, tier, nbytes = line.integer(), line.member(Tier), line.nbytes()
    return Slot(number, buffer, tier, nbytes, line.integer() if line.accept("at") else 0)


def _instruction(position: int, line: Line) -> Instruction:
    line.expect(str(position), ":")
    stream, action = line.member(Stream), _action(line)
    after, pace = line.integers_after("after"), line.integers_after("pace")
    line.end()
    return Instruction(action, stream, after, pace)


def _action(line: Line) -> Action:
    if line.accept("alloc"):
        return Alloc(_slot_id(line))
    if line.accept("free"):
        return Free(_slot_id(line))
    if line.accept("copy"):
        source = _slot_id(line)
        line.expect("->")
        return Copy(source, _slot_id(line))
    again = line.accept("rerun")
    if not again and not line.accept("run"):
        line.miss("alloc or free or copy or run or rerun")
    op = line.integer()
    variant = line.integer() if line.accept("variant") else 0
    reads = _slots(line)
    writes = line.integers_after("->", "s")
    donate = _donated(line) if line.accept("donate") else ()
    return Run(op, reads, writes, donate, again, variant)


def _donated(line: Line) -> tuple[tuple[int, int], ...]:
    pairs = []
    if not line.sees(_DONATED):
        line.miss("a pair of slots like s3:s4")
    while (pair := line.find(_DONATED)) is not None:
        source, target = pair.split(":")
        pairs.append((int(source[1:]), int(target[1:])))
    return tuple(pairs)


_LISTS: dict[str, Callable[[Line], Any]] = {
    "arguments": _slots,
    "tangents": _slots,
    "results": _slots,
}
