"""make: make the contents of plan files from problems and their plans."""

from __future__ import annotations

from collections.abc import Iterable

from outcore.explain import Alternative, Explanation, Move, explain
from outcore.ir.hardware import Hardware, Tier
from outcore.ir.liveness import liveness
from outcore.ir.memory import tier_bytes
from outcore.ir.plan import KEEP_ALL, Choice, Gap, Plan
from outcore.ir.problem import Problem
from outcore.ir.store import digest
from outcore.ir.trace import Trace
from outcore.lower import lower
from outcore.planfile.nouns import (
    Action,
    Budgets,
    Digests,
    Machine,
    PlanFile,
    Predicted,
    Rule,
    SavedLink,
    SavedPlan,
    SavedVariant,
    SecondsMore,
    Storage,
    Use,
    Versions,
)
from outcore.planfile.places import place

DIGITS = 9
"""Decimals of seconds in a file: nanoseconds."""


def make_file(
    plans: Iterable[SavedPlan], versions: Versions, overrides: Iterable[Rule] = ()
) -> PlanFile:
    """A file of `plans`, which were made under `overrides`."""
    return PlanFile(versions, tuple(plans), tuple(overrides))


def saved_plan(
    problem: Problem, plan: Plan, *, device: str = "", most: int | None = None
) -> SavedPlan:
    """`plan` in the form of a file, each move with its reason (`outcore.explain`).

    `device` is the processor's name if it differs from the hardware's. `most` is the number of
    moves to give reasons for, those that free most; None means all. Raises what `explain` raises.
    """
    explanation = explain(problem, plan, most=most)
    moves = {Gap(m.buffer, m.after, m.before, m.dead): m for m in explanation.moves}
    trace = problem.trace
    producer = liveness(trace).producer
    return SavedPlan(
        policy=plan.policy,
        times=problem.profile.source,
        machine=_machine(problem.hardware, device),
        digests=Digests(
            trace=digest(trace),
            profile=digest(problem.profile),
            hardware=digest(problem.hardware),
            problem=digest(problem),
            plan=digest(plan),
        ),
        budgets=Budgets(
            problem.budget_bytes,
            problem.host_budget_bytes,
            problem.disk_budget_bytes,
            problem.outside_bytes,
            problem.between_bytes,
        ),
        predicted=_predicted(problem, plan, explanation),
        storages=tuple(
            _storage(trace, producer[gap.buffer], gap, choice, moves) for gap, choice in plan.moves
        ),
        variants=tuple(
            SavedVariant(op, trace.ops[op].target, variant) for op, variant in plan.variants
        ),
    )


def _machine(hardware: Hardware, device: str) -> Machine:
    links = (
        SavedLink(source, target, link.bytes_per_second, link.latency_seconds)
        for source, target, link in hardware.links
    )
    return Machine(device or hardware.name, hardware.name, hardware.duplex, tuple(links))


def _predicted(problem: Problem, plan: Plan, explanation: Explanation) -> Predicted:
    program = lower(problem, plan, fast=True)
    kept = lower(problem, KEEP_ALL, fast=True)
    taken = {tier: tier_bytes(problem, program, tier) for tier in Tier}
    return Predicted(
        seconds=explanation.seconds,
        in_core_seconds=explanation.in_core_seconds,
        recompute_seconds=explanation.recompute_seconds,
        stall_seconds=explanation.stall_seconds,
        device_bytes=taken[Tier.DEVICE],
        host_bytes=taken[Tier.HOST],
        disk_bytes=taken[Tier.DISK],
        in_core_bytes=tier_bytes(problem, kept, Tier.DEVICE),
    )


def _storage(
    trace: Trace, made: int | None, gap: Gap, choice: Choice, moves: dict[Gap, Move]
) -> Storage:
    buffer = trace.buffers[gap.buffer]
    move = moves.get(gap)
    module, source = ("", "") if made is None else place(trace.ops[made].site)
    return Storage(
        buffer=buffer.id,
        name=buffer.name,
        nbytes=buffer.nbytes,
        made=None if made is None else _use(trace, made),
        module=module,
        source=source,
        after=_use(trace, gap.after),
        before=_use(trace, gap.before),
        choice=choice,
        seconds_more=SecondsMore() if move is None else _seconds_more(move),
        reason="" if move is None else move.reason,
        dead=gap.dead,
    )


def _use(trace: Trace, op: int) -> Use:
    return Use(op, trace.ops[op].target)


def _seconds_more(move: Move) -> SecondsMore:
    """The cost of each action. For recomputation it is the plan's own way, else the cheaper one."""
    own = next(a.seconds for a in move.alternatives if a.chosen) or 0.0

    def more(action: Action) -> float | None:
        ways = [a for a in move.alternatives if a.choice.split()[0] == action]
        chosen = [a for a in ways if a.chosen]
        known = [s for s in map(_seconds, chosen or ways) if s is not None]
        return round(min(known) - own, DIGITS) + 0.0 if known else None

    return SecondsMore(*(more(action) for action in Action))


def _seconds(alternative: Alternative) -> float | None:
    return alternative.seconds if alternative.chosen or alternative.fits else None
