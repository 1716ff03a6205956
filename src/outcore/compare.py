"""compare: show what policies make of one trace on one machine, without running anything."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

from outcore.allocators import Allocator, reserve
from outcore.bound import lower_bound
from outcore.errors import BudgetError, InfeasibleError, PolicyError
from outcore.estimate import estimate
from outcore.ir.hardware import Tier
from outcore.ir.margin import budget_for, margin_bytes, naming_any_budget
from outcore.ir.plan import KEEP_ALL, Plan
from outcore.ir.problem import Problem
from outcore.ir.timeline import Timeline
from outcore.ir.trace import Role, Trace
from outcore.lower import lower
from outcore.policies import Improver, Policy, ask, resolve
from outcore.policies.holdings import Holdings, floor_holdings
from outcore.presets import Preset
from outcore.report import Counts, count_choices
from outcore.simulate import simulate
from outcore.spec import spec_text
from outcore.units import format_bytes, parse_size

ENDLESS_BYTES = 1 << 62
"""A budget that no step exceeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One policy under one budget, predicted; figures are None if the policy has no plan."""

    policy: str
    """The policy's spec."""
    budget_bytes: int
    feasible: bool = False
    """Whether the plan fits the budget, and what the allocator reserves for it too, if that was
    computed."""
    seconds: float | None = None
    """Time of a step."""
    items_per_second: float | None = None
    """Samples per second."""
    relative_to_in_core: float | None = None
    """Throughput relative to the step with everything kept, on a device that has room for it."""
    peak_bytes: int | None = None
    """Peak device memory."""
    reserved_bytes: int | None = None
    """The most that the allocator reserves; None if there is no allocator.

    A plan for which this exceeds the budget is not feasible, and has no times.
    """
    counts: Counts | None = None
    """How many gaps are kept, offloaded and recomputed."""
    planning_seconds: float | None = None
    """How long the policy took."""
    lower_bound_seconds: float | None = None
    """Time that no policy's plan can beat under this budget.

    None if it was not computed, or if no plan fits the budget.
    """
    needed_bytes: int | None = None
    """Bytes of `needed_tier` that would be needed, if the plan is not feasible."""
    needed_tier: str = ""
    """The tier whose budget is too small; empty if none is."""
    reason: str = ""
    """Why there is no feasible plan; empty if there is one."""

    @property
    def failed(self) -> bool:
        """Whether the policy failed for the given `reason`, so that no budget would help."""
        return bool(self.reason) and self.needed_bytes is None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values by field name; `counts` as a dict."""
        return asdict(self)


class Comparison:
    """A trace on a machine: what it needs in-core, and what policies make of it.

    `items`: samples in the trace's batch. `states`: copies of the parameters that the optimizer
    holds on the device (1: SGD with momentum, 2: Adam). `allocator`: what serves the programs, with
    the whole device to allocate from; with None, reserved memory is not computed. `variants`:
    whether policies may choose algorithms (`estimate`); the in-core step always runs the default
    ones. `margin`: whether plans leave as much of their budget free as they do in training.
    `unused_bytes`: what the model holds and the step does not use.
    """

    def __init__(
        self,
        trace: Trace,
        machine: Preset,
        items: int,
        states: int = 1,
        allocator: Allocator | None = None,
        *,
        variants: bool = False,
        margin: bool = False,
        unused_bytes: int = 0,
    ) -> None:
        self.trace, self.machine, self.items = trace, machine, items
        self.allocator, self.margin = allocator, margin
        self.profile = estimate(trace, machine.hardware, machine.efficiency, variants=variants)
        weights = sum(b.nbytes for b in trace.buffers if b.role is Role.PARAM)
        self.outside_bytes = states * weights + unused_bytes
        self._ample = Problem(
            trace,
            self.profile,
            machine.hardware,
            ENDLESS_BYTES,
            outside_bytes=self.outside_bytes,
        )
        kept = lower(self._ample, KEEP_ALL)
        self.in_core: Timeline = simulate(self._ample, kept)

    def problem(self, budget_bytes: int) -> Problem:
        """Return the problem under a device budget."""
        free = margin_bytes(budget_bytes) if self.margin else 0
        outside = self.outside_bytes + free
        return replace(self._ample, budget_bytes=budget_bytes, outside_bytes=outside)

    def naming_budgets(self, budget_bytes: int) -> AbstractContextManager[None]:
        """Inside, an InfeasibleError of `problem(budget_bytes)` names a budget that works."""
        return naming_any_budget(budget_bytes) if self.margin else nullcontext()

    @property
    def in_core_peak_bytes(self) -> int:
        """Peak device memory of the step with everything kept."""
        return self.in_core.peak(Tier.DEVICE)

    @property
    def machine_bytes(self) -> int:
        """The device memory of the machine."""
        return self.machine.hardware.capacity(Tier.DEVICE)

    def floor(self) -> Holdings:
        """Return the least that some plan needs, without a margin, and what is held there."""
        return floor_holdings(self._ample)

    def budget_for(self, nbytes: int) -> int:
        """Return the smallest budget that has room for `nbytes`, and for the margin if any."""
        return budget_for(nbytes) if self.margin else nbytes

    def proved_floor_bytes(self) -> int:
        """Return what provably every plan needs; the floor may be a little higher."""
        try:
            lower_bound(replace(self._ample, budget_bytes=1))
        except InfeasibleError as error:
            return error.floor_bytes
        return 1

    def rows(
        self, budgets: Iterable[int], policies: Iterable[str | Policy], *, bound: bool = False
    ) -> Iterator[Compared]:
        """Yield one row per budget and policy, the smallest budget first.

        An `Improver` starts from its plan for the budget before, so more memory never makes it
        slower. Other policies may make a slower plan for a larger budget. `bound`: include the
        lower bound for the budget. If a policy of another package fails, its row says so.

        Raises PolicyError for a spec that is wrong, and MissingPackageError if `bound` needs a
        package that is not installed.
        """
        planners = [_Planner(self, resolve(policy)) for policy in policies]
        for budget in sorted(set(budgets)):
            least = self.bound_seconds(budget) if bound else None
            for planner in planners:
                yield replace(planner.row(budget), lower_bound_seconds=least)

    def bound_seconds(self, budget_bytes: int) -> float | None:
        """Return the time that no plan can beat under a budget; None if no plan fits it."""
        try:
            return lower_bound(self.problem(budget_bytes))
        except InfeasibleError:
            return None

    def row(self, budget_bytes: int, policy: Policy) -> Compared:
        """Return what `policy` makes of `budget_bytes`."""
        return self.row_and_plan(budget_bytes, policy)[0]

    def row_and_plan(
        self, budget_bytes: int, policy: Policy, known: Sequence[Plan] = ()
    ) -> tuple[Compared, Plan | None]:
        """Return the row and the plan, if there is one; an `Improver` starts from `known` plans."""
        problem = self.problem(budget_bytes)
        blank = Compared(policy=spec_text(policy), budget_bytes=budget_bytes)
        start = time.perf_counter()
        try:
            with self.naming_budgets(budget_bytes):
                plan = ask(policy, problem, known)
        except InfeasibleError as error:
            refused = replace(
                blank,
                planning_seconds=time.perf_counter() - start,
                needed_bytes=error.floor_bytes,
                needed_tier=error.tier,
                reason=str(error),
            )
            return refused, None
        except PolicyError as error:
            return replace(blank, reason=str(error)), None
        return self._row_of(blank, problem, plan, time.perf_counter() - start), plan

    def _row_of(self, blank: Compared, problem: Problem, plan: Plan, seconds: float) -> Compared:
        """Return the figures of a plan that took `seconds` to make."""
        program = lower(problem, plan)
        timeline = simulate(problem, program)
        planned = replace(
            blank,
            peak_bytes=timeline.peak(Tier.DEVICE),
            counts=count_choices(self.trace, plan),
            planning_seconds=seconds,
        )
        if self.allocator is not None:
            reserved = reserve(problem, program, self.allocator).reserved.nbytes
            planned = replace(planned, reserved_bytes=reserved)
            if reserved > problem.budget_bytes:
                return _over(planned, self.allocator)
        return replace(
            planned,
            feasible=True,
            seconds=timeline.seconds,
            items_per_second=_part(self.items, timeline.seconds),
            relative_to_in_core=_part(self.in_core.seconds, timeline.seconds),
        )


def _part(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds else None


class _Planner:
    """One policy, applied to one budget after the other, the smallest first."""

    def __init__(self, comparison: Comparison, policy: Policy) -> None:
        self.comparison, self.policy = comparison, policy
        self.last: tuple[Compared, Plan] | None = None

    def row(self, budget_bytes: int) -> Compared:
        """Return the row for a budget; an `Improver` is never slower than for the last one."""
        known = () if self.last is None else (self.last[1],)
        row, plan = self.comparison.row_and_plan(budget_bytes, self.policy, known)
        if self.last is not None and (row.seconds or inf) > (self.last[0].seconds or inf):
            spent = row.planning_seconds  # the last plan, lowered for more memory, got slower
            row = replace(self.last[0], budget_bytes=budget_bytes, planning_seconds=spent)
            plan = self.last[1]
        if plan is not None and row.feasible and isinstance(self.policy, Improver):
            self.last = row, plan
        return row


def read_budget(option: str, text: str, machine_bytes: int, part_of: int | None = None) -> int:
    """Return the bytes of a budget; percentages are of `part_of`, or of the machine's memory.

    Raises BudgetError, which names `option`, if the text cannot be read or exceeds the machine's
    memory.
    """
    try:
        found = parse_size(text, machine_bytes if part_of is None else part_of)
    except ValueError as error:
        raise BudgetError(option=option, value=text, reason=str(error)) from error
    if found > machine_bytes:
        reason = f"it is {format_bytes(found)}, and the machine has {format_bytes(machine_bytes)}"
        raise BudgetError(option=option, value=text, reason=reason)
    return found


def _over(row: Compared, allocator: Allocator) -> Compared:
    """Return the row of a plan that fits the budget but for which the allocator reserves more."""
    reserved, peak = row.reserved_bytes or 0, row.peak_bytes or 0
    reason = (
        f"{spec_text(allocator)} reserves {format_bytes(reserved)} for a plan whose peak is "
        f"{format_bytes(peak)}; the budget is {format_bytes(row.budget_bytes)}"
    )
    return replace(row, needed_bytes=reserved, needed_tier=Tier.DEVICE.value, reason=reason)
