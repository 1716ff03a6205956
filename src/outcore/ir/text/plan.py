"""plan: print and read the text form of a Plan."""

from __future__ import annotations

from collections.abc import Iterator

from outcore.ir.hardware import Tier
from outcore.ir.plan import Choice, Gap, Keep, Offload, Plan, Recompute
from outcore.ir.text.rows import Lines, named, read_rows, row
from outcore.ir.text.scan import Line


def print_plan(plan: Plan) -> Iterator[str]:
    """The lines of a Plan."""
    yield row(
        "plan",
        named("policy", plan.policy),
        named("trace", plan.trace_digest),
        named("problem", plan.problem_digest),
    )
    for gap, choice in plan.choices:
        where = f"gap {gap.buffer} after {gap.after} before {gap.before}" + " dead" * gap.dead
        yield f"{where} {_choice_text(choice)}"
    for op, variant in plan.variants:
        yield f"op {op} variant {variant}"


def _choice_text(choice: Choice) -> str:
    if isinstance(choice, Keep):
        return "keep"
    if isinstance(choice, Offload):
        return row(
            f"offload {choice.tier.value}",
            *("" if op is None else f"{word} {op}" for word, op in _hints(choice)),
        )
    return "recompute stay" if choice.stay else "recompute"


def _hints(choice: Offload) -> Iterator[tuple[str, int | None]]:
    yield "depart", choice.depart
    yield "release", choice.release
    yield "prefetch", choice.prefetch
    yield "arrive", choice.arrive


def read_plan(lines: Lines) -> Plan:
    """A Plan from its lines. Raises ParseError."""
    head, *rest = lines
    head.expect("plan")
    policy = head.name() if head.accept("policy") else ""
    trace_digest = head.name() if head.accept("trace") else ""
    problem_digest = head.name() if head.accept("problem") else ""
    head.end()
    rows = read_rows(rest, {"gap": _gap, "op": _variant})
    return Plan(rows["gap"], policy, problem_digest, trace_digest, rows["op"])


def _variant(line: Line) -> tuple[int, int]:
    op = line.integer()
    line.expect("variant")
    return op, line.integer()


def _gap(line: Line) -> tuple[Gap, Choice]:
    buffer = line.integer()
    line.expect("after")
    after = line.integer()
    line.expect("before")
    before = line.integer()
    return Gap(buffer, after, before, dead=line.accept("dead")), _choice(line)


def _choice(line: Line) -> Choice:
    if line.accept("keep"):
        return Keep()
    if line.accept("recompute"):
        return Recompute(stay=line.accept("stay"))
    if not line.accept("offload"):
        line.miss("keep or offload or recompute")
    return Offload(
        line.member(Tier),
        depart=_hint(line, "depart"),
        release=_hint(line, "release"),
        prefetch=_hint(line, "prefetch"),
        arrive=_hint(line, "arrive"),
    )


def _hint(line: Line, word: str) -> int | None:
    return line.integer() if line.accept(word) else None
