"""brief: find gaps that `search` leaves at their default, as too short to gain from.

Each step that a walk spends on a brief gap is missing for gaps whose choice matters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from outcore.evaluate import Evaluator
from outcore.ir.hardware import Tier
from outcore.ir.plan import Gap, Offload, make_plan
from outcore.ir.problem import Problem
from outcore.lower.donate import donate
from outcore.lower.draft import occupancy
from outcore.lower.expand import expand
from outcore.policies.candidates import away
from outcore.policies.search.anneal import Annealing
from outcore.policies.search.space import Kinds, Space

FEW = 64
"""With at most this many gaps, all are decided on: a walk has hundreds of steps for each."""

ROOMY = 0.25
"""Up to this fraction of the budget there is room enough, whatever is held."""


def begin(evaluator: Evaluator, space: Space, starts: Iterable[Kinds], seed: int) -> Annealing:
    """Start from the best of `starts`, each as it is and with its brief gaps at their default.

    Brief gaps are left out, except those for which the best start needs another choice. So no start
    is lost or made slower.
    """
    annealing = Annealing(space, evaluator, seed)
    left = sorted(brief(evaluator.problem, space))
    for kinds in starts:
        annealing.start(kinds)
        usual = kinds.copy()
        usual[left] = space.default_kinds[left]
        annealing.start(usual)
    annealing.leave_out(left)
    return annealing


def brief(problem: Problem, space: Space) -> frozenset[int]:
    """The gaps of `space` that end before a copy could be back, if nothing needs room inside them.

    This is judged with everything else away: inside the gap no more is held than at one of its
    ends, where the buffer has to be, or than a quarter of the budget (`ROOMY`). So recomputing the
    buffer gains nothing either. No gap is brief if nothing can leave, if there are few gaps, or if
    so little fits that not all of the short gaps can stay even with everything else away. About
    linear in ops.
    """
    if not isinstance(away(problem), Offload) or len(space.allowed) <= FEW:
        return frozenset()
    short = _shorter_than_copies(problem, space)
    moved = (space.gaps[i] for i in space.allowed if i not in short)
    held = _Held(problem, [gap for gap in moved if not gap.dead])
    if held.nbytes.max() > problem.budget_bytes:
        return frozenset()
    return frozenset(i for i in short if not held.more_inside(space.gaps[i]))


def _shorter_than_copies(problem: Problem, space: Space) -> frozenset[int]:
    """The gaps in which ops take less time than a copy out and a copy back would."""
    hardware, outer = problem.hardware, problem.hardware.outer
    out, back = hardware.link(Tier.DEVICE, outer), hardware.link(outer, Tier.DEVICE)
    clock = list(accumulate(problem.profile.seconds, initial=0.0))

    def is_shorter(gap: Gap) -> bool:
        nbytes = problem.trace.buffers[gap.buffer].nbytes
        idle = clock[gap.before] - clock[gap.after + 1]
        return not gap.dead and idle < out.seconds(nbytes) + back.seconds(nbytes)

    return frozenset(i for i in space.allowed if is_shorter(space.gaps[i]))


class _Held:
    """What the device holds, op by op, with nothing overlapping and some gaps offloaded."""

    def __init__(self, problem: Problem, offloaded: Sequence[Gap]) -> None:
        trace = problem.trace
        plan = make_plan(dict.fromkeys(offloaded, Offload(problem.hardware.outer)))
        found = occupancy(problem, donate(trace, expand(problem, plan)))
        pause = trace.boundary
        steps = [*found.steps[:pause], found.between, *found.steps[pause:]]
        self.nbytes: NDArray[np.int64] = np.array(steps, np.int64)
        """Bytes held during each op, and in the pause between the calls."""
        self.pause = pause
        self.plenty = ROOMY * problem.budget_bytes
        """Bytes below which there is room enough."""
        values = trace.values
        self.written_over = {(d.op, values[d.source].buffer) for d in trace.donations}
        """Pairs of an op and a buffer that the op could write its result over."""

    def more_inside(self, gap: Gap) -> bool:
        """Whether more is held inside a gap than at its ends, and more than `plenty`.

        An op at the gap's start that could write over the buffer, if the buffer left, counts as
        inside: it need not hold both.
        """
        after, before = self._place(gap.after), self._place(gap.before)
        ends = int(self.nbytes[before])
        if (gap.after, gap.buffer) not in self.written_over:
            ends, after = max(ends, int(self.nbytes[after])), after + 1
        return int(self.nbytes[after:before].max(initial=0)) > max(ends, self.plenty)

    def _place(self, op: int) -> int:
        """The index of `op` in `nbytes`, which has an entry for the pause too."""
        return op + (op >= self.pause)
