"""lower: Plan -> Program, in small passes over a Draft, verified after each."""

from __future__ import annotations

from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.ir.program import Program
from outcore.ir.verify import verify_plan
from outcore.ir.verify_program import verify_program
from outcore.lower.donate import donate
from outcore.lower.draft import Draft, assemble
from outcore.lower.expand import expand
from outcore.lower.place import place
from outcore.lower.prefetch import prefetch
from outcore.lower.release import release

__all__ = ["lower"]


def lower(problem: Problem, plan: Plan, *, fast: bool = False) -> Program:
    """The Program that carries out `plan`.

    `fast` leaves out the verification between passes (the last one always runs). A program that does
    not fit the budget is returned all the same: `fits` is the judge of that.

    Raises VerifyError where the plan is not one for this problem.
    """
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
    return program
