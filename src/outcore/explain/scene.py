"""Scene: an index over a lowered Program and its Timeline, for questions about copies and waits."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import cached_property

from outcore.ir.hardware import Tier
from outcore.ir.memory import added_bytes, held_bytes, waiting_bytes
from outcore.ir.plan import Gap, Offload, Plan
from outcore.ir.problem import Problem
from outcore.ir.program import Alloc, Copy, Program, Run, Slot, Stream
from outcore.ir.timeline import Timeline


class Scene:
    """What `late.py` and `waits.py` need to know about a Program.

    Construction takes linear time, and each query nearly constant time. A step is one run together
    with everything issued since the run before it (as in `lower/draft.py`).
    """

    def __init__(self, problem: Problem, plan: Plan, program: Program, timeline: Timeline) -> None:
        self.problem, self.program = problem, program
        self.start = [span.start_seconds for span in timeline.spans]
        self.stop = [span.stop_seconds for span in timeline.spans]
        self.held = held_bytes(problem, program, Tier.DEVICE)
        self.runs: list[Run] = []
        """The runs, by step."""
        self.positions: list[int] = []
        """The body position of each step's run."""
        self.latest: list[int] = [-1]
        """Map each step to the latest op whose first run is done when the step begins."""
        self.own: dict[int, int] = {}
        """Map each op to the step of its first run."""
        self.alloc: dict[int, int] = {}
        """Map each slot to the position of its Alloc."""
        self.copies: dict[int, Copy] = {}
        """The copies, by position."""
        self.queues: dict[Stream, list[int]] = {stream: [] for stream in Stream}
        """The positions of the copies on each stream."""
        for position, instruction in enumerate(program.body):
            action = instruction.action
            if isinstance(action, Run):
                self._add_run(position, action)
            elif isinstance(action, Alloc):
                self.alloc[action.slot] = position
            elif isinstance(action, Copy):
                self.copies[position] = action
                self.queues[instruction.stream].append(position)
        self.boundary_step = self.step(program.boundary)
        self.offloads: dict[int, list[tuple[Gap, Offload]]] = {}
        for gap, choice in plan.choices:
            if isinstance(choice, Offload):
                self.offloads.setdefault(gap.buffer, []).append((gap, choice))

    def _add_run(self, position: int, run: Run) -> None:
        if not run.again:
            self.own[run.op] = len(self.runs)
        self.latest.append(self.latest[-1] if run.again else run.op)
        self.runs.append(run)
        self.positions.append(position)

    # ---- places ---------------------------------------------------------------------------------

    def step(self, position: int) -> int:
        """The step that `position` belongs to; one past the last step if no run follows."""
        return bisect_left(self.positions, position)

    def next_run(self, position: int) -> Run | None:
        """The run at `position`, or else the next one; None after the last run."""
        step = self.step(position)
        return self.runs[step] if step < len(self.runs) else None

    def first_step_for(self, op: int) -> int:
        """The first step that serves `op`: recomputations for it come right before its own run."""
        return self.own[op - 1] + 1 if op else 0

    def offload(self, position: int, buffer: int) -> tuple[Gap, Offload] | None:
        """The gap that `buffer` is in at `position`, and its choice, if that is to offload."""
        done = self.latest[self.step(position)]
        found = self.offloads.get(buffer, ())
        return next(((g, c) for g, c in found if g.after <= done < g.before), None)

    # ---- copies ---------------------------------------------------------------------------------

    def moved(self, position: int) -> Slot:
        """The slot that the copy at `position` reads."""
        return self.program.slots[self.copies[position].source]

    def edges(self, position: int) -> tuple[int, ...]:
        """The positions of all instructions that the one at `position` waits for."""
        instruction = self.program.body[position]
        return (*instruction.after, *instruction.pace)

    def done(self, positions: Iterable[int]) -> float:
        """When all of `positions` are done; 0 if there are none."""
        return max((self.stop[position] for position in positions), default=0.0)

    def under_way(self, stream: Stream, start: float, stop: float) -> tuple[int, ...]:
        """Buffers of the copies on `stream` that run at some time between `start` and `stop`."""
        queue = self.queues[stream]
        low = bisect_right(queue, start, key=self.stop.__getitem__)
        high = bisect_left(queue, stop, key=self.start.__getitem__)
        return tuple(dict.fromkeys(self.moved(p).buffer for p in queue[low:high]))

    # ---- memory ---------------------------------------------------------------------------------

    @cached_property
    def between_bytes(self) -> int:
        """Device bytes held between the two calls, with everything counted."""
        problem = self.problem
        return problem.outside_bytes + problem.between_bytes + waiting_bytes(self.program)

    def lacks_memory(self, position: int) -> bool:
        """Whether the frees that follow `position` are needed to stay inside the budget.

        Without them, the next run has no room, or the time between the two calls, if that is first.
        Only the frees from `position` up to that point are considered.
        """
        step = self.step(position)
        if step == len(self.runs):
            return False
        run, boundary, budget = (
            self.positions[step],
            self.program.boundary,
            self.problem.budget_bytes,
        )
        if self.held[run] + self._freed(position, run) > budget:
            return True
        crosses = position < boundary <= run
        return crosses and self.between_bytes + self._freed(position, boundary) > budget

    def _freed(self, start: int, stop: int) -> int:
        actions = (instruction.action for instruction in self.program.body[start:stop])
        return -sum(min(0, added_bytes(self.program.slots, action)) for action in actions)
