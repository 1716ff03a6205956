"""problem: print and read the text forms of a Profile, a Hardware and a Problem."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from outcore.ir.hardware import Hardware, Link, Tier
from outcore.ir.problem import Problem
from outcore.ir.profile import Cost, Profile, Source
from outcore.ir.text.rows import Lines, only, read_rows, row
from outcore.ir.text.scan import Line, bare
from outcore.ir.text.trace import print_trace, read_trace


def print_profile(profile: Profile) -> Iterator[str]:
    """The lines of a Profile."""
    yield f"profile {profile.source.value}"
    for op, costs in enumerate(profile.costs):
        yield f"op {op} {' or '.join(map(_cost_text, costs))}"


def _cost_text(cost: Cost) -> str:
    return f"{float(cost.seconds)!r} s {cost.workspace_bytes} B"


def print_hardware(hardware: Hardware) -> Iterator[str]:
    """The lines of a Hardware."""
    yield f"hardware {bare(hardware.name)} {'duplex' if hardware.duplex else 'simplex'}"
    for tier, nbytes in hardware.capacity_bytes:
        yield f"capacity {tier.value} {nbytes} B"
    for tier, nbytes in hardware.rounding_bytes:
        yield f"rounding {tier.value} {nbytes} B"
    for start, stop, link in hardware.links:
        rate, latency = float(link.bytes_per_second), float(link.latency_seconds)
        yield f"link {start.value} {stop.value} {rate!r} B/s {latency!r} s"
    for dtype, rate in hardware.flops_per_second:
        yield f"compute {bare(dtype)} {float(rate)!r} flop/s"
    yield f"memory {float(hardware.memory_bytes_per_second)!r} B/s"
    yield f"overhead {float(hardware.op_overhead_seconds)!r} s"
    yield f"padding {hardware.fetch_padding_bytes} B"


def print_problem(problem: Problem) -> Iterator[str]:
    """The lines of a Problem."""
    optional = {
        "host": problem.host_budget_bytes,
        "disk": problem.disk_budget_bytes,
        "outside": problem.outside_bytes or None,
        "between": problem.between_bytes or None,
    }
    given = (f"{word} {nbytes} B" for word, nbytes in optional.items() if nbytes is not None)
    yield row(f"problem budget {problem.budget_bytes} B", *given)
    yield from print_hardware(problem.hardware)
    yield from print_profile(problem.profile)
    yield from print_trace(problem.trace)


def read_profile(lines: Lines) -> Profile:
    """A Profile from its lines. Raises ParseError."""
    head, *rest = lines
    head.expect("profile")
    source = head.member(Source)
    head.end()
    costs = [_costs(op, line) for op, line in enumerate(rest)]
    return Profile(
        tuple(default.seconds for default, *_ in costs),
        tuple(default.workspace_bytes for default, *_ in costs),
        source,
        tuple((op, tuple(others)) for op, (_, *others) in enumerate(costs) if others),
    )


def _costs(op: int, line: Line) -> list[Cost]:
    line.expect("op", str(op))
    costs = [_cost(line)]
    while line.accept("or"):
        costs.append(_cost(line))
    line.end()
    return costs


def _cost(line: Line) -> Cost:
    return Cost(line.seconds(), line.nbytes())


def read_hardware(lines: Lines) -> Hardware:
    """A Hardware from its lines. Raises ParseError."""
    head, *rest = lines
    head.expect("hardware")
    name, duplex = head.name(), head.accept("duplex")
    if not duplex:
        head.expect("simplex")
    head.end()
    rows = read_rows(rest, {**_TABLES, **_SCALARS}, once=_SCALARS)
    return Hardware(
        name,
        rows["capacity"],
        rows["link"],
        duplex,
        rows["compute"],
        only(rows, "memory", 0.0),
        only(rows, "overhead", 0.0),
        rows["rounding"],
        only(rows, "padding", 0),
    )


def _rate(line: Line) -> float:
    rate = line.number()
    line.expect("B/s")
    return rate


def _link(line: Line) -> tuple[Tier, Tier, Link]:
    start, stop = line.member(Tier), line.member(Tier)
    return start, stop, Link(_rate(line), line.seconds())


def _flops(line: Line) -> tuple[str, float]:
    dtype, rate = line.name(), line.number()
    line.expect("flop/s")
    return dtype, rate


_TABLES: dict[str, Callable[[Line], Any]] = {
    "capacity": Line.tier_bytes,
    "rounding": Line.tier_bytes,
    "link": _link,
    "compute": _flops,
}
_SCALARS: dict[str, Callable[[Line], Any]] = {
    "memory": _rate,
    "overhead": Line.seconds,
    "padding": Line.nbytes,
}


def read_problem(lines: Lines) -> Problem:
    """A Problem from its lines. Raises ParseError."""
    head, *rest = lines
    head.expect("problem", "budget")
    budget_bytes = head.nbytes()
    words = ("host", "disk", "outside", "between")
    given = {word: head.nbytes() if head.accept(word) else None for word in words}
    head.end()
    parts = _split(head, rest, ("hardware", "profile", "trace"))
    return Problem(
        read_trace(parts["trace"]),
        read_profile(parts["profile"]),
        read_hardware(parts["hardware"]),
        budget_bytes,
        given["host"],
        given["disk"],
        given["outside"] or 0,
        given["between"] or 0,
    )


def _split(head: Line, lines: Lines, headers: Collection[str]) -> dict[str, list[Line]]:
    """The lines of each part of a problem, by the first word of its first line."""
    parts: dict[str, list[Line]] = {}
    part: list[Line] | None = None
    for line in lines:
        word = line.text.split(maxsplit=1)[0]
        if word in headers:
            if word in parts:
                line.fail(f"a second {word}")
            part = parts[word] = []
        if part is None:
            line.miss(" or ".join(headers))
        part.append(line)
    missing = [word for word in headers if word not in parts]
    if missing:
        head.fail(f"this problem has no {missing[0]}", 0)
    return parts
