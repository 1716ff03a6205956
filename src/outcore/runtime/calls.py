"""calls: what several calls of one graph take that wait for their backward at once.

One runs while the others wait: it has its peak, they have what crosses to backward. What a call is
given and returns may be held by others, too, so it is counted where it is found: what is held
besides. So are the gradients that a call has left whose backward is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from outcore.errors import InfeasibleError
from outcore.ir.hardware import Tier
from outcore.ir.memory import crossing_bytes, peak, private_bytes, reread_bytes
from outcore.ir.plan import make_plan
from outcore.ir.problem import Problem
from outcore.ir.program import Free, Program, Run
from outcore.ir.totals import resident_bytes
from outcore.ir.trace import Arg, Effect, Ref, Role, Trace
from outcore.lower import lower
from outcore.policies import Floor, infeasible, lean_plans, plan_floor
from outcore.runtime.margin import budget_for, margin_bytes


@dataclass(frozen=True, slots=True)
class Taken:
    """Bytes that a call takes beyond what is held besides it: at its peak, and while it waits.

    `alone_bytes`: of what it holds while it waits that which nobody else does.
    """

    peak_bytes: int
    waiting_bytes: int
    alone_bytes: int = 0

    @property
    def work_bytes(self) -> int:
        """What it takes at its peak beyond what it holds while it waits."""
        return self.peak_bytes - self.waiting_bytes

    def by(self, calls: int) -> int:
        """Bytes that so many calls take at once."""
        return self.peak_bytes + (calls - 1) * self.waiting_bytes

    def by_calls(self, calls: int) -> Taken:
        """What so many calls take: at their peak, and while all of them wait."""
        return Taken(self.by(calls), calls * self.waiting_bytes)


def together(graphs: Sequence[Taken]) -> int:
    """The most that graphs take of which each runs while those before it wait."""
    waiting = sum(each.waiting_bytes for each in graphs)
    return waiting + max((each.work_bytes for each in graphs), default=0)


def least_together(graphs: Sequence[Sequence[Taken]]) -> int:
    """The least that they take, where each has a choice; `together` for the best of all choices."""
    works = {each.work_bytes for choices in graphs for each in choices}
    totals = []
    for most in works:  # of what one of them takes beyond what it holds while it waits
        waiting = [
            [each.waiting_bytes for each in choices if each.work_bytes <= most]
            for choices in graphs
        ]
        if all(waiting):
            totals.append(most + sum(map(min, waiting)))
    return min(totals, default=0)


@dataclass(frozen=True)
class Calls:
    """`number` calls of the graph of `problem`, which is that of one of them, alone.

    `program`: the one that runs them, where that is fixed. `retained`: backward calls leave what
    crosses, so that gradients come on top. `others`: they are those of another graph, beside which
    nobody has counted yet what they are given and return. `gone`: buffers of that which nobody held
    when it was counted, so that those which are read again come on top, but for `spare_bytes`.
    """

    problem: Problem
    number: int
    retained: bool = False
    others: bool = False
    program: Program | None = None
    gone: frozenset[int] = frozenset()
    spare_bytes: int = 0

    @cached_property
    def most(self) -> Taken:
        """What a call takes with everything kept."""
        return self.taken(lower(self.problem, make_plan({}, "keep-all"), fast=True))

    @cached_property
    def least(self) -> Taken:
        """What a call takes where they take the least at once, or as they run."""
        return self._least[1] if self.program is None else self.taken(self.program)

    @property
    def lean(self) -> tuple[Taken, ...]:
        """What a call takes under each of the leanest plans, or as they run."""
        if self.program is not None:
            return (self.taken(self.program),)
        return tuple(taken for _, taken in self._lean)

    def waiting_bytes(self) -> int:
        """The least that is held while all wait, the tangents of one included."""
        least, trace = min(taken.waiting_bytes for taken in self.lean), self.problem.trace
        return self.number * least + _returned_bytes(trace) + _tangent_bytes(trace)

    @property
    def _least(self) -> tuple[Floor, Taken]:
        return min(self._lean, key=lambda pair: pair[1].by(self.number))

    @cached_property
    def _lean(self) -> list[tuple[Floor, Taken]]:
        nothing_overlaps = replace(self.problem, budget_bytes=1)
        plans = list(lean_plans(self.problem))
        lean = (self.taken(lower(nothing_overlaps, plan, fast=True)) for plan in plans)
        return list(zip((plan_floor(self.problem, plan) for plan in plans), lean, strict=True))

    def problems(self) -> Iterator[Problem]:
        """The problem of one call beside the others, with more and more room for what waits.

        The first leaves a call all that it can use at its peak, or all that can be had; the last
        the least that does. Raises InfeasibleError where not even that can be had.
        """
        if self.number == 1:
            return iter((self.problem,))
        free = self.problem.budget_bytes - resident_bytes(self.problem)
        most, least, others = self.most, self.least, self.number - 1
        if free < least.by(self.number):
            raise self.refusal()
        low = least.peak_bytes
        high = max(low, min(most.peak_bytes, free - others * least.waiting_bytes))
        peaks = (high, (high + low) // 2, low)
        rooms = [min(most.waiting_bytes, (free - each) // others) for each in peaks]
        return map(self._beside, dict.fromkeys(rooms))

    def _beside(self, room: int) -> Problem:
        """The problem of one call while the others hold `room` each, as it must when it waits."""
        problem, others = self.problem, (self.number - 1) * room
        free = problem.budget_bytes - resident_bytes(problem) - others
        mine = room + _returned_bytes(problem.trace) + _tangent_bytes(problem.trace)
        between = max(problem.between_bytes, free - mine)
        return replace(problem, outside_bytes=problem.outside_bytes + others, between_bytes=between)

    def others_bytes(self, program: Program) -> int:
        """What the other calls hold if each is run by `program`, and what this one reads again."""
        more = max(0, self.reread_bytes(program) - self.spare_bytes)
        return (self.number - 1) * self.taken(program).waiting_bytes + more

    @property
    def rereadable(self) -> frozenset[int]:
        """What of `gone` a plan could read again."""
        trace = self.problem.trace
        return self.gone & {b for op in range(trace.boundary) for b in trace.reads[op]}

    def reread_bytes(self, program: Program) -> int:
        """What is held for longer than it was, because `program` reads it again."""
        return reread_bytes(self.problem.trace, program, self.gone)

    def taken(self, program: Program) -> Taken:
        """What a call takes that is run by `program`."""
        problem = self.problem
        trace = problem.trace
        staying = _staying_bytes(trace, program)
        alone = staying + private_bytes(trace, program) + self.reread_bytes(program)
        waiting = staying + crossing_bytes(program) if self.others else alone
        waiting += gradient_bytes(trace) * self.retained
        most = peak(problem, program, Tier.DEVICE).nbytes
        return Taken(most - resident_bytes(problem), waiting, alone)

    def refusal(self, lacking_bytes: int = 0) -> InfeasibleError:
        """The error for a budget without room for them all, with the least that has it.

        `lacking_bytes`: by how much the leanest plan went beyond the limit; it reads again what was
        gone, or leaves something room.
        """
        problem, (lowest, least) = self.problem, self._least
        held, needed = resident_bytes(problem), least.by(self.number)
        limit = problem.limit_bytes(Tier.DEVICE)
        beyond = max(0, limit + lacking_bytes - held - needed) if lacking_bytes else 0
        needed += beyond
        error = infeasible(
            problem,
            replace(
                lowest,
                nbytes=budget_for(held - margin_bytes(problem.budget_bytes) + needed),
                needed_bytes=lowest.needed_bytes + needed - least.peak_bytes,
            ),
        )
        error.at_least = lacking_bytes > 0
        if self.number == 1:
            return error
        waiting = f"up to {self.number} calls of this graph wait for their backward at once"
        error.add_note(f"outcore: {waiting}, and what they hold is counted")
        return error


def gradient_bytes(trace: Trace) -> int:
    """Bytes of what a backward call returns."""
    return nbytes_of(trace, trace.gradients)


def nbytes_of(trace: Trace, arg: Arg) -> int:
    """Bytes of the buffers in `arg`, each once."""
    return sum(trace.buffers[b].nbytes for b in trace.value_buffers(arg))


def states_bytes(trace: Trace, state_bytes: int, program: Program | None = None) -> int:
    """Bytes of generator states that a program keeps: two per random forward op, for its rerun.

    And during a rerun the present one, to go on from, and the one that it leads to. Without a
    `program`: of any that may be.
    """
    draws = {op.id for op in trace.ops[: trace.boundary] if Effect.RANDOM in op.effects}
    if program is not None:
        runs = (instruction.action for instruction in program.body)
        draws &= {run.op for run in runs if isinstance(run, Run) and run.again}
    return 2 * (len(draws) + bool(draws)) * state_bytes


def _tangent_bytes(trace: Trace) -> int:
    """Bytes of the tangents that do not stay the caller's: those that do are counted throughout."""
    buffers = trace.value_buffers(tuple(map(Ref, trace.tangents)))
    return sum(trace.buffers[b].nbytes for b in buffers if not trace.buffers[b].borrowed)


