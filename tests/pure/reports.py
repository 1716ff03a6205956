"""reports: make reports for tests, of the small problem and of chains of any length."""

from __future__ import annotations

from dataclasses import replace

from outcore.ir.hardware import Tier
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile, Source
from outcore.ir.timeline import Cause, Span, Stall, Timeline
from outcore.ir.trace import Phase, Ref, Role
from outcore.policies import resolve
from outcore.report import Report, report, with_steps
from tests.pure.building import TraceBuilder, small_hardware, small_problem

SWAP = "swap-all{min_bytes=1B}"


def small_report(budget_bytes: int = 8192, policy: str = SWAP) -> Report:
    """The report on the plan of `policy` for the small problem."""
    problem = small_problem(budget_bytes)
    return report(problem, resolve(policy).plan(problem), title="a small step")


def measured_report() -> Report:
    """The small report with a measured timeline, in which everything takes twice as long."""
    found = small_report()
    (step,) = found.steps
    measured = slower(step.predicted, 2.0)
    found = with_steps(found, [replace(step, measured=measured)])
    seconds, peak = measured.seconds, (found.predicted_peak_bytes or 0) - 64
    return replace(found, measured_seconds=seconds, measured_peak_bytes=peak)


def slower(timeline: Timeline, factor: float) -> Timeline:
    """A measured timeline of the same runs and copies, each `factor` times as long."""
    spans = tuple(
        Span(s.instruction, s.stream, s.start_seconds * factor, s.stop_seconds * factor)
        for s in timeline.spans
        if s.stop_seconds > s.start_seconds
    )
    known = {s.instruction for s in spans}
    stalls = tuple(
        Stall(s.instruction, Cause.FETCH, s.seconds * factor)
        for s in timeline.stalls
        if s.instruction in known
    )
    return Timeline(spans, stalls, timeline.peak_bytes, Source.MEASURED)


def two_graphs() -> Report:
    """The report on a step of two graphs."""
    found = measured_report()
    return with_steps(found, [*found.steps, *small_report(policy="recompute-all").steps])


def long_problem(ops: int, budget_part: float = 0.6) -> Problem:
    """A chain of `ops` forward ops, which each keep 1 KiB for one of as many backward ops."""
    t = TraceBuilder()
    x = t.new(256, Role.INPUT, borrowed=True, name="x")
    made = [x]
    for op in range(ops):
        made.append(t.new(256, Role.ACTIVATION, name=f'activation {op} <&> "quoted"'))
        t.op("aten.convolution.default", (Ref(made[-2]),), (made[-1],))
    tangent = gradient = t.new(256, Role.GRAD, name="tangent")
    for op in reversed(range(ops)):
        following = t.new(256, Role.GRAD)
        args = (Ref(gradient), Ref(made[op]))
        t.op("aten.convolution_backward.default", args, (following,), Phase.BACKWARD)
        gradient = following
    trace = t.trace([x], (Ref(made[-1]),), [tangent], (Ref(gradient),))
    n = len(trace.ops)
    profile = Profile((1e-3,) * n, (128,) * n, Source.ESTIMATED)
    hardware = replace(
        small_hardware(),
        capacity_bytes=((Tier.DEVICE, 1 << 30), (Tier.HOST, 1 << 30), (Tier.DISK, 1 << 30)),
    )
    return Problem(trace, profile, hardware, round(1024 * ops * budget_part))


def long_report(ops: int) -> Report:
    """The report on a long chain under a budget, with predicted and measured timelines."""
    problem = long_problem(ops)
    plan: Plan = resolve(SWAP).plan(problem)
    found = report(problem, plan, title=f"a chain of {2 * ops} ops")
    (step,) = found.steps
    return with_steps(found, [replace(step, measured=slower(step.predicted, 1.1))])
