"""moves: explain each gap for which a plan departs from the default, with its alternatives."""

from __future__ import annotations

from collections.abc import Callable
from heapq import nlargest
from itertools import accumulate

from outcore.explain.explanation import Alternative, Move
from outcore.explain.judge import Judge, overrun
from outcore.explain.words import reasons
from outcore.ir.hardware import Tier
from outcore.ir.liveness import liveness
from outcore.ir.plan import KEEP, Choice, Gap, Keep, Offload, Plan, Recompute
from outcore.ir.problem import Problem
from outcore.ir.timeline import Timeline


def moves_of(
    problem: Problem, plan: Plan, timeline: Timeline, most: int | None
) -> tuple[Move, ...]:
    """The `most` moves that free most, by bytes x idle time; None means all.

    Each needs three evaluations. `timeline` has to be the one of `plan`.
    """
    idle = _idle(problem, plan)
    trace, producer = problem.trace, liveness(problem.trace).producer
    judge = Judge(problem, plan, timeline)

    def weight(item: tuple[Gap, Choice]) -> tuple[float, int, int]:
        gap = item[0]
        return trace.buffers[gap.buffer].nbytes * idle(gap), -gap.buffer, -gap.after

    def move(gap: Gap, choice: Choice) -> Move:
        buffer, made = trace.buffers[gap.buffer], producer[gap.buffer]
        found = _alternatives(problem, judge, gap, choice)
        return Move(
            buffer=gap.buffer,
            name=buffer.name,
            nbytes=buffer.nbytes,
            op=made,
            target="" if made is None else trace.ops[made].target,
            site="" if made is None else trace.ops[made].site,
            after=gap.after,
            before=gap.before,
            dead=gap.dead,
            idle_seconds=idle(gap),
            choice=_name(choice),
            alternatives=found,
            reasons=reasons(found, dead=gap.dead),
        )

    chosen = nlargest(len(plan.moves) if most is None else most, plan.moves, key=weight)
    return tuple(move(gap, choice) for gap, choice in chosen)


def weights(problem: Problem, plan: Plan) -> list[float]:
    """The byte-seconds of each move of `plan`: `Move.weight`, without making the moves."""
    idle, buffers = _idle(problem, plan), problem.trace.buffers
    return [buffers[gap.buffer].nbytes * idle(gap) for gap, _ in plan.moves]


def _idle(problem: Problem, plan: Plan) -> Callable[[Gap], float]:
    """A function from a gap to its idle time: the seconds of the first runs inside it."""
    costs = (problem.profile.cost(op, plan.variant(op)) for op in range(len(problem.trace.ops)))
    ends = list(accumulate(cost.seconds for cost in costs))
    return lambda gap: max(0.0, ends[gap.before - 1] - ends[gap.after])


def _alternatives(
    problem: Problem, judge: Judge, gap: Gap, choice: Choice
) -> tuple[Alternative, ...]:
    """All choices for `gap`. If the plan offloads, its own tier and hints are used for that."""
    away = choice if isinstance(choice, Offload) else Offload(problem.hardware.outer)
    candidates: tuple[Choice, ...] = (KEEP, away, Recompute(), Recompute(stay=True))
    return tuple(_alternative(problem, judge, gap, other, choice) for other in candidates)


def _alternative(
    problem: Problem, judge: Judge, gap: Gap, choice: Choice, own: Choice
) -> Alternative:
    name, chosen = _name(choice), choice == own
    verdict = judge.judge(gap, choice)
    if verdict.impossible:
        return Alternative(name, chosen, impossible=verdict.impossible)
    nbytes = dict(verdict.nbytes)
    tier, over = overrun(problem, nbytes)
    peak = nbytes[Tier.DEVICE]
    return Alternative(name, chosen, verdict.seconds, peak, over, tier)


def _name(choice: Choice) -> str:
    """The name of a choice in the text form of a plan, without hints."""
    if isinstance(choice, Keep):
        return "keep"
    if isinstance(choice, Offload):
        return "offload"
    return "recompute stay" if choice.stay else "recompute"