def call_tensor_bytes(trace: Trace) -> int:
    """Bytes of what a call is given and returns, but for what the caller has for good."""
    buffers = trace.value_buffers((tuple(map(Ref, trace.inputs)), trace.outputs))
    call_tensors = (trace.buffers[b] for b in buffers)
    return sum(b.nbytes for b in call_tensors if b.role not in {Role.PARAM, Role.STATE})


def counted_bytes(trace: Trace) -> int:
    """Bytes of what a call is given and returns, all of which its trace counts throughout."""
    buffers = trace.value_buffers((tuple(map(Ref, trace.inputs)), trace.outputs))
    return sum(trace.buffers[b].nbytes for b in buffers)


def _returned_bytes(trace: Trace) -> int:
    """Bytes of what forward returns, but for what was the caller's before."""
    buffers = trace.value_buffers(trace.outputs)
    return sum(trace.buffers[b].nbytes for b in buffers if not trace.buffers[b].borrowed)


def _staying_bytes(trace: Trace, program: Program) -> int:
    """Bytes of inputs, but for what stays the caller's, that are there when forward ends."""
    actions = [instruction.action for instruction in program.body[: program.boundary]]
    freed = {action.slot for action in actions if isinstance(action, Free)}
    slots = [program.slots[s] for s in program.arguments if s not in freed]
    return sum(slot.nbytes for slot in slots if not trace.buffers[slot.buffer].borrowed)
