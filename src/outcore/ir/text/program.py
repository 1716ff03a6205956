"""The text forms of a Plan, a Program and a Timeline."""

from __future__ import annotations

def print_plan(plan: Plan) -> Iterator[str]:
    """The lines of a Plan."""
    yield row(
        "plan", named("policy", plan.policy), named("problem", plan.problem_digest)
    )
    for gap, choice in plan.choices:
        yield f"gap {gap.buffer} after {gap.after} before {gap.before} {_choice_text(choice)}"


def _choice_text(choice: Choice) -> str:
    if isinstance(choice, Keep):
        return "keep"
    if isinstance(choice, Offload):
        return row(
            f"offload {choice.tier.value}",
            "" if choice.release is None else f"release {choice.release}",
            "" if choice.prefetch is None else f"prefetch {choice.prefetch}",
        )
    return "recompute stay" if choice.stay else "recompute"


def print_program(program: Program) -> Iterator[str]:
    """The lines of a Program."""
    yield row(
        f"program boundary {program.boundary}",
        named("trace", program.trace_digest),
        named("plan", program.plan_digest),
    )
    yield from map(_slot_text, program.slots)
    yield row("arguments", _slots(program.arguments))
    yield row("tangents", _slots(program.tangents))
    yield row("results", _slots(program.results))
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
        _slots(action.reads),
        f"-> {_slots(action.writes)}" if action.writes else "",
        f"donate {donated}" if donated else "",
    )


def print_timeline(timeline: Timeline) -> Iterator[str]:
    """The lines of a Timeline."""
    yield f"timeline {timeline.source.value}"
    for tier, nbytes in timeline.peak_bytes:
        yield f"peak {tier.value} {nbytes} B"
    for span in timeline.spans:
        start, stop = float(span.start_seconds), float(span.stop_seconds)
        yield f"span {span.instruction} {span.stream.value} {start!r} s {stop!r} s"
    for stall in timeline.stalls:
        yield f"stall {stall.instruction} {stall.cause.value} {float(stall.seconds)!r} s"


def read_plan(lines: Lines) -> Plan:
    """A Plan from its lines. Raises ParseError."""
    head, *rest = lines
    head.expect("plan")
    policy = head.name() if head.accept("policy") else ""
    problem_digest = head.name() if head.accept("problem") else ""
    head.end()
    return Plan(read_rows(rest, {"gap": _gap})["gap"], policy, problem_digest)


def _gap(line: Line) -> tuple[Gap, Choice]:
    buffer = line.integer()
    line.expect("after")
    after = line.integer()
    line.expect("before")
    return Gap(buffer, after, line.integer()), _choice(line)


def _choice(line: Line) -> Choice:
    if line.accept("keep"):
        return Keep()
    if line.accept("recompute"):
        return Recompute(stay=line.accept("stay"))
    if not line.accept("offload"):
        line.miss("keep or offload or recompute")
    tier = line.member(Tier)
    release = line.integer() if line.accept("release") else None
    return Offload(tier, release, line.integer() if line.accept("prefetch") else None)


def read_program(lines: Lines) -> Program:
    """A Program from its lines. Raises ParseError."""
    head, *rest = lines
    head.expect("program", "boundary")
    boundary = head.integer()
    trace_digest = head.name() if head.accept("trace") else ""
    plan_digest = head.name() if head.accept("plan") else ""
    head.end()
    body = [line for line in rest if line.text.lstrip()[0].isdigit()]
    others = [line for line in rest if not line.text.lstrip()[0].isdigit()]
    lists = {"arguments": _slots, "tangents": _slots, "results": _slots}
    rows = read_rows(others, {"slot": _slot, **lists}, once=lists)
    return Program(
        slots=rows["slot"],
        body=tuple(_instruction(position, line) for position, line in enumerate(body)),
        boundary=boundary,
        **{word: only(rows, word, ()) for word in lists},
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
    after = line.integers() if line.accept("after") else ()
    pace = line.integers() if line.accept("pace") else ()
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
    op, reads = line.integer(), _slots(line)
    writes = _slots(line) if line.accept("->") else ()
    return Run(op, reads, writes, _donated(line) if line.accept("donate") else (), again)


def _donated(line: Line) -> tuple[tuple[int, int], ...]:
    pairs = []
    while (pair := line.find(_DONATED)) is not None:
        source, target = pair.split(":")
        pairs.append((int(source[1:]), int(target[1:])))
    return tuple(pairs)


def read_timeline(lines: Lines) -> Timeline:
    """A Timeline from its lines. Raises ParseError."""
    head, *rest = lines
    head.expect("timeline")
    source = head.member(Source)
    head.end()
    rows = read_rows(rest, {"peak": _tier_bytes, "span": _span, "stall": _stall})
    return Timeline(rows["span"], rows["stall"], rows["peak"], source)


def _span(line: Line) -> Span:
    return Span(line.integer(), line.member(Stream), line.seconds(), line.seconds())


def _stall(line: Line) -> Stall:
    return Stall(line.integer(), line.member(Cause), line.seconds())
