"""codegen: generate the source of a Program as two straight-line Python functions.

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

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from outcore import aten
from outcore.execute.laid import as_declared, laid, reinterpret, relaid
from outcore.ir.family import Family
from outcore.ir.hardware import Tier
from outcore.ir.layout import Layout
from outcore.ir.memory import private_slots
from outcore.ir.program import Copy, Free, Instruction, Program, Run, Stream
from outcore.ir.trace import Arg, Effect, Op, Phase, Ref, Symbol, Trace, Value, refs
from outcore.ir.verify import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Instruments:
    """What a generated program does in addition to the step: nothing, by default."""

    timed: bool = False
    """Call `note(position, start, stop)` after each Run, with readings of the clock around it."""
    checked: tuple[Phase, ...] = ()
    """Call `check(op, results, arguments)` after the first Run of each op of these phases."""
    poisoned: bool = False
    """Call `discard(tensor)` before memory is freed."""


NONE = Instruments()


@dataclass(frozen=True, slots=True)
class Number:
    """Where a trace says a number, or several.

    `what`: `shape`, `stride` or `offset` of Value `of`; `delta` or `bytes_after`, how far that
    begins after the Value `at`; `nbytes` of Buffer `of`; `arg`, that of op `of` at the path `at`.
    """

    what: str
    of: int
    at: tuple[int, ...] = ()

    def of_trace(self, trace: Trace) -> object:
        """The number."""
        return _NUMBERS[self.what](trace, self.of, self.at)


def _arg_at(trace: Trace, op: int, path: tuple[int, ...]) -> object:
    found: Any = trace.ops[op].arguments
    for index in path:
        found = found[index]
    return found


def _delta(trace: Trace, value: int, of: tuple[int, ...]) -> int:
    return trace.values[value].offset - trace.values[of[0]].offset


def _bytes_after(trace: Trace, value: int, of: tuple[int, ...]) -> int:
    here, root = trace.values[value], trace.values[of[0]]
    return here.offset * ITEM_BYTES[here.dtype] - root.offset * ITEM_BYTES[root.dtype]


_NUMBERS: Final[dict[str, Callable[[Trace, int, tuple[int, ...]], object]]] = {
    "shape": lambda trace, of, _: trace.values[of].shape,
    "stride": lambda trace, of, _: trace.values[of].stride,
    "offset": lambda trace, of, _: trace.values[of].offset,
    "nbytes": lambda trace, of, _: trace.buffers[of].nbytes,
    "delta": _delta,
    "bytes_after": _bytes_after,
    "arg": _arg_at,
}

_LIE: Final = "shape", "stride", "offset"
"""What says how a Value lies in its buffer."""


@dataclass(slots=True)
class StepSource:
    """The generated text of both functions."""

    forward: str
    backward: str
    names: dict[str, object] = field(default_factory=dict)
    """The globals that the text needs, besides those that `build` adds."""
    bound: dict[str, Callable[..., object]] = field(default_factory=dict)
    """Global -> the function that it is, bound to the trace as its first argument."""
    numbers: dict[str, Number] = field(default_factory=dict)
    """Global -> where the trace says which number it is."""
    private: tuple[int, ...] = ()
    """Positions in what crosses of the tensors that only outcore holds (`ir.memory`)."""
    copies: tuple[int, ...] = ()
    """Positions in what crosses of the handles of copies."""


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
        self.layout, self.family = layout, family
        self.slots = program.slots
        self.names: dict[str, object] = {}
        """Globals of the generated text."""
        self.bound: dict[str, Callable[..., object]] = {}
        """As `StepSource.bound`."""
        self.numbers: dict[Number, str] = {}
        """Where a number comes from -> its name."""
        self.ops: dict[str, str] = {}
        """Overload -> its name in the text."""
        self.roots = root_values(trace)
        """Per buffer, the Value that its slot's tensor has."""
        self.read_as_captured = self._read_as_captured()
        """Buffers whose bytes are read from where the trace says that they are."""
        self.slot_of: dict[int, int] = {}
        """Buffer -> slot, for the arguments and results of the line being written."""
        self.replayed = {
            x.action.op for x in program.body if isinstance(x.action, Run) and x.action.again
        }
        """Ops that run more than once."""
        self.last_copy: dict[int, int] = {}
        """Body position on a copy stream -> the last copy at or before it on that stream."""
        self.waits = self._copy_waits()
        """Body position -> the copies that it waits for."""

    def write(self) -> StepSource:
        """Write both functions."""
        body, cut = self.program.body, self.program.boundary
        forward = [line for i in range(cut) for line in self._instruction(i, body[i])]
        backward = [line for i in range(cut, len(body)) for line in self._instruction(i, body[i])]
        outputs = _tuple(_apart(self._results(self.trace.outputs)))
        views, named = _made_once(self._results(self.trace.gradients))
        backward, gradients = [*backward, *views], _tuple(named)
        crossing = self._crossing(forward, [*backward, gradients])
        arguments = _unpack(self._values(self.trace.inputs), "A")
        tangents = _unpack(self._values(self.trace.tangents), "T")
        forward = [
            "def forward(A, L):",
            *_indent((*self._verbs(forward), *arguments, *forward)),
            f"    return {outputs}, [{', '.join(self._crossed(n) for n in crossing)}]",
        ]
        backward = [
            "def backward(C, T, L):",
            *_indent((*self._verbs(backward), *_unpack(crossing, "C"), *tangents, *backward)),
            f"    return {gradients}",
        ]
        private = {f"s{slot.id}" for slot in private_slots(self.trace, self.program)}
        return StepSource(
            "\n".join([*forward, "", ""]),
            "\n".join([*backward, ""]),
            self.names,
            self.bound,
            {name: number for number, name in self.numbers.items()},
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
        made = {n for line in forward for n in _names(line)}
        made |= {n for v in self._values(self.trace.inputs) for n in _names(v)}
        own = {n for v in self._values(self.trace.tangents) for n in _names(v)}
        read = dict.fromkeys(n for line in backward for n in _names(line))
        made -= {n for line in forward if line.startswith("del ") for n in _names(line)}
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
        self.slot_of = {self.slots[s].buffer: s for s in self.program.results}
        return [self._arg(r) for r in results]

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
            yield from _indent([*lines, f"made += {', '.join(f's{slot}' for slot in slots)},"])
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

    def _copy_waits(self) -> dict[int, tuple[int, ...]]:
        """Map each body position to the copies on other streams that it must wait for.

        Allocs and frees of the outer tiers generate no calls. A wait for one becomes a wait for the
        last copy before it on its stream. A wait by one becomes a wait by the next copy on its
        stream.
        """
        latest: dict[Stream, int] = {}
        carried: dict[Stream, set[int]] = {Stream.OUT: set(), Stream.IN: set()}
        waits: dict[int, tuple[int, ...]] = {}
        for position, instruction in enumerate(self.program.body):
            stream = instruction.stream
            if isinstance(instruction.action, Copy):
                latest[stream] = position
            if stream is not Stream.COMPUTE and stream in latest:
                self.last_copy[position] = latest[stream]
            before = (*instruction.after, *instruction.pace)
            copies = {self.last_copy[i] for i in before if i in self.last_copy}
            if stream is Stream.COMPUTE:
                waits[position] = tuple(sorted(copies))
                continue
            carried[stream] |= copies
            if isinstance(instruction.action, Copy):
                waits[position] = tuple(sorted(carried[stream] - {position}))
                carried[stream] = set()
        return waits

    def _copy(self, position: int, copy: Copy) -> str:
        """The line that issues a copy."""
        after = "".join(f", k{i}" for i in self.waits.get(position, ()))
        if self.slots[copy.source].tier is Tier.DEVICE:
            return f"k{position} = copy_out(s{copy.source}, {copy.target}{after})"
        return f"s{copy.target}, k{position} = copy_in({copy.source}{after})"

    def _run(self, position: int, run: Run) -> Iterator[str]:
        """The lines that run an op."""
        op = self.trace.ops[run.op]
        self.slot_of = {self.slots[s].buffer: s for s in (*run.reads, *run.writes)}
        call = [self._call(op, run)]
        if self.instruments.timed:
            call = ["t = clock()", *call, f"note({position}, t, clock())"]
        yield from self._drawing(op, call, again=run.again) if Effect.RANDOM in op.effects else call
        for source, _ in run.donate:
            yield f"del s{source}"
        if op.phase in self.instruments.checked and not run.again:
            made = "".join(f"{self._made(v)}, " for v in op.outputs)
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
            name, verb = self._made(made), relaid
            differs = ""
            if not opaque:
                offset = self._number(Number("offset", value.id))
                stride = self._number(Number("stride", value.id))
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
            finally_ = ["finally:", *_indent(["restore_generator(q)"])]
            call = [*restored, "try:", *_indent([*call, same]), *finally_]
        elif op.id in self.replayed:
            both = f"{states} = stack(({states}, generator_state()))"
            call = [f"{states} = generator_state()", *call, both]
        yield "with drawing:"
        yield from _indent(call)

    def _made(self, value: int | None) -> str:
        """The name of the slot of a result; "None" for a result that is not returned."""
        return "None" if value is None else f"s{self.slot_of[self.trace.values[value].buffer]}"

    def _call(self, op: Op, run: Run) -> str:
        """The call of an op, as an assignment to the slots that it writes."""
        overload = aten.resolve(op.target)
        if run.donate and overload.namespace == aten.FUSED:
            return self._call_over(op, run)
        args = self._args(op)
        if run.donate:
            (source, target), (positions, out) = run.donate[0], aten.DONATIONS[op.target]
            over = next(args[i] for i in positions if self._lies_in(op.args[i], source))
            args += [f"{out}={over}"] if out else []
            return f"s{target} = {self._name(aten.in_place(op.target))}({', '.join(args)})"
        call = f"{self._name(overload)}({', '.join(args)})"
        if aten.returns_one(overload):
            if self._follows_caller(op):
                call = self._laid(call, op)
            return f"{self._made(op.outputs[0])} = {call}"
        if not op.outputs:
            return call
        made = ", ".join("_" if v is None else self._made(v) for v in op.outputs)
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
        self.names[name] = aten.WRITING_OVER[op.target]
        made = ", ".join("_" if v is None else self._made(v) for v in op.outputs)
        return f"{made}, = {name}({self._arg(given)}, {donated})"

    def _follows_caller(self, op: Op) -> bool:
        """Whether the result lies in its storage as a tensor of the caller does, at any offset."""
        into = op.args[0] if op.target in aten.WRITES else None
        if not isinstance(into, Ref):
            return False
        return self.trace.buffers[self.trace.values[into.value].buffer].borrowed

    def _laid(self, call: str, op: Op) -> str:
        """`call`, with its result at the captured offset in a storage of the captured size."""
        made = op.outputs[0]
        assert made is not None  # noqa: S101 - the op has no other result
        value = self.trace.values[made]
        numbers = (("nbytes", value.buffer), *((name, value.id) for name in _LIE))
        self.names["laid"] = laid
        return f"laid({call}, {', '.join(self._number(Number(*each)) for each in numbers)})"

    def _name(self, overload: torch._ops.OpOverload) -> str:
        """The name of `overload` in the text."""
        key = str(overload)
        if key not in self.ops:
            self.ops[key] = f"o{len(self.ops)}"
            self.names[self.ops[key]] = aten.callable_of(overload)
        return self.ops[key]

    def _read_as_captured(self) -> set[int]:
        """Buffers that are viewed, copied, or written over in order.

        Others are only passed on to ops, as their own op made them.
        """
        found = {v.buffer for v in self.trace.values if not _lies_as(v, self.roots[v.buffer])}
        for action in (each.action for each in self.program.body):
            if isinstance(action, Copy):
                found.add(self.slots[action.source].buffer)
            elif isinstance(action, Run) and self.trace.ops[action.op].target in aten.IN_ORDER:
                found.update(self.slots[source].buffer for source, _ in action.donate)
        return found

    # ---- arguments ------------------------------------------------------------------------------

    def _number(self, number: Number) -> str:
        """A number, or several, as text: by name if the text is for several sizes."""
        if self.family is None:
            return repr(number.of_trace(self.trace))
        return self.numbers.setdefault(number, f"n{len(self.numbers)}")

    def _args(self, op: Op) -> list[str]:
        """The arguments of a call, as text."""
        if self.family is None or op.id not in self.family.sized_ops:
            args = [self._arg(a) for a in op.arguments]
        else:
            numbered = enumerate(op.arguments)
            args = [self._sized(a, Number("arg", op.id, (i,))) for i, a in numbered]
        named = len(op.args)
        keywords = (name for name, _ in op.kwargs)
        return args[:named] + [f"{k}={a}" for k, a in zip(keywords, args[named:], strict=True)]

    def _sized(self, arg: Arg, number: Number) -> str:
        """An argument that may hang on sizes; `number`: where it is."""
        if isinstance(arg, tuple):
            numbered = enumerate(arg)
            parts = (self._sized(a, replace(number, at=(*number.at, i))) for i, a in numbered)
            return "[" + ", ".join(parts) + "]"
        is_number = isinstance(arg, int | float) and not isinstance(arg, bool)
        return self._number(number) if is_number else self._arg(arg)

    def _arg(self, arg: Arg) -> str:
        """An argument of an op, as text."""
        if isinstance(arg, Ref):
            return self._value(self.trace.values[arg.value])
        if isinstance(arg, tuple):
            return "[" + ", ".join(map(self._arg, arg)) + "]"
        if isinstance(arg, Symbol):
            return self._symbol(arg)
        if isinstance(arg, float):
            return f"float({str(arg)!r})" if arg - arg != 0 else repr(arg)
        return repr(arg)

    def _symbol(self, symbol: Symbol) -> str:
        """A symbol of torch, as text."""
        if symbol.kind == "device":
            self.names["device"] = torch.device
            return f"device({symbol.name!r})"
        if symbol.kind == "complex":
            return f"complex({symbol.name!r})"
        self.names[f"{symbol.kind}_{symbol.name}"] = getattr(torch, symbol.name)
        return f"{symbol.kind}_{symbol.name}"

    def _value(self, value: Value) -> str:
        """The tensor in the buffer's slot or a view of it, as text."""
        text = self._laid_out(value)
        for turned, name, function in (
            (value.conj, "conjugate", torch._conj),  # noqa: SLF001 - torch.conj leaves reals alone
            (value.neg, "negative", torch._neg_view),  # noqa: SLF001 - torch has no other
        ):
            if turned:
                self.names[name] = function
                text = f"{name}({text})"
        return text

    def _laid_out(self, value: Value) -> str:
        """The same without conjugation and negation."""
        slot = f"s{self.slot_of[value.buffer]}"
        root = self.roots[value.buffer]
        if _lies_as(value, root):
            return slot
        shape, stride = (self._number(Number(name, value.id)) for name in _LIE[:2])
        if value.dtype == root.dtype:
            start = self._number(Number("offset", value.id))
            if root.offset != 0 or self.trace.buffers[value.buffer].borrowed:
                start = f"{slot}.storage_offset()"
                at_root = value.offset == root.offset
                if not at_root or (self.family is not None and root.offset):
                    start += f" + {self._number(Number('delta', value.id, (root.id,)))}"
            self.names["view"] = torch.as_strided
            return f"view({slot}, {shape}, {stride}, {start})"
        self.names["reinterpret"] = reinterpret
        dtype = self._symbol(Symbol("dtype", value.dtype))
        after = self._number(Number("bytes_after", value.id, (root.id,)))
        return f"reinterpret({slot}, {dtype}, {shape}, {stride}, {after})"


def root_values(trace: Trace) -> list[Value]:
    """Per buffer, the Value that its op returns or that the caller passes."""
    roots: dict[int, Value] = {}
    for value in trace.values:
        roots.setdefault(value.buffer, value)
    return [roots[b.id] for b in trace.buffers]


def _lies_as(value: Value, root: Value) -> bool:
    """Whether both are the same part of a buffer, read in the same order."""
    return (value.dtype, value.shape, value.stride, value.offset) == (
        root.dtype,
        root.shape,
        root.stride,
        root.offset,
    )


def _apart(outputs: Sequence[str]) -> Iterator[str]:
    """Forward's `outputs`, each as an object of its own that is no view of another one.

    In the captured graph, `detach` makes another object of the same Value. Autograd goes by objects
    when it is told which outputs are not differentiable, and a view of an output belongs to its
    graph.
    """
    whole, given = {text for text in outputs if text.isidentifier()}, set[str]()

    def detached(name: re.Match[str]) -> str:
        return f"{name[0]}.detach()" if name[0] in whole else name[0]

    for text in outputs:
        yield text if text in whole - given else _NAME.sub(detached, text)
        given.add(text)


def _made_once(gradients: Sequence[str]) -> tuple[list[str], list[str]]:
    """Lines that make each view among `gradients` that occurs several times, and new `gradients`.

    All gradients that are one view in the captured graph must be one tensor object: as the gradient
    of a parameter, autograd takes a tensor that nobody else holds without a copy. Objects of their
    own would leave several parameters with gradients in the same memory.
    """
    often = Counter(text for text in gradients if not text.isidentifier())
    names = {text: f"g{i}" for i, text in enumerate(often) if often[text] > 1}
    lines = [f"{name} = {text}" for text, name in names.items()]
    return lines, [names.get(text, text) for text in gradients]


def _tuple(results: Iterable[str]) -> str:
    """A tuple of `results`, as text."""
    return "(" + "".join(f"{result}, " for result in results) + ")"


def _unpack(names: Iterable[str], source: str) -> list[str]:
    """Lines that bind `names` to the items of the list `source` and empty it."""
    names = list(names)
    unpack = [f"{', '.join(names)}, = {source}"] if names else []
    return [*unpack, f"{source}.clear()"]


def _indent(lines: Iterable[str]) -> Iterator[str]:
    return (f"    {line}" for line in lines)


_VERBS = ("copy_out", "copy_in", "wait", "discard", "place", "placed", "moved", "at_home")
"""Methods of lanes that generated code calls."""

_NAME = re.compile(r"\b[skr][0-9]+\b")


def _names(line: str) -> list[str]:
    """Local names of slots, copies and generator states in `line`."""
    return _NAME.findall(line)
