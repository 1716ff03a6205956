"""gather: compute the Report of a plan, and sum up the figures of several graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from outcore.ir.hardware import Tier
from outcore.ir.plan import KEEP_ALL, Plan
from outcore.ir.problem import Problem
from outcore.ir.totals import offloaded_bytes, recompute_seconds, resident_bytes
from outcore.lower import lower
from outcore.report.counts import Counts, count_choices, count_held
from outcore.report.figures import Report
from outcore.report.links import link_uses
from outcore.report.planned import PlannedStep, Swept
from outcore.report.recorded import recorded
from outcore.simulate import simulate


def report(
    problem: Problem,
    plan: Plan,
    *,
    title: str = "",
    planning_seconds: float | None = None,
    lower_bound_seconds: float | None = None,
    sweep: Swept | None = None,
) -> Report:
    """The Report of a plan that need not run: all figures are predicted.

    `title` says what is trained. `sweep` is an `outcore.sweep.Sweep`, shown on the page.

    Raises DigestError if the plan names another trace, VerifyError if the problem breaks a rule or
    the plan is not a plan for it.
    """
    program = lower(problem, plan)
    kept = lower(problem, KEEP_ALL)
    step = PlannedStep(
        problem=problem,
        plan=plan,
        program=program,
        predicted=simulate(problem, program),
        in_core=simulate(problem, kept),
        planning_seconds=planning_seconds,
    )
    blank = Report(
        policy=plan.policy,
        state="planned" if plan.moves else "in-core",
        budget_bytes=problem.budget_bytes,
        graphs=1,
        lower_bound_seconds=lower_bound_seconds,
        title=title,
        sweep=sweep,
    )
    return with_steps(blank, [step])


def with_steps(report: Report, steps: Sequence[PlannedStep]) -> Report:
    """`report` with the figures of `steps`. There has to be at least one step."""
    planning = [s.planning_seconds for s in steps if s.planning_seconds is not None]
    return replace(
        report,
        resident_bytes=max(resident_bytes(s.problem) for s in steps),
        in_core_peak_bytes=max(s.in_core.peak(Tier.DEVICE) for s in steps),
        predicted_peak_bytes=max(s.peak_bytes for s in steps),
        predicted_seconds=_total(steps, lambda s: s.predicted.seconds),
        in_core_seconds=_total(steps, lambda s: s.in_core.seconds),
        planning_seconds=sum(planning) if planning else None,
        counts=_counts(steps),
        held=round(_total(steps, lambda s: count_held(s.plan))),
        offloaded_bytes=round(_total(steps, lambda s: offloaded_bytes(s.problem.trace, s.program))),
        recompute_seconds=_total(steps, lambda s: recompute_seconds(s.problem, s.program)),
        stall_seconds=_total(steps, lambda s: s.predicted.stall_seconds()),
        links=link_uses(steps),
        recorded=recorded(steps),
        steps=tuple(steps),
    )


def _counts(steps: Sequence[PlannedStep]) -> Counts:
    """The Counts of a step, rounded to whole numbers."""
    found = [(step.often, count_choices(step.problem.trace, step.plan)) for step in steps]
    return Counts(
        keep=round(sum(often * each.keep for often, each in found)),
        offload=round(sum(often * each.offload for often, each in found)),
        recompute=round(sum(often * each.recompute for often, each in found)),
    )


def _total(steps: Sequence[PlannedStep], figure: Callable[[PlannedStep], float]) -> float:
    return sum((step.often * figure(step) for step in steps), 0.0)
