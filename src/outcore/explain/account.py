"""account: explain a plan: where its step time goes, its moves and its waits."""

from __future__ import annotations

from collections import Counter

from outcore.explain.explanation import Explanation, Rerun
from outcore.explain.judge import needed_bytes, overrun
from outcore.explain.moves import moves_of
from outcore.explain.waits import waits_of
from outcore.gc_paused import gc_paused
from outcore.ir.hardware import Tier
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.ir.program import Program, Run
from outcore.lower import lower
from outcore.simulate import simulate


@gc_paused()
def explain(problem: Problem, plan: Plan, *, most: int | None = None) -> Explanation:
    """Why `plan` moves what it moves, and where its step waits.

    `most` is the number of moves to explain: those that free the most bytes x idle time. None means
    all. Each move needs three evaluations of a whole plan. An evaluation takes microseconds if
    arrays can express the plan (`Evaluator`, with the extra `fast`). Otherwise it is a lowering and
    a simulation: for the hints `depart` and `arrive`, and for a tier that is not the nearest.

    Raises DigestError if the plan names another trace, VerifyError if the problem breaks a rule or
    the plan is not a plan for it.
    """
    program = lower(problem, plan)
    timeline = simulate(problem, program)
    reruns = _reruns(problem, program)
    over_tier, over_bytes = overrun(problem, dict(needed_bytes(problem, plan, timeline)))
    profile = problem.profile
    chosen = (
        profile.cost(op, variant).seconds - profile.seconds[op] for op, variant in plan.variants
    )
    return Explanation(
        policy=plan.policy,
        budget_bytes=problem.budget_bytes,
        peak_bytes=timeline.peak(Tier.DEVICE),
        over_bytes=over_bytes,
        over_tier=over_tier,
        seconds=timeline.seconds,
        in_core_seconds=sum(profile.seconds, 0.0),
        variant_seconds=sum(chosen, 0.0),
        recompute_seconds=sum((rerun.seconds for rerun in reruns), 0.0),
        moved=sum(not gap.dead for gap, _ in plan.moves),
        held=sum(gap.dead for gap, _ in plan.moves),
        moves=moves_of(problem, plan, timeline, most),
        waits=waits_of(problem, plan, program, timeline),
        reruns=reruns,
    )


def _reruns(problem: Problem, program: Program) -> tuple[Rerun, ...]:
    """The ops that run again, in order of their total time, the longest first."""
    runs = (x.action for x in program.body if isinstance(x.action, Run) and x.action.again)
    found = []
    for (op, variant), times in Counter((run.op, run.variant) for run in runs).items():
        made = problem.trace.ops[op]
        seconds = times * problem.profile.cost(op, variant).seconds
        found.append(Rerun(op, made.target, made.site, times, seconds))
    return tuple(sorted(found, key=lambda rerun: (-rerun.seconds, rerun.op)))
