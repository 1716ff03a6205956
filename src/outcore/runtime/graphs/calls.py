"""calls: device memory of several calls of one graph that are outstanding at once.

One call runs while the others wait. The running call needs its peak; each waiting call holds what
crosses to backward. Inputs and outputs of a call may be held elsewhere too, so they are counted
where they are found, as external memory. So are the gradients that a finished call has left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import itemgetter

from outcore.errors import InfeasibleError
from outcore.ir.hardware import Tier
from outcore.ir.liveness import liveness
from outcore.ir.margin import budget_for, margin_bytes
from outcore.ir.memory import crossing_bytes, pause_bytes, peak, private_bytes, reread_bytes
from outcore.ir.once import once_per_trace
from outcore.ir.problem import Problem
from outcore.ir.program import Free, Program, Run
from outcore.ir.totals import resident_bytes
from outcore.ir.trace import Arg, Effect, Ref, Role, Trace
from outcore.lower import kept, lower_without_overlap
from outcore.policies import Floor, infeasible, lean_plans, plan_floor


@dataclass(frozen=True, slots=True)
class Taken:
    """Device bytes that one call needs, in addition to external memory, parameters and the like."""

    peak_bytes: int
    """At the call's peak."""
    waiting_bytes: int
    """While the call is outstanding."""
    alone_bytes: int = 0
    """What nothing else holds while the call is outstanding."""

    @property
    def work_bytes(self) -> int:
        """What a call needs at its peak beyond what it holds while it waits."""
        return self.peak_bytes - self.waiting_bytes

    def by(self, calls: int) -> int:
        """Bytes of `calls` calls of which one runs and the others wait."""
        return self.peak_bytes + (calls - 1) * self.waiting_bytes

    def by_calls(self, calls: int) -> Taken:
        """What `calls` calls need together: at their peak, and while all of them wait."""
        return Taken(self.by(calls), calls * self.waiting_bytes)


def together(graphs: Sequence[Taken]) -> int:
    """An upper bound on the bytes that the graphs need together: all wait, and one works."""
    waiting = sum(each.waiting_bytes for each in graphs)
    return waiting + max((each.work_bytes for each in graphs), default=0)


def least_together(graphs: Sequence[Sequence[Taken]]) -> int:
    """The smallest `together`, with one of several choices for each graph; 0 if one has none."""
    found = [(each.work_bytes, n, each) for n, choices in enumerate(graphs) for each in choices]
    waiting: dict[int, int] = {}  # number of a graph -> the least of its choices so far
    total, totals = 0, []
    for most, number, each in sorted(found, key=itemgetter(0)):  # the limit on `work_bytes`
        before = waiting.get(number)
        least = each.waiting_bytes if before is None else min(before, each.waiting_bytes)
        waiting[number] = least
        total += least - (before or 0)
        if len(waiting) == len(graphs):
            totals.append(most + total)
    return min(totals, default=0)


@dataclass(frozen=True)
class Calls:
    """Several calls of one graph that are outstanding at once."""

    problem: Problem
    """The problem of one call without the others."""
    number: int
    """How many calls there are."""
    retained: bool = False
    """Whether backward calls keep what crosses (`retain_graph`), so that gradients come on top."""
    others: bool = False
    """Whether these are calls of another graph than the one being planned. Then their inputs and
    outputs are counted as theirs, as they have not been counted as external memory yet."""
    program: Program | None = None
    """The program that runs the calls, if it is fixed."""
    gone: frozenset[int] = frozenset()
    """Inputs and outputs that nothing held any more when external memory was counted. Those that a
    program rereads come on top."""
    spare_bytes: int = 0
    """External memory planned for but not held as calls come back, so that reread buffers may use
    it."""

    @cached_property
    def most(self) -> Taken:
        """What a call needs with everything kept."""
        return self.taken(self._kept)

    @cached_property
    def _kept(self) -> Program:
        return kept(self.problem)

    @cached_property
    def least(self) -> Taken:
        """What a call needs under the plan with which all calls need the least, or `program`."""
        return self._least[1] if self.program is None else self.taken(self.program)

    @property
    def lean(self) -> tuple[Taken, ...]:
        """What a call needs under each lean plan (`policies.lean_plans`), or `program` only."""
        if self.program is not None:
            return (self.least,)
        return tuple(taken for _, taken in self._lean)

    def waiting_bytes(self) -> int:
        """The least bytes held while all calls wait, with one call's results and tangents."""
        least, trace = min(taken.waiting_bytes for taken in self.lean), self.problem.trace
        return self.number * least + returned_bytes(trace) + _own_tangent_bytes(trace)

    @property
    def _least(self) -> tuple[Floor, Taken]:
        return min(self._lean, key=lambda pair: pair[1].by(self.number))

    @cached_property
    def _lean(self) -> list[tuple[Floor, Taken]]:
        plans = list(lean_plans(self.problem))
        lean = (self.taken(lower_without_overlap(self.problem, plan)) for plan in plans)
        return list(zip((plan_floor(self.problem, plan) for plan in plans), lean, strict=True))

    def problems(self) -> Iterator[Problem]:
        """Problems of one call, with more and more room for what each of the others holds.

        The first leaves the call all that it can use at its peak, or all that is free; the last
        leaves it the least that works. Raises InfeasibleError if there is not even that much.
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
        """The problem of one call while the others hold `room` bytes each.

        The call, too, may hold no more than `room` while it waits, so `between_bytes` is the rest:
        what is free if everything is kept, and what keeping everything holds beyond `room`.
        """
        problem, others = self.problem, (self.number - 1) * room
        beside = replace(problem, outside_bytes=problem.outside_bytes + others)
        rest = pause_bytes(beside, self._kept) + self.most.waiting_bytes - room
        return replace(beside, between_bytes=max(problem.between_bytes, rest))

    def others_bytes(self, program: Program) -> int:
        """Bytes that the other calls hold under `program`, and what this one rereads."""
        more = max(0, self.reread_bytes(program) - self.spare_bytes)
        return (self.number - 1) * self.taken(program).waiting_bytes + more

    @property
    def rereadable(self) -> frozenset[int]:
        """The buffers in `gone` that a plan could reread."""
        trace = self.problem.trace
        return self.gone & {b for op in range(trace.boundary) for b in trace.reads[op]}

    def reread_bytes(self, program: Program) -> int:
        """Bytes of `gone` that are held for longer because `program` rereads them."""
        return reread_bytes(self.problem.trace, program, self.gone)

    def taken(self, program: Program) -> Taken:
        """What a call needs under `program`."""
        problem = self.problem
        trace = problem.trace
        staying = _staying_bytes(trace, program)
        alone = staying + private_bytes(trace, program) + self.reread_bytes(program)
        counted = staying + crossing_bytes(program) if self.others else alone
        # An input that is reread is usually a result of another call, which counts it as crossing.
        # If not, no call has counted it: the one that runs holds it too.
        reread = max(0, alone - counted)
        waiting = counted + reread + gradient_bytes(trace) * self.retained
        most = peak(problem, program, Tier.DEVICE).nbytes + reread
        return Taken(most - resident_bytes(problem), waiting, alone)

    def refusal(self, lacking_bytes: int = 0) -> InfeasibleError:
        """The error for a budget without room for all calls; it names the least budget that works.

        `lacking_bytes`: by how much the leanest plan exceeds the limit, because it rereads what was
        gone or leaves room for something else. Then the error is marked `at_least`.
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
        waiting = f"up to {self.number} calls of this graph are outstanding at once"
        error.add_note(f"outcore: {waiting} (their backward has not run); all of them are counted")
        return error


