"""announce: summarize a plan as one block of text for the log."""

from __future__ import annotations

from collections.abc import Iterator

from outcore.ir.hardware import Tier
from outcore.ir.totals import offloaded_bytes, recompute_seconds
from outcore.policies import Policy
from outcore.report import count_choices, count_held
from outcore.runtime.graphs.planned import FORCED, Planned
from outcore.spec import spec_text
from outcore.units import format_bytes, format_seconds


def announcement(planned: Planned, policy: Policy, number: int, *, overridden: bool = False) -> str:
    """Whether graph `number` fits, what the plan moves, and the predicted peak and time.

    `overridden`: the user has set overrides.
    """
    in_core, budget = planned.in_core, planned.problem.budget_bytes
    peak, seconds = in_core.peak(Tier.DEVICE), in_core.seconds
    have = f"a budget of {format_bytes(budget)}"
    if planned.everything_kept:
        return (
            f"outcore: graph {number} fits: nothing is moved or recomputed; predicted peak "
            f"{format_bytes(peak)} of {have}"
        )
    does = "fits" if planned.fits_in_core else "does not fit"
    by = _by(planned, policy, overridden=overridden)
    head = f"outcore: graph {number} {does} {have} as it is; {by}"
    rows = [
        ("in-core", f"peak {format_bytes(peak)}, {format_seconds(seconds)} a step"),
        ("planned", _planned(planned)),
        ("moved", ", ".join(_moved(planned))),
        ("planning", format_seconds(planned.planning_seconds)),
    ]
    return "\n".join([head, *(f"    {name:<9} {text}" for name, text in rows)])


def _by(planned: Planned, policy: Policy, *, overridden: bool) -> str:
    """Who chose what is moved, and why: the policy, a file of plans, or overrides."""
    if planned.from_file:
        return f"its plan is from {planned.from_file}"
    by = planned.plan.policy or spec_text(policy)
    if not planned.fits_in_core:
        return f"planned by {by}"
    if not overridden:
        return f"planned by {by}, to leave room for other calls"
    rest = "" if by == FORCED else f"; planned around them by {by}"
    return f"overrides move some tensors anyway{rest}"


def _planned(planned: Planned) -> str:
    predicted, slowdown = planned.predicted, 1.0
    if planned.in_core.seconds:
        slowdown = predicted.seconds / planned.in_core.seconds
    peak = format_bytes(planned.peak_bytes)
    return (
        f"peak {peak}, {format_seconds(predicted.seconds)} a step, {slowdown:.3f} times in-core "
        "(all predicted)"
    )


def _moved(planned: Planned) -> Iterator[str]:
    """How many buffers are moved and kept, the bytes offloaded, and the seconds recomputed."""
    trace, program = planned.problem.trace, planned.program
    counts = count_choices(trace, planned.plan)
    out = offloaded_bytes(trace, program)
    seconds = recompute_seconds(planned.problem, program)
    yield f"{counts.offload} offloaded ({format_bytes(out)})"
    yield f"{counts.recompute} recomputed ({format_seconds(seconds)})"
    yield f"{counts.keep} kept"
    held = count_held(planned.plan)
    if held:
        yield f"{held} held for reruns"
