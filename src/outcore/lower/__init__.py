"""lower: turn a Plan into a Program, by passes over a Draft. Each result is verified.

Programs for further traces of a family are those for the first one with other slots (`kept`).
"""

from __future__ import annotations

from dataclasses import replace

from outcore.gc_paused import gc_paused
from outcore.ir.family import SharedProgram, family_of
from outcore.ir.plan import KEEP_ALL, Plan
from outcore.ir.problem import Problem
from outcore.ir.program import Copy, Program
from outcore.ir.store import check_plan_for, digest
from outcore.ir.verify_plan import verify_plan
from outcore.ir.verify_problem import verify_problem
from outcore.ir.verify_program import verify_program
from outcore.lower.donate import donate
from outcore.lower.draft import Draft, assemble
from outcore.lower.expand import expand
from outcore.lower.place import compacted, place
from outcore.lower.prefetch import prefetch
from outcore.lower.release import release

__all__ = ["kept", "lower", "lower_without_overlap", "resized"]


@gc_paused()
def lower(problem: Problem, plan: Plan, *, fast: bool = False) -> Program:
    """The Program that carries out `plan`, with the digests of its trace and plan.

    `fast` skips the verification between passes; the final one always runs. A program that does
    not fit the budget is returned too: use `fits` to check it.

    Raises DigestError if the plan is for another trace, and VerifyError if the problem breaks a
    rule or the plan is not valid for it.
    """
    verify_problem(problem)
    if plan.trace_digest:
        check_plan_for(plan, problem)
    verify_plan(problem, plan)

    def checked(draft: Draft) -> Draft:
        if not fast:
            verify_program(problem, assemble(draft))
        return draft

    draft = checked(expand(problem, plan))
    draft = checked(donate(problem.trace, draft))
    draft = checked(release(problem, plan, draft))
    draft = checked(prefetch(problem, plan, draft))
    program = assemble(place(draft))
    verify_program(problem, program)
    return replace(program, trace_digest=digest(problem.trace), plan_digest=digest(plan))


def kept(problem: Problem) -> Program:
    """The Program that keeps everything. It does not depend on budgets.

    For traces of one family only slots differ, and the digest of the trace is left out. Raises as
    `lower`.
    """
    family = family_of(problem.trace)
    if family is None:
        return lower(problem, KEEP_ALL, fast=True)
    rounding = problem.hardware.rounding_bytes
    if rounding not in family.kept:
        program = replace(lower(problem, KEEP_ALL, fast=True), trace_digest="")
        family.kept[rounding] = SharedProgram(program)
        return program
    return _with_slots(family.kept[rounding].program, problem)


def resized(program: Program, problem: Problem) -> Program | None:
    """`program`, which was made for a trace that differs in sizes alone, for that of `problem`.

    None if one of its slots would be larger: then it may not be what one would make for these
    sizes. Slots in the outer tiers move together. The digest of the trace is left out.
    """
    found = _with_slots(program, problem)
    pairs = zip(found.slots, program.slots, strict=True)
    if any(new.nbytes > old.nbytes for new, old in pairs):
        return None
    return replace(found, slots=compacted(found.slots, program.slots))


def _with_slots(program: Program, problem: Problem) -> Program:
    """`program` with slots of the bytes that they have for `problem`, in the same places."""
    buffers, size = problem.trace.buffers, problem.hardware.slot_bytes
    targets = {x.action.target for x in program.body if isinstance(x.action, Copy)}
    slots = tuple(
        replace(s, nbytes=size(s.tier, buffers[s.buffer].nbytes, copied=s.id in targets))
        for s in program.slots
    )
    return replace(program, slots=slots, trace_digest="")


def lower_without_overlap(problem: Problem, plan: Plan) -> Program:
    """The Program that carries out `plan` in the least memory, whatever the budget of `problem`.

    Compute waits for each copy immediately. Raises as `lower`.
    """
    return lower(replace(problem, budget_bytes=1), plan, fast=True)
