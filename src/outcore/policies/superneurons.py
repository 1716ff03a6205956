"""superneurons: SuperNeurons' static rule, as PoocH's authors put it into practice to compare with.

The rule goes by the type of the op: convolutions are offloaded, all else is recomputed; what fits
is kept, from the output side. Copies back are issued one convolution ahead.
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
from outcore.policies.pooch_backward import Backward
from outcore.policies.pooch_log import KEEP, OFFLOAD, RECOMPUTE, Kind
from outcore.policies.pooch_model import PoochModel
from outcore.policies.pooch_plan import choices_of
from outcore.policies.settle import settle

CONVOLUTIONS = frozenset({"convolution", "convolution_backward", "conv", "conv_backward"})
"""Names of ops, without namespace and overload; Chainer's among them."""


@dataclass(frozen=True, slots=True)
class SuperNeurons:
    """Keep from the output while it fits; then offload convolutions, recompute all else.

    Of what follows the first candidate that does not fit, nothing is kept.
    """

    name: ClassVar[str] = "superneurons"
    summary: ClassVar[str] = "keep from the output side, offload convolutions, recompute the rest"

    min_bytes: int = MIN_BYTES

    def __post_init__(self) -> None:
        check_min_bytes(self, self.min_bytes)

    def plan(self, problem: Problem) -> Plan:
        """The rule's plan. Raises InfeasibleError where that does not fit.

        What is kept is chosen as if all else were offloaded: what is recomputed instead may need
        more than there is. With more there is, more is kept, and may need more again: the budget
        that the error names has been tried.
        """
        try:
            return self.as_it_is(problem)
        except InfeasibleError as error:
            refusal = error
        while refusal.tier == Tier.DEVICE.value:
            try:
                self.as_it_is(replace(problem, budget_bytes=refusal.floor_bytes))
                break
            except InfeasibleError as error:
                refusal = error
        try:
            raise replace(refusal, budget_bytes=problem.limit_bytes(Tier(refusal.tier)))
        finally:
            del refusal  # whose frames hold it, and what their callers do

    def as_it_is(self, problem: Problem) -> Plan:
        """The rule's plan. With the budget that the error names there may be none either."""
        gaps, leave = candidates(problem, self.min_bytes), away(problem)
        if not gaps or not isinstance(leave, Offload):
            return settle(problem, {}, self)
        model = PoochModel(problem, gaps, leave.tier, problem.budget_bytes)
        schedule = _OneConvolutionAhead(problem)
        kinds = by_type(problem, model)
        return settle(problem, choices_of(model, kinds, leave.tier, schedule), self)


def by_type(problem: Problem, model: PoochModel) -> list[Kind]:
    """One kind per target. What cannot be made again is offloaded, whatever made it."""
    count = len(model.targets)

    def kept(number: int) -> list[Kind]:
        return [OFFLOAD] * (count - number) + [KEEP] * number

    # What is kept is an end of the list, and one more never takes less: bisection finds the first
    # that does not fit as well as a walk does.
    most = bisect_right(range(1, count + 1), False, key=lambda n: not model.fits(kept(n)))
    kinds = kept(most)
    for number, made_by in enumerate(model.producers):
        convolution = made_by is not None and _is_convolution(problem, made_by)
        if kinds[number] is OFFLOAD and model.targets[number].recomputable and not convolution:
            kinds[number] = RECOMPUTE
    return kinds


class _OneConvolutionAhead:
    """Fetches needed after one convolution's backward, up to the next one's, go out at the first.

    Without a look at memory (a `pooch_plan.Schedule`).
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
    return any(part in CONVOLUTIONS for part in problem.trace.ops[op].target.split("."))
