"""shares: compute what one graph may use of the budget that the graphs of a step share.

The rules are those of decisions 0004 and 0031.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from outcore.ir.hardware import Hardware, Tier
from outcore.ir.margin import margin_bytes
from outcore.ir.memory import crossing_bytes, staging_needed
from outcore.ir.once import once_per_trace
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile
from outcore.ir.totals import borrowed_bytes, resident_bytes
from outcore.ir.trace import Role, Trace
from outcore.runtime.graphs.calls import (
    Calls,
    Taken,
    call_tensor_bytes,
    gradient_bytes,
    least_together,
    nbytes_of,
    returned_bytes,
    states_bytes,
    tangent_bytes,
    together,
)
from outcore.runtime.graphs.external import ExternalMemory, Room
from outcore.runtime.graphs.graph import PlannedGraph
from outcore.runtime.graphs.lending import total_bytes
from outcore.runtime.graphs.observations import Bytes
from outcore.runtime.graphs.planned import Planned
from outcore.runtime.graphs.shown import Shown

MOST_AWAY = 4
"""No plan needs more of an outer tier than slots for all buffers, times this."""


@dataclass(frozen=True, slots=True)
class Shares:
    """The part of the budget, and of the outer tiers, for `graph`, one of the `active` graphs.

    Graphs of one step nest: forward calls run in order, backward calls in reverse. What earlier
    graphs hold counts as external memory. Later graphs are left a share in proportion to what they
    would keep: no more than they can use, and no less than they need. Graphs that alternate within
    a step are both earlier and later.
    """

    graph: PlannedGraph
    active: Sequence[PlannedGraph]
    budget_bytes: int
    """The device's budget."""
    state_bytes: int
    """Size of one state of the random generator of the device."""
    known: MutableMapping[PlannedGraph, Calls]
    """Cache: another graph -> its `Calls`, which know what they need."""
    left_at_least: int = 0
    """The least to leave to later graphs while this one waits, even if they seem to need less."""
    ignore_plans: bool = False
    """Whether to ignore the current plans of other graphs, because they will be planned again as
    they are called."""
    held: Mapping[Tier, int] = field(default_factory=dict)
    """Bytes of the outer tiers that calls of graphs without a plan hold now."""
    unplanned_lean: bool = False
    """Whether to assume that graphs without a plan will hold no more than under their leanest plan.
    """
    _needed: dict[tuple[PlannedGraph, Hardware, int], int | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Cache for `_needed_in_all`."""
    _late: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    """Cache for `late_bytes`: its result, or nothing yet."""

    def problem(
        self, hardware: Hardware, profile: Profile, external_bytes: int, between_bytes: int = 0
    ) -> Problem:
        """The problem of one call, with `external_bytes` held outside the graph.

        These include gradients of later graphs. `between_bytes`: what the rest of the step was seen
        to need between the graph's two calls.
        """
        trace, budget = self.graph.captured.trace, self.budget_bytes
        states = self.graph.status.planned_for * states_bytes(trace, self.state_bytes)
        outside = external_bytes + states + margin_bytes(budget)
        if trace.boundary == len(trace.ops):  # a backward call without ops has no position
            outside += between_bytes + tangent_bytes(trace)
        problem = Problem(
            trace, profile, hardware, budget, outside_bytes=outside, between_bytes=between_bytes
        )
        return self.with_outer_budgets(problem)

    @property
    def later(self) -> list[PlannedGraph]:
        """The graphs that were seen to run while this one waits."""
        return [g for g in self.active if self.graph in g.observed]

    @property
    def alternating(self) -> list[PlannedGraph]:
        """The graphs that alternate with this one: each runs while the other waits."""
        return [g for g in self.later if g in self.graph.observed]

    def left_bytes(self, problem: Problem, external: ExternalMemory) -> tuple[int, ...]:
        """What to leave to later graphs while this one waits: their part, then the least they need.

        The first is the better one to plan with; the second is used if there is no such plan. The
        least for a planned graph is what it needs under its plan. Without later graphs it is
        `left_at_least` alone.

        `problem` is that of one call of this graph; `external`: what was measured around it.
        """
        later = [(g, self._calls(g, problem.hardware)) for g in self.later]
        if not later:
            return (self.left_at_least,)
        # For alternating graphs, `Planned.external_bytes` assumes the `least` plan, so that is the
        # only choice.
        alternating = set(self.alternating)
        lean = [(g, (c.least,) if g in alternating else c.lean) for g, c in later]
        least = least_together([self._meanwhile(g, choices) for g, choices in lean])
        observed = self._seen_to_take(later, external.between_bytes)
        least = least if observed is None else min(least, observed)
        counted = problem.outside_bytes - margin_bytes(problem.budget_bytes)
        needed = self._needed_beyond(counted, self.later, problem.hardware, external)
        if len(needed) == len(later):
            least = min(least, max(0, *needed.values()))
        least = max(self.left_at_least, least)
        calls = Calls(problem, self.graph.status.planned_for)
        mine, theirs = kept_bytes(self.graph), sum(kept_bytes(g) for g, _ in later)
        free = problem.budget_bytes - resident_bytes(problem) - calls.waiting_bytes()
        part = max(0, free) * theirs // max(1, mine + theirs)
        if all(_measured(g) for g, _ in later):
            usable = {g: c.most if c.program is None else c.least for g, c in later}
            part = min(part, problem.between_bytes + self._together(usable))
        return tuple(dict.fromkeys((max(part, least), least)))

    def _seen_to_take(
        self, later: Sequence[tuple[PlannedGraph, Calls]], between_bytes: int
    ) -> int | None:
        """What later graphs need, judged by what the step needed while they were profiled.

        It is more if their current plans need more than they did then. None if not all their calls
        came back in each of those steps, or nobody knows what they needed.
        """
        met: Mapping[PlannedGraph, int] = self.graph.observed.met or {}
        waiting, work, given = 0, [0], 0
        for graph, calls in later:
            # Plans count what a call is given and returns as if it were held throughout.
            given = max(given, call_tensor_bytes(graph.captured.trace))
            number = self._coming(graph)
            if met.get(graph, 0) < number:
                return None
            if calls.program is None:
                continue  # without a plan, it may still run as it was profiled
            before = None if graph.planned is None else graph.planned.profiled
            if before is None:
                return None
            waiting += number * max(0, calls.least.alone_bytes - before.alone_bytes)
            work.append(calls.least.work_bytes - before.work_bytes)
        return between_bytes + waiting + max(work) + given

    def _coming(self, graph: PlannedGraph) -> int:
        """Calls of a later graph that begin and come back while a call of this graph waits."""
        return graph.status.planned_for - self.graph.observed.called.before_first(graph)

    def most_bytes(self, hardware: Hardware) -> int:
        """What later graphs need if everything is kept; workspaces count once they are measured."""
        return self._together({g: self._calls(g, hardware).most for g in self.later})

    def rooms(
        self,
        hardware: Hardware,
        external: ExternalMemory,
        calls: int | None = None,
        *,
        alone: Bytes | None = None,
    ) -> tuple[Room, Room]:
        """Room for memory held outside the graph and its calls, in two sizes.

        The first assumes the most calls of each other graph, as seen in any mix; the second the
        largest single mix that was seen. Each covers calls as they begin and as they come back.
        `calls`: outstanding calls of this graph, including the one to plan; None: all that it is
        planned for. A graph that runs in-core is part of the external memory that was measured.
        `alone`: what each waiting call of another graph holds and nothing else does; None: as it is
        known of that graph.
        """
        graph, active, unknown = self.graph, set(self.active), external.returning_bytes
        if graph.observed.met is not None:
            external = replace(external, late_bytes=self.late_bytes())
        number = graph.status.planned_for if calls is None else calls
        alone, io_bytes = alone or cache(partial(self._alone, hardware)), _call_tensor_bytes
        called = graph.observed.called.external_bytes(graph, number, active, alone, io_bytes)
        returned = graph.observed.returned.external_bytes(
            graph, number, active, alone, io_bytes, unknown
        )
        most, of_one = map(external.room, called, returned)
        return most, of_one

    def external(self, shown: Shown) -> ExternalMemory:
        """The external memory, by what profiled steps have shown."""
        base, dropped = shown.base_bytes, shown.dropped_base_bytes
        grown = max(0, shown.open_base_bytes - max(base, dropped))
        base, more = base + grown, max(0, dropped - base)
        lingering = max(0, shown.lingering_bytes - more)
        rest = shown.lingering_bytes + shown.between_bytes - more
        return ExternalMemory(
            base_bytes=base + more,
            timed_base_bytes=base + more,
            dropped_bytes=more,
            lingering_bytes=lingering,
            returning_bytes=self.graph.observed.returned.excess_bytes(),
            between_bytes=max(0, rest - lingering),
            gone=shown.gone,
            late_bytes=self.late_bytes(),
        )

    def _alone(self, hardware: Hardware, graph: PlannedGraph) -> int:
        """Bytes that each waiting call of another graph holds and nothing else does."""
        if graph.retired:
            return graph.private_bytes
        calls = self._calls(graph, hardware)
        if self.unplanned_lean and _measured(graph):
            return min(taken.alone_bytes for taken in calls.lean)
        return max(calls.least.alone_bytes, graph.private_bytes)

    def paused_bytes(self, hardware: Hardware, external: ExternalMemory, room: Room) -> int:
        """What is held between calls while one of this graph waits, beyond `room`.

        Tangents are left out: there is room for them in addition. If only one call of the graph
        waits at a time, what was seen in timed steps is in `Waiting.between_bytes` already.
        """
        graph, number = self.graph, self.graph.status.planned_for
        trace, active = graph.captured.trace, set(self.active)
        alone, io_bytes = cache(partial(self._alone, hardware)), _call_tensor_bytes
        observed = [graph.observed.paused_since]
        if number > 1:
            observed.append(graph.observed.paused)
        each = (mixes.external_bytes(graph, number, active, alone, io_bytes) for mixes in observed)
        paused = max(of_one for _, of_one in each)
        tangents = tangent_bytes(trace)
        return max(0, external.base_bytes + paused - tangents - room.nbytes)

    def late_bytes(self) -> int:
        """Bytes of gradients of graphs that come back before this one, which no timed step had.

        Graphs for different sizes that never wait together are of one network: they add to the same
        gradients, which count once.
        """
        if not self._late:
            self._late.append(self._late_bytes())
        return self._late[0]

    def _late_bytes(self) -> int:
        met = self.graph.observed.most_met
        calls = {g: self._coming(g) for g in self.later}
        calls[self.graph] = self.graph.status.planned_for - 1
        kinds: dict[tuple[str, ...], dict[PlannedGraph, int]] = {}
        for g, n in calls.items():
            missing = gradient_bytes(g.captured.trace) * max(0, n - met.get(g, 0))
            kinds.setdefault(g.status.kind, {})[g] = missing
        return sum(map(_most_at_once, kinds.values()))

    def in_turn_bytes(self, hardware: Hardware, external: ExternalMemory, room: Room) -> int:
        """What graphs that alternate with this one need while it waits, beyond `room`.

        At most their peak, on top of all that waits.
        """
        trace, in_turn = self.graph.captured.trace, self.alternating
        states = self.graph.status.planned_for * states_bytes(trace, self.state_bytes)
        needed = self._needed_beyond(room.nbytes + states, in_turn, hardware, external)
        waiting = [
            each if g not in needed else Taken(each.waiting_bytes, each.waiting_bytes)
            for g in in_turn
            for each in self._meanwhile(g, (self._calls(g, hardware).least,))
        ]
        most = self._together({g: self._calls(g, hardware).least for g in in_turn})
        unknown = together(waiting) if len(needed) < len(in_turn) else 0
        return min(most, max(0, unknown, *needed.values()))

    def _needed_beyond(
        self,
        outside_bytes: int,
        graphs: Iterable[PlannedGraph],
        hardware: Hardware,
        external: ExternalMemory,
    ) -> dict[PlannedGraph, int]:
        """What each of these graphs needs at the least while this one waits, beyond what it counts.

        `outside_bytes`: what this graph counts as external, and for generator states; `external`:
        what was measured around it. Graphs of which nobody knows what they meet as their calls run
        are left out.
        """
        trace = self.graph.captured.trace
        mine = outside_bytes + borrowed_bytes(trace) + returned_bytes(trace)
        since = external.base_bytes - external.timed_base_bytes
        needed: dict[PlannedGraph, int] = {}

        @cache  # each of these graphs asks it of all others
        def alone(other: PlannedGraph) -> int:
            return 0 if other is self.graph else self._alone(hardware, other)

        for g in graphs:
            key = g, hardware, since
            if key not in self._needed:
                self._needed[key] = self._needed_in_all(g, hardware, since, alone)
            nbytes = self._needed[key]
            if nbytes is not None:
                needed[g] = nbytes - mine
        return needed

    def _needed_in_all(
        self, graph: PlannedGraph, hardware: Hardware, since: int, alone: Bytes
    ) -> int | None:
        """What `graph` needs in all, at the least, but for what calls of this graph alone hold.

        `since`: how much more memory is held as steps begin than was as this graph was timed;
        `alone`: as for `rooms`. None if it is not known what the calls of `graph` meet.
        """
        theirs = replace(self, graph=graph)
        planned, profiling = graph.planned, graph.profiling
        counted = (mix.excess_bytes is not None for mix in graph.observed.called)
        if planned is not None:
            external = planned.external
        elif profiling is not None and profiling.done:
            external = theirs.external(profiling.shown())
        else:
            return None
        if not any(counted):
            return None
        base = max(external.base_bytes, external.timed_base_bytes + since)
        external = replace(external, base_bytes=base)
        trace, number = graph.captured.trace, graph.status.planned_for
        _, of_one = theirs.rooms(hardware, external, alone=alone)
        least = self._calls(graph, hardware).least
        states = number * states_bytes(trace, self.state_bytes)
        waiting = (number - 1) * least.alone_bytes
        return of_one.nbytes + states + borrowed_bytes(trace) + least.peak_bytes + waiting

    def _together(self, taken: Mapping[PlannedGraph, Taken]) -> int:
        """The most that calls of these graphs need while this one waits."""
        return together([each for g, t in taken.items() for each in self._meanwhile(g, (t,))])

    def _meanwhile(self, graph: PlannedGraph, choices: Iterable[Taken]) -> list[Taken]:
        """What calls of `graph` need while this one waits, without those that waited before it.

        One entry for each of the `choices` of what a call needs.
        """
        more = max(0, graph.status.planned_for - self.graph.observed.most(graph))
        given = self._tangent_bytes(graph)
        each = (Taken(t.peak_bytes + given, t.waiting_bytes) for t in choices)
        return [taken.by_calls(more) for taken in each]

    def _tangent_bytes(self, graph: PlannedGraph) -> int:
        """Bytes of the tangents of `graph`, without gradients made by graphs after it."""
        given = tangent_bytes(graph.captured.trace)
        for other in reversed(self.active):  # the graph after it is usually a later one
            if given <= 0:
                return 0
            made = _input_gradient_bytes(other.captured.trace)
            given -= made if made and graph in other.observed else 0
        return max(0, given)

    def _calls(self, graph: PlannedGraph, hardware: Hardware) -> Calls:
        """The calls of `graph`, by its measured profile if it has one.

        Their problem counts no memory outside the graph, nor between its calls.
        """
        number, profile = graph.status.planned_for, profile_of(graph)
        program = None if graph.planned is None or self.ignore_plans else graph.planned.program
        theirs, trace = replace(self, graph=graph), graph.captured.trace
        problem = Problem(trace, profile, hardware, self.budget_bytes)
        if program is None:  # plans take more and more of the outer tiers; that rarely matters
            left = theirs.with_outer_budgets(problem)
            host, disk = (_useful_bytes(left, tier) for tier in (Tier.HOST, Tier.DISK))
            problem = replace(problem, host_budget_bytes=host, disk_budget_bytes=disk)
        calls = Calls(problem, number, others=True, program=program, gone=graph.gone)
        known = self.known.get(graph)
        if known is None or known.problem.trace is not trace or _key(known) != _key(calls):
            self.known[graph] = known = calls
        return known

    def with_outer_budgets(self, problem: Problem) -> Problem:
        """`problem` with what other graphs' plans leave of the outer tiers as its budgets there."""
        capacity = problem.hardware.capacity
        host, disk = (self.outer(tier, capacity(tier)) for tier in (Tier.HOST, Tier.DISK))
        return replace(problem, host_budget_bytes=host, disk_budget_bytes=disk)

    def outer(self, tier: Tier, room: int, *, own: Planned | None = None) -> int:
        """Bytes of `room` in an outer tier that other graphs' plans leave to each call of this one.

        Only graphs whose calls are outstanding together with this one's count. Graphs for different
        sizes, of which a step has one, use the same room. All plans share the host memory through
        which copies to a disk pass: the most that one of them needs counts, `own`, this graph's
        plan, among them.
        """
        others = [g for g in self.active if g is not self.graph]
        plans = [(g.planned, g.status.planned_for * self._nested(g)) for g in others]
        taken = sum(p.predicted.peak(tier) * calls for p, calls in plans if p is not None)
        taken += self.held.get(tier, 0)
        if tier is Tier.HOST:
            staged = filter(None, [own, *(planned for planned, _ in plans)])
            taken += max((staging_needed(p.problem.trace, p.plan) for p in staged), default=0)
        return max(0, room - taken) // self.graph.status.planned_for

    def _nested(self, graph: PlannedGraph) -> bool:
        return graph in self.graph.observed or self.graph in graph.observed


def _most_at_once(late: Mapping[PlannedGraph, int]) -> int:
    """The bytes of `late`, graphs of one kind, that may be in the same step, as far as was seen."""
    if len({g.identity for g in late}) == 1:
        return sum(late.values())

    def together(one: PlannedGraph, other: PlannedGraph) -> bool:
        return one.identity == other.identity or one in other.observed or other in one.observed

    leaving = {g: n for g, n in late.items() if n}  # usually none
    return max(sum(n for g, n in leaving.items() if together(g, each)) for each in late)


def _call_tensor_bytes(graph: PlannedGraph) -> int:
    return call_tensor_bytes(graph.captured.trace)


@once_per_trace
def _input_gradient_bytes(trace: Trace) -> int:
    """Bytes of gradients that are handed to earlier graphs: those of inputs, not of parameters."""
    pairs = zip(trace.inputs, trace.gradients, strict=False)
    roles = (
        (trace.buffers[trace.values[value].buffer].role, gradient) for value, gradient in pairs
    )
    found = tuple(gradient for role, gradient in roles if role is Role.INPUT)
    return nbytes_of(trace, found)  # gradients of inputs that were joined lie in one buffer


def _useful_bytes(problem: Problem, tier: Tier) -> int:
    """How much of an outer tier's budget plans can use at most."""
    trace = problem.trace
    blocks = len(trace.buffers) * problem.hardware.slot_bytes(tier, 1, copied=True)
    return min(problem.limit_bytes(tier), MOST_AWAY * (total_bytes(trace) + blocks))


def _key(calls: Calls) -> tuple[object, ...]:
    """What tells calls of one trace from others. Tuples compare what is identical at once."""
    problem = calls.problem
    outer = problem.host_budget_bytes, problem.disk_budget_bytes
    return problem.profile, problem.hardware, *outer, calls.number, calls.program, calls.gone


def profile_of(graph: PlannedGraph) -> Profile:
    """The measured profile of a graph; zeros before it was measured."""
    profiling = graph.profiling
    if graph.planned is not None:
        return graph.planned.problem.profile
    shown = None
    if profiling is not None:
        shown = profiling.shown() if profiling.done else profiling.shown_early()
    return Profile.unknown(len(graph.captured.trace.ops)) if shown is None else shown.profile


def _measured(graph: PlannedGraph) -> bool:
    return graph.planned is not None or (graph.profiling is not None and graph.profiling.done)


def kept_bytes(graph: PlannedGraph) -> int:
    """Device bytes that calls of a graph hold until their backward.

    Under its plan; with everything kept if it has none.
    """
    if graph.planned is not None:
        return graph.status.planned_for * crossing_bytes(graph.planned.program)
    return graph.status.planned_for * _made_for_backward_bytes(graph.captured.trace)


@once_per_trace
def _made_for_backward_bytes(trace: Trace) -> int:
    """Bytes of what forward makes and backward reads."""
    made = {b for op in range(trace.boundary) for b in trace.writes[op]}
    used = {b for op in range(trace.boundary, len(trace.ops)) for b in trace.reads[op]}
    return sum(trace.buffers[b].nbytes for b in made & used)
