"""verify_problem: check a Problem's profile, hardware and budgets."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NoReturn

from outcore.errors import VerifyError
from outcore.ir.hardware import Hardware, Tier
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile


def verify_problem(problem: Problem) -> None:
    """Raise VerifyError if `problem` breaks a rule. Linear in ops.

    Its trace is not checked here: `verify_trace` runs once, when a trace is made.
    """
    verify_profile(problem.profile, len(problem.trace.ops))
    verify_hardware(problem.hardware)
    if problem.budget_bytes <= 0:
        detail = f"it is {problem.budget_bytes} B"
        _fail("problem", "the device budget", "the device budget is positive", detail)
    amounts = {
        "the host budget": problem.host_budget_bytes or 0,
        "the disk budget": problem.disk_budget_bytes or 0,
        "the bytes outside": problem.outside_bytes,
        "the bytes between": problem.between_bytes,
    }
    for where, nbytes in amounts.items():
        if nbytes < 0:
            _fail("problem", where, "no size is negative", f"{nbytes} B")


def verify_profile(profile: Profile, ops: int) -> None:
    """Raise VerifyError unless `profile` has valid figures for each of `ops` ops."""
    for name, figures in (
        ("seconds", profile.seconds),
        ("workspace bytes", profile.workspace_bytes),
    ):
        if len(figures) != ops:
            detail = f"{len(figures)} figures for {ops} ops"
            _fail("profile", name, "there is one figure per op", detail)
    op = _first_bad(profile.seconds)
    if op is not None:
        detail = f"{profile.seconds[op]} s"
        _fail("profile", f"op {op}", "seconds are finite and not negative", detail)
    op = _first_bad(profile.workspace_bytes)
    if op is not None:
        detail = f"a workspace of {profile.workspace_bytes[op]} B"
        _fail("profile", f"op {op}", "no size is negative", detail)
    _verify_alternatives(profile, ops)


def _verify_alternatives(profile: Profile, ops: int) -> None:
    last = -1
    for op, costs in profile.alternatives:
        where = f"op {op}"
        if not 0 <= op < ops:
            _fail("profile", where, "alternatives are of ops of the trace", f"there are {ops} ops")
        if op <= last:
            rule = "alternatives are sorted by op, each op listed once"
            _fail("profile", where, rule, f"it comes after op {last}")
        if not costs:
            _fail("profile", where, "an op that is listed has an alternative", "it has none")
        last = op
        for variant, cost in enumerate(costs, 1):
            where = f"op {op} variant {variant}"
            if not 0 <= cost.seconds < math.inf:
                detail = f"{cost.seconds} s"
                _fail("profile", where, "seconds are finite and not negative", detail)
            if cost.workspace_bytes < 0:
                detail = f"a workspace of {cost.workspace_bytes} B"
                _fail("profile", where, "no size is negative", detail)


def verify_hardware(hardware: Hardware) -> None:
    """Raise VerifyError unless figures are valid and each outer tier is linked both ways."""
    _verify_once("capacity", (tier.value for tier, _ in hardware.capacity_bytes))
    _verify_once("rounding", (tier.value for tier, _ in hardware.rounding_bytes))
    _verify_once("link", (f"{start.value} {stop.value}" for start, stop, _ in hardware.links))
    _verify_once("compute", (dtype for dtype, _ in hardware.flops_per_second))
    sizes = {f"capacity {tier.value}": nbytes for tier, nbytes in hardware.capacity_bytes}
    for where, nbytes in (sizes | {"padding": hardware.fetch_padding_bytes}).items():
        if nbytes < 0:
            _fail("hardware", where, "no size is negative", f"{nbytes} B")
    for tier, nbytes in hardware.rounding_bytes:
        if nbytes <= 0:
            where = f"rounding {tier.value}"
            _fail("hardware", where, "slots are rounded to a positive size", f"{nbytes} B")
    for start, stop, link in hardware.links:
        sound = link.bytes_per_second > 0 and 0 <= link.latency_seconds < math.inf
        if not sound:
            rule = "a link has a positive rate and a finite latency"
            detail = f"{link.bytes_per_second} B/s, {link.latency_seconds} s"
            _fail("hardware", f"link {start.value} {stop.value}", rule, detail)
    _verify_routes(hardware)
    rates = {f"compute {dtype}": rate for dtype, rate in hardware.flops_per_second}
    for where, rate in (rates | {"memory": hardware.memory_bytes_per_second}).items():
        if not rate >= 0:
            _fail("hardware", where, "no rate is negative", f"{rate} per second")
    if not 0 <= hardware.op_overhead_seconds < math.inf:
        detail = f"{hardware.op_overhead_seconds} s"
        _fail("hardware", "overhead", "seconds are finite and not negative", detail)


def _verify_once(kind: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            _fail("hardware", f"{kind} {name}", "each is listed once", "it is listed again")
        seen.add(name)


def _verify_routes(hardware: Hardware) -> None:
    linked = {(start, stop) for start, stop, _ in hardware.links}
    for tier, nbytes in hardware.capacity_bytes:
        if tier is Tier.DEVICE or not nbytes:
            continue
        for route in ((Tier.DEVICE, tier), (tier, Tier.DEVICE)):
            if route not in linked:
                rule = "a tier with room is linked to the device, both ways"
                detail = f"no link from {route[0].value} to {route[1].value}"
                _fail("hardware", f"capacity {tier.value}", rule, detail)


def _first_bad(figures: Iterable[float]) -> int | None:
    """The first op whose figure is negative or not finite."""
    return next((op for op, figure in enumerate(figures) if not 0 <= figure < math.inf), None)


def _fail(noun: str, where: str, rule: str, detail: str) -> NoReturn:
    raise VerifyError(noun=noun, rule=rule, where=where, detail=detail)
