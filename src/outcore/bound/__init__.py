"""bound: a time that no plan can beat, by a fluid relaxation (docs/bound.md)."""

from __future__ import annotations

from functools import reduce
from math import ceil
from operator import add

from outcore.bound.copies import add_copies
from outcore.bound.donations import Donations
from outcore.bound.linear import LinearProgram
from outcore.bound.memory import add_memory
from outcore.bound.reruns import add_reruns
from outcore.bound.scene import Scene, make_scene
from outcore.errors import InfeasibleError
from outcore.ir.problem import Problem
from outcore.ir.verify_problem import verify_problem

__all__ = ["lower_bound"]

ROUNDING = 1e-9
"""Relative error of sums of floats, well above their actual error."""


def lower_bound(problem: Problem) -> float:
    """The seconds, as `simulate` counts them, that no plan for `problem` can beat.

    The bound holds for every program that the verifier accepts, that fits the problem's limits, and
    that keeps on the device what is held (`ir/liveness.py`). It must also issue no copy out of a
    buffer before the use that the buffer's first gap follows. The programs of all plans meet this.
    Fractions of buffers may leave and fractions of ops may run again, so plans may be well above
    the bound. Both directions of a link count as independent whatever `hardware.duplex` says, as in
    `simulate`. The bound never rises when the budget or the rate of a link grows.

    Raises InfeasibleError if no program fits the device budget. No program fits below its
    `floor_bytes`; the smallest budget of a plan may be larger. Raises VerifyError if the problem
    breaks a rule, MissingPackageError if scipy is needed and not installed. It is not needed if
    everything fits.
    """
    verify_problem(problem)
    if not problem.trace.ops:
        return 0.0
    scene = make_scene(problem)
    in_core = reduce(add, scene.positions.seconds)  # as in `simulate`: `sum` may round otherwise
    _check_working_sets(scene)
    lp = LinearProgram()
    wait = [lp.variable(cost=1.0) for _ in range(scene.grid.size + 1)]
    if not _add_rows(lp, scene, wait):
        return in_core
    solution = lp.solve()
    if solution.infeasible:
        _check_all(scene)
    return in_core + solution.proved * scene.second_unit


def _add_rows(
    lp: LinearProgram, scene: Scene, wait: list[int], excess: int | None = None
) -> dict[int, int]:
    """Add all rows; returns the position of each row for memory."""
    copies = add_copies(lp, scene, wait)
    reruns = add_reruns(lp, scene, wait)
    return add_memory(lp, scene, copies, reruns, [] if excess is None else [(excess, 1.0)])


def _check_working_sets(scene: Scene) -> None:
    """Raise InfeasibleError if some op does not fit even with everything else away."""
    donations = Donations(scene)
    position = max(range(scene.positions.end), key=donations.smallest_bytes)
    smallest = donations.smallest_bytes(position)
    if smallest > scene.problem.budget_bytes:
        raise _infeasible(scene, smallest, position)


def _check_all(scene: Scene) -> None:
    """Raise InfeasibleError if the least memory, with copies and reruns at no cost, is too much."""
    lp = LinearProgram()
    rows = _add_rows(lp, scene, [], lp.variable(cost=1.0))
    solution = lp.solve()
    excess = ceil(solution.proved * scene.byte_unit * (1 - ROUNDING) - ROUNDING * scene.byte_unit)
    if excess > 0:
        position = rows[min(rows, key=solution.duals.__getitem__)]
        raise _infeasible(scene, scene.problem.budget_bytes + excess, position)


def _infeasible(scene: Scene, floor_bytes: int, position: int) -> InfeasibleError:
    problem = scene.problem
    op = scene.positions.ops[position]
    if op is not None:
        site = problem.trace.ops[op].site
        where = f"op {op} {problem.trace.ops[op].target}" + (f" at {site}" if site else "")
    elif position:
        where = "the pause between the forward and the backward call"
    else:
        where = "what the caller passes in"
    return InfeasibleError(
        budget_bytes=problem.budget_bytes,
        floor_bytes=floor_bytes,
        op=where,
        needed_bytes=max(0, floor_bytes - problem.outside_bytes),
    )
