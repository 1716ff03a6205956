"""shares: what one graph may take of a budget that the graphs of a step share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outcore.ir.hardware import Hardware, Tier
from outcore.ir.memory import crossing_bytes, peak
from outcore.ir.plan import make_plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile
from outcore.ir.trace import Arg, Effect, Ref, Trace
from outcore.lower import lower
from outcore.policies import floor, staging_needed
from outcore.runtime.margin import budget_for, margin_bytes

if TYPE_CHECKING:  # graphs are planned with these
    from outcore.runtime.graph import PlannedGraph


@dataclass(frozen=True, slots=True)
class Shares:
    """The part of `graph`, one of those `active`, of a device's budget and of the outer tiers.

    Graphs of one step nest: forwards in order, backwards in reverse. What the earlier ones hold is
    resident; the later ones are left a share in proportion to what they would keep, no more than
    they can use, and no less than the largest of them needs. Calls of one graph that wait
    for their backward at once get equal shares.
    """

    graph: PlannedGraph
    active: Sequence[PlannedGraph]
    budget_bytes: int
    state_bytes: int
    """Of one state of the generator that random ops draw from."""

    def problem(
        self, hardware: Hardware, profile: Profile, resident_bytes: int, between_bytes: int = 0
    ) -> Problem:
        """The graph's problem, with `resident_bytes` held besides its own buffers."""
        graph, budget = self.graph, self.budget_bytes
        trace = graph.captured.trace
        later = [g for g in self.active if graph in g.before]
        gradients = sum(gradient_bytes(g.captured.trace) for g in later)
        states = _states_bytes(trace, self.state_bytes)
        outside = resident_bytes + gradients + states + margin_bytes(budget)
        if trace.boundary == len(trace.ops):  # a backward call without ops has no position
            outside += between_bytes + _nbytes(trace, tuple(map(Ref, trace.tangents)))
        arguments = _argument_bytes(trace)
        free = max(0, budget - outside - arguments)
        outside += free - free // graph.most_outstanding
        problem = Problem(
            trace,
            profile,
            hardware,
            budget,
            host_budget_bytes=self.outer(Tier.HOST, hardware.capacity(Tier.HOST)),
            disk_budget_bytes=self.outer(Tier.DISK, hardware.capacity(Tier.DISK)),
            outside_bytes=outside,
            between_bytes=between_bytes,
        )
        if not later:
            return problem
        mine, theirs = kept_bytes(graph), sum(kept_bytes(g) for g in later)
        free = max(0, budget - outside - arguments)
        for_them = free * theirs // max(1, mine + theirs)
        added = [self._added_bytes(g, hardware) for g in later]
        known = [each for each in added if each is not None]
        if len(known) == len(added):
            for_them = min(for_them, between_bytes + sum(most for _, most in known))
        for_them = max(for_them, max((least for least, _ in known), default=0))
        return replace(problem, between_bytes=max(between_bytes, for_them))

    def _added_bytes(self, graph: PlannedGraph, hardware: Hardware) -> tuple[int, int] | None:
        """What `graph` adds to what is held already: least, most; None before it is profiled."""
        if (planned := graph.planned) is not None:
            problem = replace(planned.problem, between_bytes=0)
        elif graph.profiling is not None and graph.profiling.done:
            trace, profile = graph.captured.trace, graph.profiling.profile()
            problem = Problem(trace, profile, hardware, self.budget_bytes)
        else:
            return None
        kept = lower(problem, make_plan({}, "keep-all"))
        most = peak(problem, kept, Tier.DEVICE).nbytes
        held = problem.outside_bytes + _argument_bytes(problem.trace)
        calls = graph.most_outstanding
        return calls * (floor(problem).nbytes - held), calls * (most - held)

    def outer(self, tier: Tier, room: int) -> int:
        """Bytes of the `room` in a tier that other graphs' plans leave, for one call."""
        others = [(g.planned, g.most_outstanding) for g in self.active if g is not self.graph]
        plans = [(planned, calls) for planned, calls in others if planned is not None]
        taken = sum(p.predicted.peak(tier) * calls for p, calls in plans)
        if tier is Tier.HOST:
            taken += max((staging_needed(p.problem.trace, p.plan) for p, _ in plans), default=0)
        return max(0, room - taken) // self.graph.most_outstanding

    def budget_with(self, problem: Problem, floor_bytes: int) -> int:
        """The budget that has what `floor_bytes` would leave to the graph, were nothing to grow.

        The margin is a part of it, and calls that wait at once share what is free.
        """
        calls, outside = self.graph.most_outstanding, problem.outside_bytes
        arguments = _argument_bytes(problem.trace)
        shared = calls * max(0, problem.budget_bytes - outside - arguments)
        fixed = problem.budget_bytes - arguments - shared if shared else outside
        wanted = calls * max(0, floor_bytes - outside - arguments)
        return budget_for(fixed - margin_bytes(problem.budget_bytes) + arguments + wanted)


def kept_bytes(graph: PlannedGraph) -> int:
    """Device bytes that a graph holds between its calls: as planned, else with everything kept."""
    if graph.planned is not None:
        return crossing_bytes(graph.planned.program)
    trace = graph.captured.trace
    made = {b for op in range(trace.boundary) for b in trace.writes[op]}
    used = {b for op in range(trace.boundary, len(trace.ops)) for b in trace.reads[op]}
    return sum(trace.buffers[b].nbytes for b in made & used)


def gradient_bytes(trace: Trace) -> int:
    """Bytes of what a backward call returns."""
    return _nbytes(trace, trace.gradients)


def _nbytes(trace: Trace, arg: Arg) -> int:
    """Bytes of the buffers in `arg`, each once."""
    return sum(trace.buffers[b].nbytes for b in trace.value_buffers(arg))


def _argument_bytes(trace: Trace) -> int:
    """Bytes of the caller's tensors that stay where they are: parameters, as a rule."""
    return sum(b.nbytes for b in trace.buffers if b.borrowed)


def _states_bytes(trace: Trace, state_bytes: int) -> int:
    """Bytes of generator states that a program may keep: one per random forward op, for its rerun.

    And during a rerun the present one, to go on from.
    """
    draws = sum(Effect.RANDOM in op.effects for op in trace.ops[: trace.boundary])
    return (draws + bool(draws)) * state_bytes
