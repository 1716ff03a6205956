"""solving: turn the problem of one call into a plan and a program.

The plan comes from the file of plans or from the policy. Here the machine's links are measured,
room is left for a GPU's allocator, and a disk beyond the host is added if nothing else helps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakKeyDictionary, ref

from outcore.allocators import Card, Space
from outcore.allocators.expandable import ExpandableSegments
from outcore.aten import is_opaque
from outcore.cores import usable_cores
from outcore.errors import InfeasibleError, SpillError
from outcore.execute import Driver
from outcore.ir.hardware import Hardware, Tier
from outcore.ir.layout import Layout
from outcore.ir.margin import naming_any_budget
from outcore.ir.memory import fits
from outcore.ir.once import once_per_trace
from outcore.ir.plan import Choice, Gap, Offload, Plan, make_plan
from outcore.ir.problem import Problem
from outcore.ir.program import Program
from outcore.ir.store import digest
from outcore.ir.trace import Trace
from outcore.lower import kept, lower
from outcore.out_of_process import (
    place_out_of_process,
    plan_and_place,
    plan_out_of_process,
    prepare,
)
from outcore.planfile import Overridden, Rule, SavedPlan, check_rules, forced, has_effect
from outcore.policies import Hasty, Policy, overflow, with_roomy_host
from outcore.policies.search.defragment import Defragment
from outcore.policies.search.search import Search
from outcore.runtime.graphs.graph import PlannedGraph
from outcore.runtime.graphs.planned import FORCED
from outcore.runtime.limits.host import local_processes
from outcore.runtime.planning.headroom import (
    Make,
    Placed,
    Remembering,
    best_room_for,
    with_best_room,
    with_least_room,
    with_places,
)
from outcore.runtime.planning.shares import Shares
from outcore.runtime.settings.options import NO_DISK_BYTES, Settings
from outcore.runtime.settings.reuse import reused
from outcore.simulate import simulate
from outcore.spec import spec_text

CAUTION = 0.05
"""For `search`, links count as slower than measured by this fraction (docs/decisions/0040)."""

NO_HELP = "outcore: the disk cannot be used"

PIECES = (
    "a step may take {part:.0%} longer than predicted: free memory is fragmented, so torch's "
    "allocator returns some and takes other memory; a smaller budget leaves more of it"
)

LITTLE = 0.01
"""Allocator losses up to this part of a step's time are not mentioned in the report."""

WITHOUT_DISK = "outcore: without strict, or with disk_budget=0, training goes on without a disk"


@dataclass(frozen=True, slots=True)
class Solved:
    """A plan, lowered for the problem that it was made for, and what `Planned` tells of it."""

    problem: Problem
    plan: Plan
    program: Program
    room_bytes: int = 0
    layout: Layout | None = None
    after_beyond_bytes: int = 0
    from_file: str = ""
    note: str = ""