@once_per_trace
def whole(trace: Trace) -> Taken:
    """The most that a call needs with everything kept, its results and gradients included.

    Workspaces and what the caller owns are left out. What the caller hands over counts throughout.
    """
    live, changes, waiting = liveness(trace), [0] * (len(trace.ops) + 1), 0
    for buffer, uses in zip(trace.buffers, live.uses, strict=True):
        if buffer.borrowed:
            continue
        given = live.producer[buffer.id] is None
        held = given or live.held[buffer.id]
        changes[0 if given else uses[0]] += buffer.nbytes
        if not held:
            changes[uses[-1] + 1] -= buffer.nbytes
        if held or uses[0] < trace.boundary <= uses[-1]:
            waiting += buffer.nbytes
    return Taken(max(waiting, *accumulate(changes)), waiting)


@once_per_trace
def gradient_bytes(trace: Trace) -> int:
    """Bytes of the gradients that a backward call returns."""
    return nbytes_of(trace, trace.gradients)


def nbytes_of(trace: Trace, arg: Arg) -> int:
    """Bytes of the buffers in `arg`, each counted once."""
    return sum(trace.buffers[b].nbytes for b in trace.value_buffers(arg))


def states_bytes(trace: Trace, state_bytes: int, program: Program | None = None) -> int:
    """Bytes of the generator states that a program keeps, each of `state_bytes`.

    Two per random forward op that it reruns. During a rerun two more: the present state, to go on
    from, and the state that the rerun leads to. Without a `program`, all random ops may be rerun.
    """
    draws = {op.id for op in trace.ops[: trace.boundary] if Effect.RANDOM in op.effects}
    if program is not None:
        runs = (instruction.action for instruction in program.body)
        draws &= {run.op for run in runs if isinstance(run, Run) and run.again}
    return 2 * (len(draws) + bool(draws)) * state_bytes


@once_per_trace
def tangent_bytes(trace: Trace) -> int:
    """Bytes of all tangents."""
    return nbytes_of(trace, tuple(map(Ref, trace.tangents)))


@once_per_trace
def _own_tangent_bytes(trace: Trace) -> int:
    """Bytes of the tangents that are not borrowed: borrowed ones are counted throughout."""
    buffers = trace.value_buffers(tuple(map(Ref, trace.tangents)))
    return sum(trace.buffers[b].nbytes for b in buffers if not trace.buffers[b].borrowed)


@once_per_trace
def call_tensor_bytes(trace: Trace) -> int:
    """Bytes of a call's inputs and outputs, without parameters and other state of the caller."""
    buffers = trace.value_buffers((tuple(map(Ref, trace.inputs)), trace.outputs))
    exchanged = (trace.buffers[b] for b in buffers)
    return sum(b.nbytes for b in exchanged if b.role not in {Role.PARAM, Role.STATE})


@once_per_trace
def counted_bytes(trace: Trace) -> int:
    """Bytes of all inputs and outputs of a call. Its trace counts them throughout."""
    buffers = trace.value_buffers((tuple(map(Ref, trace.inputs)), trace.outputs))
    return sum(trace.buffers[b].nbytes for b in buffers)


@once_per_trace
def returned_bytes(trace: Trace) -> int:
    """Bytes of what forward returns, without what the caller held before."""
    buffers = trace.value_buffers(trace.outputs)
    return sum(trace.buffers[b].nbytes for b in buffers if not trace.buffers[b].borrowed)


def _staying_bytes(trace: Trace, program: Program) -> int:
    """Bytes of the inputs that are still held when forward ends, without the caller's own."""
    actions = [instruction.action for instruction in program.body[: program.boundary]]
    freed = {action.slot for action in actions if isinstance(action, Free)}
    slots = [program.slots[s] for s in program.arguments if s not in freed]
    return sum(slot.nbytes for slot in slots if not trace.buffers[slot.buffer].borrowed)
