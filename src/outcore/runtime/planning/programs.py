"""programs: the programs of calls that run without a plan of the policy.

These are profiled calls, calls that nobody differentiates, and calls for which little memory is
left. Their plans follow fixed rules, and most are made before anything is measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial

from outcore.errors import InfeasibleError
from outcore.gc_paused import gc_paused
from outcore.ir.family import SharedProgram, family_of
from outcore.ir.hardware import Tier
from outcore.ir.memory import fits, held_bytes, peak, staging_needed
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile
from outcore.ir.program import Free, Program
from outcore.ir.trace import Trace
from outcore.lower import lower_without_overlap, resized
from outcore.policies import Policy, floor_plan, leanest_plan
from outcore.policies.chen import ChenSqrt
from outcore.policies.recompute_all import RecomputeAll
from outcore.runtime.graphs.planned import Planned
from outcore.runtime.planning.headroom import Make
from outcore.runtime.planning.shares import Shares
from outcore.runtime.planning.solving import Solver

_RECOMPUTING: tuple[Policy, ...] = (ChenSqrt(), RecomputeAll())
"""Policies for `Programs.forward_only` that recompute what does not fit, the faster backward first.
"""


class Programs:
    """Makes the programs of calls without a plan, for the graphs of one budget."""

    def __init__(self, solver: Solver) -> None:
        self._solver = solver

    @gc_paused()
    def floor(
        self,
        shares: Shares,
        resident_bytes: int,
        workspace_bytes: Sequence[int] | None,
        *,
        measured: bool,
        leanest: bool,
    ) -> tuple[Program, int]:
        """The program for profiled steps, and the most external bytes with which it fits.

        Copies do not overlap with compute, which keeps memory low. `leanest`: use the plan that
        needs the least memory of all.

        `measured`: checked steps of the graph have shown `workspace_bytes`, which the program has
        room for. Else these are an estimate: there is room for them, and for copies of overwritten
        inputs, if any program has it; if none has, the leanest plan is used. Raises InfeasibleError
        if even that does not fit the budget.
        """
        captured = shares.graph.captured
        problem = self._unmeasured(shares, resident_bytes)
        if measured and workspace_bytes is not None:
            problem = _with_workspaces(problem, workspace_bytes)
            return self._floor(shares, problem, resident_bytes, leanest=leanest)
        copied = copied_bytes(captured.trace, captured.overwritten)
        if workspace_bytes is not None or copied:
            workspaces = workspace_bytes or problem.profile.workspace_bytes
            roomy = _with_workspaces(problem, workspaces)
            roomy = replace(roomy, outside_bytes=problem.outside_bytes + copied)
            with contextlib.suppress(InfeasibleError):
                return self._floor(shares, roomy, resident_bytes, leanest=leanest)
            leanest = True
        return self._floor(shares, problem, resident_bytes, leanest=leanest)

    def _floor(
        self, shares: Shares, problem: Problem, resident_bytes: int, *, leanest: bool
    ) -> tuple[Program, int]:
        """As `floor`, for `problem`.

        For traces of one family, it is the program for larger sizes if that fits.
        """
        family = None if leanest else family_of(problem.trace)
        shared = None if family is None else family.floor
        program = None if shared is None else resized(shared.program, problem)
        if program is not None and fits(problem, program) and not _goes_beyond(problem, program):
            self._solver.prepare(problem)
            spare = problem.budget_bytes - peak(problem, program, Tier.DEVICE).nbytes
            return program, resident_bytes + spare
        make = leanest_plan if leanest else floor_plan
        try:
            problem, plan = self._solver.solve(shares, problem, make, overlap=False)
        except InfeasibleError as error:
            error.at_least = True
            raise
        self._solver.prepare(problem)
        program = lower_without_overlap(problem, plan)
        if family is not None:
            family.floor = SharedProgram(program)
        spare = problem.budget_bytes - peak(problem, program, Tier.DEVICE).nbytes
        return program, resident_bytes + spare

    def most_beside(self, shares: Shares, program: Program, workspace_bytes: Sequence[int]) -> int:
        """The most external bytes with which a program for timed steps fits the budget."""
        problem = _with_workspaces(self._unmeasured(shares, 0), workspace_bytes)
        return problem.budget_bytes - peak(problem, program, Tier.DEVICE).nbytes

    def kept(self, shares: Shares) -> Program:
        """The program that keeps everything."""
        return self._solver.kept(self._unmeasured(shares, 0))

    @gc_paused()
    def lean(
        self,
        shares: Shares,
        planned: Planned,
        held_bytes: int,
        between_bytes: int,
        *,
        without: Collection[Tier] = (),
    ) -> Program:
        """A program of little memory for one call of a planned graph.

        `held_bytes`: all that is held outside the call; `between_bytes`: what is made while it
        waits; `without`: outer tiers that have no room for it. Raises InfeasibleError if even the
        leanest program does not fit beside that.
        """
        hardware, profile = self._solver.hardware(), planned.problem.profile
        problem = shares.problem(hardware, profile, held_bytes, between_bytes)
        make: Make = floor_plan
        if Tier.HOST in without:  # copies to a disk use the buffers that are there for others
            staging = staging_needed(planned.problem.trace, planned.plan)
            problem, make = replace(problem, host_budget_bytes=staging), partial(_beyond, staging)
        if Tier.DISK in without:
            plan = floor_plan(replace(problem, host_budget_bytes=0, disk_budget_bytes=0))
        else:
            problem, plan = self._solver.solve(shares, problem, make, overlap=False)
        return lower_without_overlap(problem, plan)

    @gc_paused()
    def forward_only(
        self, shares: Shares, resident_bytes: int, profiled: Program, *, checked: bool
    ) -> tuple[Program, int]:
        """The program for calls that nobody differentiates, and the most external bytes with it.

        It keeps everything if that fits in half of the budget; the other half is left for
        workspaces, which are not known, and for other graphs. If not, it recomputes in backward: a
        forward call takes no longer for it, and leaves less. That has to fit in the whole budget,
        and a forward call may need no more than with `profiled`, the program of profiled steps, so
        that as much is left for workspaces. `checked`: calls hold `checked_bytes`, too.
        """
        captured, gone = shares.graph.captured, shares.graph.gone
        problem = self._unmeasured(shares, resident_bytes)

        def needed_bytes(program: Program) -> int:
            needed = peak(problem, program, Tier.DEVICE).nbytes
            if checked:
                needed += checked_bytes(problem.trace, program, gone, captured.overwritten)
            return needed

        program = self._solver.kept(problem)
        spare = problem.budget_bytes // 2 - needed_bytes(program)
        most = _forward_peak_bytes(problem, profiled)
        for policy in _RECOMPUTING if spare < 0 else ():
            with contextlib.suppress(InfeasibleError):
                plan = policy.plan(problem)
                again = lower_without_overlap(problem, plan)
                if _forward_peak_bytes(problem, again) <= most:
                    program, spare = again, problem.budget_bytes - needed_bytes(again)
            if spare >= 0:
                break
        return program, resident_bytes + spare

    def _unmeasured(self, shares: Shares, resident_bytes: int) -> Problem:
        profile = Profile.unknown(len(shares.graph.captured.trace.ops))
        return shares.problem(self._solver.hardware(), profile, resident_bytes)


def _with_workspaces(problem: Problem, workspace_bytes: Sequence[int]) -> Problem:
    profile = replace(problem.profile, workspace_bytes=tuple(workspace_bytes))
    return replace(problem, profile=profile)


def _goes_beyond(problem: Problem, program: Program) -> bool:
    """Whether the program uses a disk beyond the host."""
    on_disk = any(slot.tier is Tier.DISK for slot in program.slots)
    return on_disk and problem.hardware.outer is not Tier.DISK


def _forward_peak_bytes(problem: Problem, program: Program) -> int:
    """The device peak of the forward call alone."""
    held = held_bytes(problem, program, Tier.DEVICE)
    return max(held[: program.boundary], default=0)


def checked_bytes(
    trace: Trace, program: Program, gone: Iterable[int], overwritten: Iterable[int]
) -> int:
    """Bytes that a checked call holds in addition to what `program` holds.

    To be able to begin again, it holds all inputs until the call comes back, and copies of some
    (`copied_bytes`). `gone` are inputs that nothing else holds.
    """
    actions = (instruction.action for instruction in program.body)
    freed = {x.slot for x in actions if isinstance(x, Free)} & {*program.arguments}
    let_go = {program.slots[slot].buffer for slot in freed}.union(gone)
    held = let_go.intersection(trace.values[value].buffer for value in trace.inputs)
    return sum(trace.buffers[buffer].nbytes for buffer in held) + copied_bytes(trace, overwritten)


def copied_bytes(trace: Trace, overwritten: Iterable[int]) -> int:
    """Bytes of the copies of inputs that AOTAutograd overwrites, at positions `overwritten`."""
    values = (trace.values[trace.inputs[position]] for position in overwritten)
    return sum(trace.buffers[value.buffer].nbytes for value in values)


def _beyond(staging_bytes: int, problem: Problem) -> Plan:
    """The floor's plan, which stores nothing on a host that has only room for staging."""
    if problem.limit_bytes(Tier.HOST) <= staging_bytes:
        problem = replace(problem, host_budget_bytes=0)
    return floor_plan(problem)
