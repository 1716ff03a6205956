"""superneurons: SuperNeurons' static rule, as PoocH's authors implemented it for comparison.

The rule goes by the type of the op: what convolutions make is offloaded, everything else is
recomputed. What fits is kept, from the output side. Copies back are issued one convolution ahead.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from typing import ClassVar

from outcore.errors import InfeasibleError
from outcore.ir.hardware import Tier
from outcore.ir.plan import Offload, Plan
from outcore.ir.problem import Problem
from outcore.policies.candidates import away, candidates
from outcore.policies.policy import MIN_BYTES, check_min_bytes
from outcore.policies.pooch.backward import Backward
from outcore.policies.pooch.log import KEEP, OFFLOAD, RECOMPUTE, Kind
from outcore.policies.pooch.model import PoochModel
from outcore.policies.pooch.plan import choices_of
from outcore.policies.reruns import limited
from outcore.policies.settle import settle

CONVOLUTIONS = frozenset({"convolution", "convolution_backward", "conv", "conv_backward"})
"""Names of ops, without namespace and overload; Chainer's among them."""


@dataclass(frozen=True, slots=True)
class SuperNeurons:
    """Keep from the output while it fits; then offload convolutions, recompute all else.

    Nothing is kept after the first candidate that does not fit.
    """

    name: ClassVar[str] = "superneurons"
    summary: ClassVar[str] = "keep from the output side, offload convolutions, recompute the rest"

    min_bytes: int = MIN_BYTES
    """Smaller buffers are kept."""

    def __post_init__(self) -> None:
        check_min_bytes(self, self.min_bytes)

    def plan(self, problem: Problem) -> Plan:
        """The plan of the rule. Raises InfeasibleError if it does not fit.

        What to keep is chosen as if everything else were offloaded. What is recomputed instead may
        need more than there is. With a larger budget more is kept, which may again need more. So
        the budget in the error has been tried. If an outer tier is too small there, a note says so,
        and more than that budget is needed.
        """
        try:
            return self.plan_once(problem)
        except InfeasibleError as error:
            refusal, there = error, error
        while there.tier == Tier.DEVICE.value:
            refusal = there
            try:
                self.plan_once(replace(problem, budget_bytes=refusal.floor_bytes))
                break
            except InfeasibleError as error:
                there = error
        beyond = there.tier != refusal.tier
        limit_bytes = problem.limit_bytes(Tier(refusal.tier))
        named = replace(refusal, budget_bytes=limit_bytes, at_least=refusal.at_least or beyond)
        if beyond:
            named.add_note(f"outcore: with that budget, {there}")
        try:
            raise named
        finally:
            del refusal, there, named  # tracebacks refer to this frame: cycles keep callers' data

    def plan_once(self, problem: Problem) -> Plan:
        """The plan of the rule. The budget that its error names has not been tried."""
        gaps, leave = candidates(problem, self.min_bytes), away(problem)
        if not gaps or not isinstance(leave, Offload):
            return settle(problem, {}, self)
        model = PoochModel(problem, gaps, leave.tier, problem.budget_bytes)
        schedule = _OneConvolutionAhead(problem)
        kinds = by_type(problem, model)
        return settle(problem, choices_of(model, kinds, leave.tier, schedule), self)


def by_type(problem: Problem, model: PoochModel) -> list[Kind]:
    """One kind per target. What cannot be recomputed is offloaded, whatever made it.

    So is what it would take too many ops to recompute in a network of thousands of layers.
    """
    count = len(model.targets)

    def kept(number: int) -> list[Kind]:
        """Offload everything but the last `number` targets."""
        return [OFFLOAD] * (count - number) + [KEEP] * number

    # The kept targets are the end of the list, and one more never needs less memory. So bisection
    # finds the first that does not fit.
    most = bisect_right(range(1, count + 1), False, key=lambda n: not model.fits(kept(n)))
    again = {}
    for number, made_by in enumerate(model.producers[: count - most]):
        convolution = made_by is not None and _is_convolution(problem, made_by)
        if model.targets[number].recomputable and not convolution:
            again[model.targets[number].gap] = number
    kinds = kept(most)
    for gap in limited(problem.trace, again):
        kinds[again[gap]] = RECOMPUTE
    return kinds


class _OneConvolutionAhead:
    """Issue fetches needed after one convolution's backward, up to the next one's, at the first.

    It does not consider memory (a `pooch.plan.Schedule`).
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def __call__(self, model: PoochModel, _backward: Backward) -> list[int]:
        segments = model.log.segments
        points = [i for i, s in enumerate(segments) if _is_convolution(self.problem, s.op)]
        slots = []
        for segment in range(len(segments)):
            before = bisect_left(points, segment)
            slots.append(points[before - 1] if before else 0)
        return slots


def _is_convolution(problem: Problem, op: int) -> bool:
    """Whether `op` is a convolution or its backward."""
    return any(part in CONVOLUTIONS for part in problem.trace.ops[op].target.split("."))
