"""announce: what a plan comes to, as one block of text for the log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from outcore.ir.hardware import Tier
from outcore.ir.program import Copy, Run, Stream
from outcore.report import count_choices
from outcore.spec import spec_text
from outcore.units import format_bytes, format_seconds

if TYPE_CHECKING:  # the engine plans, and tells
    from outcore.policies import Policy
    from outcore.runtime.planning import Planned


def announcement(planned: Planned, policy: Policy, number: int) -> str:
    """What fits, what moves, and the predicted peak and time, of graph `number`."""
    in_core, budget = planned.in_core, planned.problem.budget_bytes
    peak, seconds = in_core.peak(Tier.DEVICE), in_core.seconds
    have = f"a budget of {format_bytes(budget)}"
    if planned.everything_kept:
        return (
            f"outcore: graph {number} fits: nothing is moved or recomputed; predicted peak "
            f"{format_bytes(peak)} of {have}"
        )
    by = f"its plan is from {planned.from_file}" * bool(planned.from_file)
    by = by or f"planned by {planned.plan.policy or spec_text(policy)}"
    head = f"outcore: graph {number} does not fit {have} as it is; {by}"
    rows = [
        ("in-core", f"peak {format_bytes(peak)}, {format_seconds(seconds)} a step"),
        ("planned", _planned(planned)),
        ("moved", ", ".join(_moved(planned))),
        ("planning", format_seconds(planned.planning_seconds)),
    ]
    return "\n".join([head, *(f"    {name:<9} {text}" for name, text in rows)])


def _planned(planned: Planned) -> str:
    predicted, slowdown = planned.predicted, 1.0
    if planned.in_core.seconds:
        slowdown = predicted.seconds / planned.in_core.seconds
    peak = format_bytes(predicted.peak(Tier.DEVICE))
    return (
        f"peak {peak}, {format_seconds(predicted.seconds)} a step, {slowdown:.3f} times in-core "
        "(all predicted)"
    )


def _moved(planned: Planned) -> Iterator[str]:
    """How many buffers, their bytes, and the seconds of what runs again."""
    trace, program = planned.problem.trace, planned.program
    counts = count_choices(trace, planned.plan)
    out = sum(
        trace.buffers[program.slots[x.action.source].buffer].nbytes
        for x in program.body
        if isinstance(x.action, Copy) and x.stream is Stream.OUT
    )
    again = [x.action for x in program.body if isinstance(x.action, Run) and x.action.again]
    seconds = sum(planned.problem.profile.cost(r.op, r.variant).seconds for r in again)
    yield f"{counts.offload} offloaded ({format_bytes(out)})"
    yield f"{counts.recompute} recomputed ({format_seconds(seconds)})"
    yield f"{counts.keep} kept"
