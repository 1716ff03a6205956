"""Executable: a generated program, ready to call."""

from __future__ import annotations

import linecache
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import CodeType
from typing import Any

import torch

from outcore.errors import StepError, VerifyError
from outcore.execute.codegen import NONE, Instruments, StepSource, generate, root_values
from outcore.execute.driver import Generator, Region
from outcore.gauges import Moment
from outcore.gc_paused import gc_paused
from outcore.ir.family import Family, family_of
from outcore.ir.hardware import Tier
from outcore.ir.layout import Layout
from outcore.ir.memory import private_bytes
from outcore.ir.program import Program, Run, Slot
from outcore.ir.trace import Effect, Trace, Value

_numbers = count()

DREW = (
    "op {op} {target} drew different random numbers when it was recomputed: another thread draws "
    "from torch's default generator, or seeds it; give that thread its own torch.Generator"
)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class StepCode:
    """The code of a generated program."""

    source: StepSource
    """What it was generated as."""
    parts: tuple[CodeType, ...]
    """Code that defines the two functions."""

    @property
    def text(self) -> str:
        """The generated source."""
        return self.source.forward + self.source.backward


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Executable:
    """Two compiled functions that run the forward and the backward call of a step.

    `forward(arguments, lane) -> (results, crossing)`; `backward(crossing, tangents, lane) ->
    gradients`. Both empty the lists that they are given.
    """

    trace: Trace | None
    """The trace of `program`; None as that."""
    program: Program | None
    """The program that the functions were generated from; None if the graph runs as torch captured
    it."""
    forward: Callable[[list[Any], Any], tuple[tuple[Any, ...], list[Any]]]
    """Returns the results for the caller, and `crossing`: what the backward call needs."""
    backward: Callable[[list[Any], list[Any], Any], tuple[Any, ...]]
    """Returns the gradients."""
    regions: dict[int, Region]
    """Slot in an outer tier -> what it holds, for `Driver.open_lane`."""
    code: StepCode | None
    """The code of the two functions; None without a program."""
    layout: Layout | None = None
    """Where large tensors lie on a GPU; None: where the allocator finds room."""
    private_bytes: int = 0
    """Device bytes that an outstanding call alone holds, by its program (`ir.memory`)."""
    private: tuple[int, ...] = ()
    """Positions in `crossing` of the tensors that hold them."""
    copies: tuple[int, ...] = ()
    """Positions in `crossing` of the handles of copies."""

    @property
    def text(self) -> str:
        """The generated source; empty without a program."""
        return "" if self.code is None else self.code.text


def build(
    trace: Trace,
    program: Program,
    generator: Generator,
    instruments: Instruments = NONE,
    note: Callable[[int, Moment, Moment], None] | None = None,
    check: Callable[[int, tuple[Any, ...], tuple[Any, ...]], None] | None = None,
    clock: Callable[[], Moment] = time.time_ns,
    layout: Layout | None = None,
) -> Executable:
    """Generate and compile `program`; tensors lie as `layout` says, if it is given.

    `note(position, start, stop)` gets the readings of `clock()` around each run, if the instruments
    say `timed`. `check(op, results, arguments)` gets what each op's first run returned and read, in
    the phases that are `checked`.

    Raises VerifyError for a program with variants of ops: torch has none (docs/decisions/0010).
    """
    _refuse_variants(trace, program)
    code = _code(trace, program, instruments, layout)
    source = code.source
    names: dict[str, Any] = {
        **source.names,
        **{name: partial(verb, trace) for name, verb in source.bound.items()},
        **{name: number.of_trace(trace) for name, number in source.numbers.items()},
        "clock": clock,
        "note": note,
        "check": check,
    }
    random = {op.id: op.target for op in trace.ops if Effect.RANDOM in op.effects}
    if random:
        names |= {
            "drawing": drawing(),
            "generator_state": generator.get_state,
            "restore_generator": generator.set_state,
            "same_draws": partial(_same_draws, random),
            "stack": torch.stack,
        }
    for part in code.parts:
        exec(part, names)  # noqa: S102 - our own generated text
    return Executable(
        trace,
        program,
        # They hold the names: if the names held them, only the garbage collector would free both.
        names.pop("forward"),
        names.pop("backward"),
        _regions(trace, program),
        code,
        layout,
        private_bytes(trace, program),
        source.private,
        source.copies,
    )


def _code(
    trace: Trace, program: Program, instruments: Instruments, layout: Layout | None
) -> StepCode:
    """The functions of `program`. Those of programs of one family that do the same are shared."""
    family = family_of(trace)
    shared = None if family is None or layout is not None else family.code_of(program)
    if shared is None:
        return _compile(trace, program, instruments, layout)
    if instruments not in shared:
        shared[instruments] = _compile(trace, program, instruments, family=family)
    found: StepCode = shared[instruments]
    return found


def _compile(
    trace: Trace,
    program: Program,
    instruments: Instruments,
    layout: Layout | None = None,
    *,
    family: Family | None = None,
) -> StepCode:
    with gc_paused():
        source = generate(trace, program, instruments, layout, family=family)
    # A unique file name, known to linecache, makes tracebacks show the generated line.
    file = f"<outcore program {next(_numbers)}>"
    before = "\n" * source.forward.count("\n")
    # Compiled together they need twice the memory.
    parts = [compile(each, file, "exec") for each in (source.forward, before + source.backward)]
    code = StepCode(source, tuple(parts))
    text = code.text
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    weakref.finalize(code, linecache.cache.pop, file, None).atexit = False
    return code


def drawing() -> AbstractContextManager[Any]:
    """The lock to hold while a random op runs, because several threads draw from one generator.

    It is dynamo's own lock. Dynamo holds it while it compiles, on any thread, and ends by setting
    the generator back to its state from before the compilation.
    """
    from torch._dynamo.convert_frame import compile_lock  # noqa: PLC0415 - loads all of dynamo

    return compile_lock


def _same_draws(
    targets: Mapping[int, str], op: int, expected: torch.Tensor, state: torch.Tensor
) -> None:
    """Raise StepError unless `op` left the generator in the state that its first run left it in.

    If the states differ, another thread drew during one of the two runs, so the op drew other
    numbers.
    """
    if not torch.equal(expected, state):
        raise StepError(reason=DREW.format(op=op, target=targets[op]))


def _refuse_variants(trace: Trace, program: Program) -> None:
    """Raise VerifyError if an op of `program` is to run by an alternative algorithm."""
    for position, instruction in enumerate(program.body):
        run = instruction.action
        if isinstance(run, Run) and run.variant:
            raise VerifyError(
                noun="program",
                rule="what is executed runs as torch runs it, without variants",
                where=f"instruction {position}",
                detail=f"variant {run.variant} of op {run.op} {trace.ops[run.op].target}",
            )


def _regions(trace: Trace, program: Program) -> dict[int, Region]:
    """Describe what each slot in an outer tier holds."""
    roots = root_values(trace)
    return {
        slot.id: _region(slot, trace.buffers[slot.buffer].nbytes, roots[slot.buffer])
        for slot in program.slots
        if slot.tier is not Tier.DEVICE
    }


def _region(slot: Slot, nbytes: int, root: Value) -> Region:
    dtype = getattr(torch, root.dtype)
    return Region(slot.offset, nbytes, dtype, root.shape, root.stride, slot.tier, root.offset)
