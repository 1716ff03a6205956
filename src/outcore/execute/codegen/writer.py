"""writer: write the source of a Program as two straight-line Python functions.

`forward(A, L)` gets the list of arguments and a lane of the driver. It returns (results, crossing):
what the caller gets, and the locals that the backward call needs. `backward(C, T, L)` gets those
locals, the list of tangents and the lane, and returns the gradients. Both empty the lists. All
decisions are already made: the functions consist of calls, copies, waits and `del`.

If the text is for all traces of a family, numbers that hang on sizes are globals.

If a Layout says where slots lie, `place` precedes each instruction that requests memory and
`placed` follows it. Results are `moved`, or made `at_home`.

Names: `s3` is slot 3, `k17` the copy at body position 17, `r5` the generator's states before and
after op 5's first run, `o2` the third distinct op, `g0` a view that is several gradients, `n4` the
fifth number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from outcore import aten
from outcore.execute.codegen.numbers import Number
from outcore.execute.codegen.operands import Operands, lies_as
from outcore.execute.codegen.source import NONE, Instruments, StepSource
from outcore.execute.codegen.text import apart, indented, made_once, names_in, tuple_of, unpack
from outcore.execute.codegen.waits import copy_waits
from outcore.execute.laid import as_declared, relaid
from outcore.ir.family import Family
from outcore.ir.hardware import Tier
from outcore.ir.layout import Layout
from outcore.ir.memory import private_slots
from outcore.ir.program import Copy, Free, Instruction, Program, Run, Stream
from outcore.ir.trace import Arg, Effect, Op, Ref, Trace, refs


def generate(
    trace: Trace,
    program: Program,
    instruments: Instruments = NONE,
    layout: Layout | None = None,
    *,
    family: Family | None = None,
) -> StepSource:
    """Generate the source of `program`. Takes time linear in the number of instructions.

    `family`: that of the trace, if the text is to be the same for all its traces.
    """
    return _Writer(trace, program, instruments, layout, family).write()


class _Writer:
    """Writes the text of the two functions of one program."""

    def __init__(
        self,
        trace: Trace,
        program: Program,
        instruments: Instruments,
        layout: Layout | None,
        family: Family | None,
    ) -> None:
        self.trace, self.program, self.instruments = trace, program, instruments
        self.layout, self.slots = layout, program.slots
        self.operands = Operands(trace, family)
        self.bound: dict[str, Callable[..., object]] = {}
        """As `StepSource.bound`."""
        self.read_as_captured = self._read_as_captured()
        """Buffers whose bytes are read from where the trace says that they are."""
        self.replayed = {
            x.action.op for x in program.body if isinstance(x.action, Run) and x.action.again
        }
        """Ops that run more than once."""
        self.waits = copy_waits(program.body)
        """Body position -> the copies that it waits for."""

    def write(self) -> StepSource:
        """Write both functions."""
        body, cut = self.program.body, self.program.boundary
        forward = [line for i in range(cut) for line in self._instruction(i, body[i])]
        backward = [line for i in range(cut, len(body)) for line in self._instruction(i, body[i])]
        outputs = tuple_of(apart(self._results(self.trace.outputs)))
        views, named = made_once(self._results(self.trace.gradients))
        backward, gradients = [*backward, *views], tuple_of(named)
        crossing = self._crossing(forward, [*backward, gradients])
        arguments = unpack(self._values(self.trace.inputs), "A")
        tangents = unpack(self._values(self.trace.tangents), "T")
        forward = [
            "def forward(A, L):",
            *indented((*self._verbs(forward), *arguments, *forward)),
            f"    return {outputs}, [{', '.join(self._crossed(n) for n in crossing)}]",
        ]
        backward = [
            "def backward(C, T, L):",
            *indented((*self._verbs(backward), *unpack(crossing, "C"), *tangents, *backward)),
            f"    return {gradients}",
        ]
        private = {f"s{slot.id}" for slot in private_slots(self.trace, self.program)}
        return StepSource(
            "\n".join([*forward, "", ""]),
            "\n".join([*backward, ""]),
            self.operands.names,
            self.bound,
            self.operands.numbers,
            tuple(i for i, name in enumerate(crossing) if name in private),
            tuple(i for i, name in enumerate(crossing) if name[0] == "k"),
        )

    def _verbs(self, lines: Iterable[str]) -> Iterator[str]:
        """Lines that bind the methods of the lane that `lines` call."""
        text = "\n".join(lines)
        for verb in _VERBS:
            if f"{verb}(" in text:
                yield f"{verb} = L.{verb}"

    def _crossing(self, forward: list[str], backward: list[str]) -> list[str]:
        """Names that the forward function makes or gets, and the backward function reads."""
        made = {n for line in forward for n in names_in(line)}
        made |= {n for v in self._values(self.trace.inputs) for n in names_in(v)}
        own = {n for v in self._values(self.trace.tangents) for n in names_in(v)}
        read = dict.fromkeys(n for line in backward for n in names_in(line))
        made -= {n for line in forward if line.startswith("del ") for n in names_in(line)}
        return [n for n in read if n in made and n not in own]

    def _crossed(self, name: str) -> str:
        """`name` as it is passed to the backward call.

        A tensor object that the caller gets must not be held: autograd makes it the owner of the
        whole graph, which would then never be freed.
        """
        outputs = self.trace.value_buffers(self.trace.outputs)
        given = name[0] == "s" and self.slots[int(name[1:])].buffer in outputs
        return f"{name}.detach()" if given else name

    def _values(self, values: Iterable[int]) -> list[str]:
        """The names of the slots of `values`, which the caller passes."""
        slots = {self.slots[s].buffer: s for s in (*self.program.arguments, *self.program.tangents)}
        return [f"s{slots[self.trace.values[v].buffer]}" for v in values]

    def _results(self, results: tuple[Arg, ...]) -> list[str]:
        """Each of `results`, as text."""
        self.operands.slot_of = {self.slots[s].buffer: s for s in self.program.results}
        return [self.operands.arg(r) for r in results]

    # ---- instructions ---------------------------------------------------------------------------

    def _instruction(self, position: int, instruction: Instruction) -> Iterator[str]:
        """The lines of one instruction."""
        action = instruction.action
        if instruction.stream is Stream.COMPUTE:
            for copy in self.waits.get(position, ()):
                yield f"wait(k{copy})"
        if isinstance(action, Run):
            yield from self._placing(position, self._run(position, action), action.writes)
        elif isinstance(action, Copy):
            yield from self._placing(position, [self._copy(position, action)], [action.target])
        elif isinstance(action, Free) and self.slots[action.slot].tier is Tier.DEVICE:
            if self.instruments.poisoned:
                yield f"discard(s{action.slot})"
            yield f"del s{action.slot}"

    def _placing(self, position: int, lines: Iterable[str], slots: Iterable[int]) -> Iterator[str]:
        """Wrap `lines`, which allocate `slots`, so that the slots lie as the layout says."""
        layout = self.layout
        if layout is not None and position in layout.at_home:
            yield "with at_home() as made:"
            yield from indented([*lines, f"made += {', '.join(f's{slot}' for slot in slots)},"])
            return
        if layout is None or position not in layout.moves:
            yield from lines
            return
        if layout.moves[position]:
            yield f"place({position})"
        yield from lines
        asked = [slot for slot in dict.fromkeys(slots) if layout.positions.get(slot) == position]
        for slot in asked:
            yield f"placed({slot}, s{slot})"
        for slot in layout.guests.intersection(asked):
            yield f"s{slot} = moved(s{slot})"

    def _copy(self, position: int, copy: Copy) -> str:
        """The line that issues a copy."""
        after = "".join(f", k{i}" for i in self.waits.get(position, ()))
        if self.slots[copy.source].tier is Tier.DEVICE:
            return f"k{position} = copy_out(s{copy.source}, {copy.target}{after})"
        return f"s{copy.target}, k{position} = copy_in({copy.source}{after})"

    def _run(self, position: int, run: Run) -> Iterator[str]:
        """The lines that run an op."""
        op = self.trace.ops[run.op]
        self.operands.slot_of = {self.slots[s].buffer: s for s in (*run.reads, *run.writes)}
        call = [self._call(op, run)]
        if self.instruments.timed:
            call = ["t = clock()", *call, f"note({position}, t, clock())"]
        yield from self._drawing(op, call, again=run.again) if Effect.RANDOM in op.effects else call
        for source, _ in run.donate:
            yield f"del s{source}"
        if op.phase in self.instruments.checked and not run.again:
            made = "".join(f"{self.operands.made(v)}, " for v in op.outputs)
            given = {source for source, _ in run.donate}
            read = "".join(f"s{s}, " for s in run.reads if s not in given)
            yield f"check({op.id}, ({made}), ({read}))"
        else:
            yield from self._as_captured(op)

    def _as_captured(self, op: Op) -> Iterator[str]:
        """Lines that lay out results as captured, should the op lay them out differently now."""
        opaque = aten.is_opaque(op.target)
        for made in op.outputs:
            value = None if made is None else self.trace.values[made]
            if value is None or not (opaque or value.buffer in self.read_as_captured):
                continue
            name, verb = self.operands.made(made), relaid
            differs = ""
            if not opaque:
                offset = self.operands.number(Number("offset", value.id))
                stride = self.operands.number(Number("stride", value.id))
                at = f" or {name}.storage_offset() != {offset}"
                differs = f"if {name}.stride() != {stride}{at}: "
            elif value.buffer not in self.read_as_captured:
                verb = as_declared
            self.bound[verb.__name__] = verb
            yield f"{differs}{name} = {verb.__name__}({op.id}, {value.id}, {name})"

    def _drawing(self, op: Op, call: list[str], *, again: bool) -> Iterator[str]:
        """Wrap the call of a random op so that no other program draws meanwhile.

        When the op runs again, it draws the same numbers as at first, and later ops draw as if it
        had not run again.
        """
        states = f"r{op.id}"
        if again:
            same = f"same_draws({op.id}, {states}[1], generator_state())"
            restored = ["q = generator_state()", f"restore_generator({states}[0])"]
            finally_ = ["finally:", *indented(["restore_generator(q)"])]
            call = [*restored, "try:", *indented([*call, same]), *finally_]
        elif op.id in self.replayed:
            both = f"{states} = stack(({states}, generator_state()))"
            call = [f"{states} = generator_state()", *call, both]
        yield "with drawing:"
        yield from indented(call)

    def _call(self, op: Op, run: Run) -> str:
        """The call of an op, as an assignment to the slots that it writes."""
        overload = aten.resolve(op.target)
        if run.donate and overload.namespace == aten.FUSED:
            return self._call_over(op, run)
        args = self.operands.args(op)
        if run.donate:
            (source, target), (positions, out) = run.donate[0], aten.DONATIONS[op.target]
            over = next(args[i] for i in positions if self._lies_in(op.args[i], source))
            args += [f"{out}={over}"] if out else []
            return f"s{target} = {self.operands.name(aten.in_place(op.target))}({', '.join(args)})"
        call = f"{self.operands.name(overload)}({', '.join(args)})"
        if aten.returns_one(overload):
            if self._follows_caller(op):
                call = self.operands.laid(call, op)
            return f"{self.operands.made(op.outputs[0])} = {call}"
        if not op.outputs:
            return call
        made = ", ".join("_" if v is None else self.operands.made(v) for v in op.outputs)
        return f"{made}, = {call}"

    def _lies_in(self, arg: Arg, slot: int) -> bool:
        """Whether `arg` is a tensor in `slot`."""
        buffer = self.slots[slot].buffer
        return isinstance(arg, Ref) and self.trace.values[arg.value].buffer == buffer

    def _call_over(self, op: Op, run: Run) -> str:
        """The call of a fused op that writes over donated arguments."""
        (given,) = op.args
        sources = {self.slots[source].buffer for source, _ in run.donate}
        buffers = [self.trace.values[r.value].buffer for r in refs(given)]
        donated = [i for i, buffer in enumerate(buffers) if buffer in sources]
        name = f"over_{op.target.split('.')[1]}"
        self.operands.names[name] = aten.WRITING_OVER[op.target]
        made = ", ".join("_" if v is None else self.operands.made(v) for v in op.outputs)
        return f"{made}, = {name}({self.operands.arg(given)}, {donated})"

    def _follows_caller(self, op: Op) -> bool:
        """Whether the result lies in its storage as a tensor of the caller does, at any offset."""
        into = op.args[0] if op.target in aten.WRITES else None
        if not isinstance(into, Ref):
            return False
        return self.trace.buffers[self.trace.values[into.value].buffer].borrowed

    def _read_as_captured(self) -> set[int]:
        """Buffers that are viewed, copied, or written over in order.

        Others are only passed on to ops, as their own op made them.
        """
        found = {
            v.buffer for v in self.trace.values if not lies_as(v, self.operands.roots[v.buffer])
        }
        for action in (each.action for each in self.program.body):
            if isinstance(action, Copy):
                found.add(self.slots[action.source].buffer)
            elif isinstance(action, Run) and self.trace.ops[action.op].target in aten.IN_ORDER:
                found.update(self.slots[source].buffer for source, _ in action.donate)
        return found


_VERBS = ("copy_out", "copy_in", "wait", "discard", "place", "placed", "moved", "at_home")
"""Methods of lanes that generated code calls."""
