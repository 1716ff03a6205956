"""plan: turn the decisions of PoocH's model into a Plan, with hints for its copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outcore.ir.hardware import Tier
from outcore.ir.plan import KEEP as STAY
from outcore.ir.plan import Choice, Gap, Offload, Plan, Recompute
from outcore.ir.problem import Problem
from outcore.policies.candidates import away, candidates
from outcore.policies.policy import Policy
from outcore.policies.pooch.backward import Backward
from outcore.policies.pooch.log import OFFLOAD, RECOMPUTE, Kind
from outcore.policies.pooch.model import PoochModel
from outcore.policies.pooch.search import delay
from outcore.policies.settle import settle, settle_within

Decide = Callable[[PoochModel], Sequence[Kind]]
"""Chooses one kind per target, in the order of the targets."""

Schedule = Callable[[PoochModel, Backward], Sequence[int]]
"""Chooses, per segment, the break point at which its fetches are issued."""


def published(model: PoochModel, backward: Backward) -> list[int]:
    """PoocH's schedule: fetches as early as memory allows, then delayed as far as time allows."""
    return delay(model, backward, model.compact(backward))


def one_ahead(_model: PoochModel, backward: Backward) -> list[int]:
    """No scheduling: each segment's fetches are issued one break point before it."""
    return [max(0, segment - 1) for segment in range(len(backward.fetched))]


def pooch_plan(
    problem: Problem,
    policy: Policy,
    min_bytes: int,
    decide: Decide,
    schedule: Schedule | None,
) -> Plan:
    """The plan of the kinds that `decide` chooses.

    Copies follow `schedule`; None leaves their times to lowering. Raises InfeasibleError if
    offloading every candidate, with each copy waited for immediately, does not fit.
    """
    gaps = candidates(problem, min_bytes)
    leave = away(problem)
    if not gaps or not isinstance(leave, Offload):
        return settle(problem, {}, policy)
    tier, early = leave.tier, schedule is None

    def choose(capacity_bytes: int) -> dict[Gap, Choice] | None:
        model = PoochModel(problem, gaps, tier, capacity_bytes, early=early)
        kinds = decide(model)
        return choices_of(model, kinds, tier, schedule) if model.fits(kinds) else None

    otherwise = dict.fromkeys(gaps, leave)
    return settle_within(problem, problem.budget_bytes, choose, otherwise, policy)


def choices_of(
    model: PoochModel, kinds: Sequence[Kind], tier: Tier, schedule: Schedule | None
) -> dict[Gap, Choice]:
    """The choices for `kinds`, with hints if there is a `schedule`."""
    issue = _issue_ops(model, kinds, schedule) if schedule else {}
    release = model.log.boundary if schedule else None

    def choice(target: int) -> Choice:
        if kinds[target] is OFFLOAD:
            return Offload(tier, release=release, prefetch=issue.get(target))
        return Recompute() if kinds[target] is RECOMPUTE else STAY

    return {target.gap: choice(i) for i, target in enumerate(model.targets)}


def _issue_ops(model: PoochModel, kinds: Sequence[Kind], schedule: Schedule) -> dict[int, int]:
    """Target -> the op before which its copy back is issued."""
    backward = model.rebuild(kinds)
    points = schedule(model, backward)
    segments = model.log.segments
    return {
        target: segments[points[index]].op
        for index, group in enumerate(backward.fetched)
        for target in group
    }
