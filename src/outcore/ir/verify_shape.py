"""verify_shape: check that a Program names only what exists, and the right slots of the caller.

A part of `verify_program`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

from outcore.errors import VerifyError
from outcore.ir.hardware import Tier
from outcore.ir.liveness import liveness
from outcore.ir.program import Action, Alloc, Copy, Free, Program, Run
from outcore.ir.text.program import instruction_text
from outcore.ir.trace import Ref, Trace

_AROUND = 3
"""Instructions shown before and after the faulty one."""


def fail(where: str, rule: str, detail: str, excerpt: str = "") -> NoReturn:
    """Raise VerifyError for a program."""
    raise VerifyError(noun="program", rule=rule, where=where, detail=detail, excerpt=excerpt)


def verify_shape(trace: Trace, program: Program) -> None:
    """Check that slots, ops, buffers and positions that are named exist, and that slots fit."""
    for index, slot in enumerate(program.slots):
        if slot.id != index:
            fail(f"slot {index}", "ids index", f"it has the id {slot.id}")
        if not 0 <= slot.buffer < len(trace.buffers):
            fail(f"slot s{index}", "a slot is of a buffer of the trace", f"buffer {slot.buffer}")
        size = trace.buffers[slot.buffer].nbytes
        if slot.nbytes < size:
            detail = f"{slot.nbytes} B for the {size} B of buffer {slot.buffer}"
            fail(f"slot s{index}", "a slot is as large as its buffer", detail)
        if slot.offset < 0:
            fail(f"slot s{index}", "no offset is negative", f"it is at {slot.offset}")
    if not 0 <= program.boundary <= len(program.body):
        rule = "the boundary is the first position of the backward call, or the end"
        detail = f"it is {program.boundary}, and there are {len(program.body)} instructions"
        fail("the boundary", rule, detail)
    for position, instruction in enumerate(program.body):
        _verify_named(trace, program, position, instruction.action)
        for earlier in (*instruction.after, *instruction.pace):
            if not 0 <= earlier < position:
                detail = f"it waits for {earlier}"
                rule = "an instruction waits for earlier ones"
                fail(f"instruction {position}", rule, detail, excerpt(program, position))


def _verify_named(trace: Trace, program: Program, position: int, action: Action) -> None:
    if isinstance(action, Run) and not 0 <= action.op < len(trace.ops):
        rule, detail = "a run is of an op of the trace", f"there are {len(trace.ops)} ops"
        fail(f"instruction {position}", rule, detail, excerpt(program, position))
    for slot in _slots_of(action):
        if not 0 <= slot < len(program.slots):
            rule, detail = "every slot that is named is listed", f"s{slot} is not"
            fail(f"instruction {position}", rule, detail, excerpt(program, position))


def _slots_of(action: Action) -> Iterable[int]:
    if isinstance(action, Alloc | Free):
        return (action.slot,)
    if isinstance(action, Copy):
        return (action.source, action.target)
    return (*action.reads, *action.writes, *(slot for pair in action.donate for slot in pair))


def excerpt(program: Program, position: int) -> str:
    """The instructions around `position`, which is marked with `>`."""
    low, high = max(0, position - _AROUND), position + _AROUND + 1
    return "\n".join(
        f"{'>' if index == position else ' '} {instruction_text(index, instruction)}"
        for index, instruction in enumerate(program.body[low:high], low)
    )


def verify_interface(trace: Trace, program: Program) -> None:
    """Check that the caller's slots are those of the trace's buffers, and on the device.

    What is the caller's is never freed or taken over: its slot is among the results, which outlive
    the body.
    """
    held = tuple(b for b, held in enumerate(liveness(trace).held) if held)
    inputs = trace.value_buffers(tuple(map(Ref, trace.inputs)))
    tangents = trace.value_buffers(tuple(map(Ref, trace.tangents)))
    _verify_list(program, "arguments", program.arguments, inputs)
    _verify_list(program, "tangents", program.tangents, tangents)
    results = sorted(program.results, key=lambda s: _buffer(program, s))
    _verify_list(program, "results", results, held)
    for slot in (*program.arguments, *program.tangents):
        buffer = program.slots[slot].buffer
        if trace.buffers[buffer].borrowed and slot not in program.results:
            detail = f"s{slot} of buffer {buffer} is not"
            fail("results", "the memory of the caller is what the caller keeps", detail)


def _buffer(program: Program, slot: int) -> int:
    return program.slots[slot].buffer if 0 <= slot < len(program.slots) else -1


def _verify_list(
    program: Program, name: str, slots: Sequence[int], expected: tuple[int, ...]
) -> None:
    for slot in slots:
        if not 0 <= slot < len(program.slots):
            fail(name, "every slot that is named is listed", f"s{slot} is not")
        if program.slots[slot].tier is not Tier.DEVICE:
            fail(name, f"the {name} are on the device", f"s{slot} is not")
    found = tuple(program.slots[s].buffer for s in slots)
    if found != expected:
        detail = f"buffers {numbers(found)} where the trace has {numbers(expected)}"
        fail(name, f"the {name} are those of the trace", detail)


def numbers(buffers: tuple[int, ...]) -> str:
    """Buffer ids for a message: `3, 4`, or `none`."""
    return ", ".join(map(str, buffers)) or "none"
