"""shares: what one graph may take of a budget that the graphs of a step share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outcore.ir.hardware import Hardware, Tier
from outcore.ir.memory import crossing_bytes
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile
from outcore.ir.trace import Effect, Ref, Trace
from outcore.policies import staging_needed
from outcore.runtime.calls import Calls, gradient_bytes, held_bytes, nbytes_of
from outcore.runtime.margin import margin_bytes

if TYPE_CHECKING:  # graphs are planned with these
    from outcore.runtime.graph import PlannedGraph


@dataclass(frozen=True, slots=True)
class Shares:
    """The part of `graph`, one of those `active`, of a device's budget and of the outer tiers.

    Graphs of one step nest: forwards in order, backwards in reverse. What the earlier ones hold is
    resident; the later ones are left a share in proportion to what they would keep, no more than
    they can use, and no less than the largest of them needs.
    """

    graph: PlannedGraph
    active: Sequence[PlannedGraph]
    budget_bytes: int
    state_bytes: int
    """Of one state of the generator that random ops draw from."""

    def problem(
        self, hardware: Hardware, profile: Profile, resident_bytes: int, between_bytes: int = 0
    ) -> Problem:
        """The problem of one call, with `resident_bytes` held besides the graph's own buffers."""
        graph, budget = self.graph, self.budget_bytes
        trace = graph.captured.trace
        later = [g for g in self.active if graph in g.before]
        gradients = sum(gradient_bytes(g.captured.trace) for g in later)
        states = graph.standing.most_outstanding * _states_bytes(trace, self.state_bytes)
        outside = resident_bytes + gradients + states + margin_bytes(budget)
        if trace.boundary == len(trace.ops):  # a backward call without ops has no position
            outside += between_bytes + nbytes_of(trace, tuple(map(Ref, trace.tangents)))
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
        mine, theirs = kept_bytes(graph), sum(map(kept_bytes, later))
        free = max(0, budget - held_bytes(problem))
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
            problem = replace(planned.alone, between_bytes=0)
        elif graph.profiling is not None and graph.profiling.done:
            trace, profile = graph.captured.trace, graph.profiling.profile()
            problem = Problem(trace, profile, hardware, self.budget_bytes)
        else:
            return None
        calls = Calls(problem, graph.standing.most_outstanding)
        return calls.least.by(calls.number), calls.most.by(calls.number)

    def outer(self, tier: Tier, room: int) -> int:
        """Bytes of the `room` in a tier that other graphs' plans leave, for one call."""
        others = [
            (g.planned, g.standing.most_outstanding) for g in self.active if g is not self.graph
        ]
        plans = [(planned, calls) for planned, calls in others if planned is not None]
        taken = sum(p.predicted.peak(tier) * calls for p, calls in plans)
        if tier is Tier.HOST:
            taken += max((staging_needed(p.problem.trace, p.plan) for p, _ in plans), default=0)
        return max(0, room - taken) // self.graph.standing.most_outstanding


def kept_bytes(graph: PlannedGraph) -> int:
    """Device bytes that calls of a graph hold until their backward.

    As planned, else with everything kept.
    """
    if graph.planned is not None:
        return graph.standing.most_outstanding * crossing_bytes(graph.planned.program)
    trace = graph.captured.trace
    made = {b for op in range(trace.boundary) for b in trace.writes[op]}
    used = {b for op in range(trace.boundary, len(trace.ops)) for b in trace.reads[op]}
    return graph.standing.most_outstanding * sum(trace.buffers[b].nbytes for b in made & used)


def _states_bytes(trace: Trace, state_bytes: int) -> int:
    """Bytes of generator states that a program may keep: one per random forward op, for its rerun.

    And during a rerun the present one, to go on from.
    """
    draws = sum(Effect.RANDOM in op.effects for op in trace.ops[: trace.boundary])
    return (draws + bool(draws)) * state_bytes