class Solver:
    """Solves the problems of one budget, by the user's policy, plans and rules, on this machine."""

    def __init__(self, settings: Settings, driver: Driver) -> None:
        self.settings, self.driver = settings, driver
        self.places = True
        """Whether plans may have a layout on a GPU. False once a layout turned out to be of no use.
        """
        self._hardware: Hardware | None = None
        self._prepared = False
        """Whether the planning process was started early."""
        self._unusable = ""
        """Why the disk cannot be used; empty if it can, or if nobody has tried yet."""
        self._kept: tuple[Callable[[], Trace | None], Program | None] = (lambda: None, None)
        """Cache for `kept`: the trace of the graph that was planned last (weakly), and its program.
        """
        self._rules: WeakKeyDictionary[PlannedGraph, frozenset[Rule]] = WeakKeyDictionary()
        """Graph -> the overrides that affect it."""
        self._effective: set[Rule] = set()
        """Overrides that affected any graph so far. That graph may be idle by now, or gone."""

    def captured(self, graph: PlannedGraph) -> None:
        """Note which overrides affect `graph`, so that they need not affect others."""
        rules, trace = self.settings.given.rules, graph.captured.trace
        self._rules[graph] = frozenset(rule for rule in rules if has_effect(rule, [trace]))
        self._effective |= self._rules[graph]

    def hardware(self) -> Hardware:
        """This machine, with its links measured (once), and a little slower for `search`.

        If the disk cannot be used, it is left out with a warning; with `strict`, SpillError is
        raised.
        """
        if self._hardware is None:
            try:
                self._hardware = self._cautious(self.driver.hardware(self._budgets))
            except SpillError as error:
                if self.settings.strict:
                    error.add_note(WITHOUT_DISK)
                    raise
                self._unusable = str(error)
                warnings.warn(f"outcore offloads nothing: {error}", stacklevel=2)
                without = self.driver.hardware(self._budgets | {Tier.DISK: 0})
                self._hardware = self._cautious(without)
        return self._hardware

    def _cautious(self, measured: Hardware) -> Hardware:
        """The machine that the policy plans for."""
        searches = isinstance(self.settings.policy, Search)
        return measured.with_slower_links(CAUTION) if searches else measured

    def kept(self, problem: Problem) -> Program:
        """The program that keeps everything. It does not depend on budgets: one for each graph."""
        known, program = self._kept
        if known() is not problem.trace or program is None:
            program = kept(problem)
            self._kept = ref(problem.trace), program
        return program

    def prepare(self, problem: Problem) -> None:
        """Let the planning process start while steps are profiled, if `search` may be needed.

        Not all workspaces are known yet: for them, the first of the rooms is left. Nothing is
        started on a CPU, whose cores and memory it would take from the steps, nor if a file has the
        plans.
        """
        settings = self.settings
        searches = isinstance(settings.policy, Search) and not settings.given.path
        if self._prepared or settings.card is None or not searches:
            return
        roomy = replace(problem, budget_bytes=problem.budget_bytes - settings.rooms[0])
        if not fits(roomy, self.kept(problem)):
            self._prepared = True
            prepare()

    @property
    def _budgets(self) -> dict[Tier, int]:
        settings = self.settings
        return {
            Tier.DEVICE: settings.budget_bytes,
            Tier.HOST: settings.host_budget_bytes,
            Tier.DISK: settings.disk_budget_bytes,
        }

    @property
    def may_haste(self) -> bool:
        """Whether the policy can plan in a small part of its usual time."""
        return isinstance(self.settings.policy, Hasty)

    def solved(self, shares: Shares, problem: Problem, *, in_haste: bool = False) -> Solved:
        """The plan for `problem`: from the file of plans if it has one, else from the policy.

        `in_haste`: the policy uses a small part of its time, if it can.

        Raises InfeasibleError if the policy has no plan, or the file's does not fit; DigestError,
        OptionValueError or VerifyError if the file's is for another graph or machine.
        """
        in_core = self.kept(problem)
        given, budget_bytes = self.settings.given, problem.budget_bytes
        unseen = [rule for rule in given.rules if rule not in self._effective]
        check_rules(unseen, [g.captured.trace for g in shares.active])
        fixed = forced(problem, given.rules)
        earlier = [g.captured.trace for g in shares.active[: shares.active.index(shares.graph)]]
        saved = given.find(problem, strict=self.settings.strict, earlier=earlier)
        if saved is not None:
            problem = self._with_tiers(shares, problem, saved.plan())
            with naming_any_budget(budget_bytes):
                plan = reused(problem, saved, fixed, given.path)
            card = self._card() if plan.moves else None
            if card is not None:
                problem = best_room_for(plan, problem, self.settings.rooms, card)
            made = Placed(problem, plan)
        else:
            made = self._made(shares, problem, in_core, fixed, in_haste=in_haste)
        problem, plan, layout = made
        if plan.choices or plan.variants:
            program = lower(problem, plan, fast=True)
        else:
            program = replace(in_core, plan_digest=digest(plan))
        if layout is None and self._may_place(shares, plan) and not in_haste:
            layout = place_out_of_process(problem, program, self._space(shares, budget_bytes))
        notes = [*self._notes(shares, saved)]
        if plan.moves and layout is None and not in_haste:
            notes.append(self._loss(problem, program))
        return Solved(
            problem,
            plan,
            program,
            room_bytes=budget_bytes - problem.budget_bytes,
            layout=layout,
            after_beyond_bytes=shares.graph.status.after_beyond_bytes,
            from_file="" if saved is None else given.path,
            note="; ".join(filter(None, notes)),
        )

    def _notes(self, shares: Shares, saved: SavedPlan | None) -> Iterator[str]:
        yield self.settings.given.note(saved)
        yield self._idle_rules(shares.active)
        yield f"nothing is offloaded: {self._unusable}" * bool(self._unusable)

    def _loss(self, problem: Problem, program: Program) -> str:
        """A note on what a GPU's allocator costs a step; empty if it is little."""
        card = self._card()
        if card is None:
            return ""
        lost, seconds = card.lost_seconds(problem, program), simulate(problem, program).seconds
        return PIECES.format(part=lost / seconds) if lost > LITTLE * seconds else ""

    def _idle_rules(self, active: Sequence[PlannedGraph]) -> str:
        """A note on overrides that affect none of the running graphs; empty if all affect some."""
        found = frozenset().union(*(self._rules[g] for g in active))
        idle = [rule for rule in self.settings.given.rules if rule not in found]
        listed = ", ".join(f'"{rule.match}: {rule.action}"' for rule in idle)
        return f"overrides that match no graph that ran at planning time: {listed}" * bool(idle)

    def _made(
        self,
        shares: Shares,
        problem: Problem,
        in_core: Program,
        fixed: Mapping[Gap, Choice],
        *,
        in_haste: bool,
    ) -> Placed:
        """The policy's plan with the choices in `fixed`; if everything else fits, it is kept.

        The plan leaves room on the device for the allocator if there is such a plan without a disk
        beyond the host. It is then a plan for a smaller budget, and the returned problem has that
        budget.
        """
        if fits(problem, in_core):
            kept = make_plan(dict(fixed), FORCED)
            kept = kept if kept.moves else replace(kept, policy="keep-all")
            if not fixed or fits(problem, lower(problem, kept, fast=True)):
                return Placed(problem, kept)
        asked: Policy = self.settings.policy
        policy = asked.in_haste if in_haste and isinstance(asked, Hasty) else asked
        around = Overridden(policy, self.settings.given.rules) if fixed else policy
        make, rooms = Remembering(partial(plan_out_of_process, around)), self.settings.rooms
        search = policy if isinstance(policy, Search) and not (policy.seconds or in_haste) else None
        if search is not None and self._may_place(shares):
            space = self._space(shares, problem.budget_bytes)
            at_once = _searches_at_once(search)
            place = partial(plan_and_place, around, space=space, at_once=at_once)
            placed = with_places(problem, rooms, place, make)
            if placed is not None:
                return placed
        card, found = self._card() if search is not None else None, None
        if card is not None:
            improve = partial(_defragmented, card=card, fixed=frozenset(fixed))
            found = with_best_room(problem, rooms, make, improve, card)
        elif any(rooms):
            found = with_least_room(problem, rooms[0], make)
        if found is not None:
            return Placed(*found)
        try:
            return Placed(*self.solve(shares, problem, make))
        except InfeasibleError as error:
            if policy is not asked and error.policy == spec_text(policy):
                error.policy = spec_text(asked)
            raise

    def _may_place(self, shares: Shares, plan: Plan | None = None) -> bool:
        """Whether to make a layout: on a GPU that one call of one graph nearly fills.

        A step with a layout computes on a separate stream. Kernels of other packages may run on the
        default stream, which does not wait for it; conditions and loops may contain such kernels.
        """
        card = self.settings.card
        grows = card is not None and isinstance(card.allocator, ExpandableSegments) and self.places
        alone = len(shares.active) == 1 and shares.graph.status.at_once.expected <= 1
        if not (grows and alone and any(self.settings.rooms)) or _has_opaque(
            shares.graph.captured.trace
        ):
            return False
        return plan is None or bool(plan.moves)

    def _space(self, shares: Shares, budget_bytes: int) -> Space:
        """The space of a budget; no more than the card has apart from free parts of used pages."""
        card, most = self._card(), budget_bytes
        if card is not None and card.held is not None:
            most = min(most, card.limit_bytes - card.held.wasted_bytes)
        return Space(most, shares.graph.status.after_beyond_bytes)

    def _card(self) -> Card | None:
        """The GPU with what is held of it now; None if plans leave no room for its allocator."""
        card = self.settings.card
        if card is None or not any(self.settings.rooms):
            return None
        return replace(card, held=self.settings.read_held())

    def _with_tiers(self, shares: Shares, problem: Problem, plan: Plan) -> Problem:
        """The problem with a disk beyond the host, if `plan` uses one and the machine has one."""
        used = {c.tier for _, c in plan.choices if isinstance(c, Offload)}
        if Tier.DISK not in used or problem.hardware.capacity(Tier.DISK):
            return problem
        room = shares.outer(Tier.DISK, self.settings.disk_budget_bytes)
        hardware = self._with_disk(problem.hardware) or problem.hardware
        return replace(problem, hardware=hardware, disk_budget_bytes=room)

    def solve(
        self, shares: Shares, problem: Problem, make: Make, *, overlap: bool = True
    ) -> tuple[Problem, Plan]:
        """The plan of `make`; if that has none, with a disk beyond the host.

        Returns the problem that the plan is for, too. `overlap`: whether it is to run with overlap.
        Raises InfeasibleError as `make` does, naming a budget that includes the margin.
        """
        with naming_any_budget(problem.budget_bytes):
            return self._solve_somewhere(shares, problem, make, overlap=overlap)

    def _solve_somewhere(
        self, shares: Shares, problem: Problem, make: Make, *, overlap: bool
    ) -> tuple[Problem, Plan]:
        try:
            return problem, make(problem)
        except InfeasibleError as error:
            if self._unusable:
                error.add_note(f"{NO_HELP}: {self._unusable}")
            if not problem.hardware.capacity(Tier.HOST) or not self.settings.disk_budget_bytes:
                raise
            room = shares.outer(Tier.DISK, self.settings.disk_budget_bytes)
            wider = replace(problem, disk_budget_bytes=room)
            try:
                plan = make(with_roomy_host(wider))
                hardware = self._with_disk(problem.hardware)
            except InfeasibleError:
                if self.settings.disk_budget_bytes <= NO_DISK_BYTES:
                    error.add_note(f"{NO_HELP}: {self.settings.spill_dir} is missing or full")
                raise error from None
            except SpillError as unusable:
                error.add_note(f"{NO_HELP}: {unusable}")
                raise error from None
            if hardware is None:
                raise
        wider = replace(wider, hardware=hardware)
        return wider, overflow(wider, plan, overlap=overlap)

    def _with_disk(self, hardware: Hardware) -> Hardware | None:
        """`hardware` with a disk beyond the host (measured once); None if the machine has none."""
        if hardware.capacity(Tier.DISK):
            return hardware
        known = self.hardware()
        if not known.capacity(Tier.DISK):
            wider = self.driver.wider_hardware(self._budgets)
            if wider is None:
                return None
            self._hardware = known = self._cautious(wider)
        links = {(a, b): link for a, b, link in (*known.links, *hardware.links)}
        return replace(known, links=tuple((a, b, link) for (a, b), link in links.items()))


@once_per_trace
def _has_opaque(trace: Trace) -> bool:
    """Whether an op is neither torch's nor outcore's."""
    return any(is_opaque(op.target) for op in trace.ops)


def _searches_at_once(search: Search) -> int:
    """For how many searches this process has cores, next to other processes of its job."""
    return max(1, usable_cores() // local_processes() // search.walks)


def _defragmented(problem: Problem, plan: Plan, card: Card, fixed: frozenset[Gap]) -> Plan:
    return plan_out_of_process(Defragment(plan, card, fixed), problem)
