"""forecast: predict time and memory of a step on a machine, in-core and under a policy's plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from outcore.aten import CONVOLUTIONS
from outcore.errors import InfeasibleError
from outcore.estimate import estimate
from outcore.explain.words import choice_words
from outcore.ir.hardware import Tier
from outcore.ir.margin import budget_for, for_any_budget, margin_bytes
from outcore.ir.memory import fits
from outcore.ir.plan import KEEP_ALL, Choice, Gap, Keep, Offload, Plan
from outcore.ir.problem import Problem
from outcore.ir.trace import Role, Trace
from outcore.lower import lower
from outcore.out_of_process import plan_out_of_process
from outcore.policies import Policy, floor
from outcore.presets import Preset
from outcore.report import Counts, report
from outcore.simulate import simulate
from outcore.spec import spec_text

ENDLESS_BYTES = 1 << 62
SHOWN = 5
"""How many of the moved buffers are named."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A buffer that the plan moves, once or several times."""

    name: str
    site: str
    """Where it is made: module and line, as far as known."""
    choice: str
    """`offload` or `recompute`; if no op needs it any more, `keep` or `offload` for reruns."""
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Time and memory of the step under the plan. All figures are predicted."""

    peak_bytes: int
    seconds: float
    counts: Counts
    held: int
    """Number of buffers that no op needs any more, held for recomputations."""
    offloaded_bytes: int
    recompute_seconds: float
    moved: tuple[Moved, ...]
    """The largest buffers that are moved, the largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Whether a step fits, and what it takes. All figures are predicted."""

    hardware: str
    """Name of the machine."""
    policy: str
    """Spec of the policy."""
    budget_bytes: int
    in_core_peak_bytes: int
    """Peak with everything kept, and everything counted."""
    in_core_seconds: float
    """Time of a step with everything kept."""
    smallest_budget_bytes: int
    """The smallest budget that some plan meets."""
    smallest_set_by: str
    """The op that determines `smallest_budget_bytes`."""
    optimizer_bytes: int
    """What the optimizer holds on the device."""
    planned: Prediction | None
    """None if the policy has no plan that fits; `reason` then says why."""
    reason: str = ""
    convolutions: int = 0
    """Number of convolution ops.

    They need workspaces, which no peak here counts: their size is known only once they have run.
    """

    @property
    def fits(self) -> bool:
        """Whether it fits the budget, as it is or by a plan."""
        return self.planned is not None

    @property
    def fits_in_core(self) -> bool:
        """Whether it fits as it is, with nothing moved."""
        return self.planned is not None and not self.planned.moved

    @property
    def slowdown(self) -> float | None:
        """Time of a planned step divided by the in-core time; None if there is no plan."""
        if self.planned is None or not self.in_core_seconds:
            return None
        return self.planned.seconds / self.in_core_seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain values; bytes and seconds."""
        shown = {"fits": self.fits, "fits_in_core": self.fits_in_core, "slowdown": self.slowdown}
        return {**asdict(self), **shown, "source": "predicted"}


def forecast(
    trace: Trace,
    machine: Preset,
    budget_bytes: int,
    policy: Policy,
    optimizer_bytes: int,
    unused_bytes: int = 0,
) -> Forecast:
    """What `policy` achieves for a step within a device budget, on a machine that need not be here.

    `optimizer_bytes` is what the optimizer holds on the device, and `unused_bytes` what the model
    holds and the step does not use.
    """
    profile = estimate(trace, machine.hardware, machine.efficiency)
    outside_bytes = optimizer_bytes + unused_bytes
    ample = Problem(trace, profile, machine.hardware, ENDLESS_BYTES, outside_bytes=outside_bytes)
    in_core = simulate(ample, lower(ample, KEEP_ALL))
    lowest = floor(ample)
    problem = replace(
        ample,
        budget_bytes=budget_bytes,
        outside_bytes=outside_bytes + margin_bytes(budget_bytes),
    )
    planned, reason = None, ""
    try:
        planned = _planned(problem, policy)
    except InfeasibleError as error:
        for_any_budget(error, budget_bytes)
        reason = str(error)
    return Forecast(
        hardware=machine.hardware.name,
        policy=spec_text(policy),
        budget_bytes=budget_bytes,
        in_core_peak_bytes=in_core.peak(Tier.DEVICE),
        in_core_seconds=in_core.seconds,
        smallest_budget_bytes=budget_for(lowest.nbytes),
        smallest_set_by=lowest.op,
        optimizer_bytes=optimizer_bytes,
        planned=planned,
        reason=reason,
        convolutions=sum(op.target in CONVOLUTIONS for op in trace.ops),
    )


def weight_bytes(trace: Trace) -> int:
    """Bytes of the trained parameters, which is the size of each state of an optimizer."""
    return sum(b.nbytes for b in trace.buffers if b.role is Role.PARAM)


def _planned(problem: Problem, policy: Policy) -> Prediction:
    """The policy's plan, or, as in training, the plan that keeps everything if that fits."""
    plan = KEEP_ALL
    if not fits(problem, lower(problem, plan)):
        plan = plan_out_of_process(policy, problem)
    found = report(problem, plan)
    (step,) = found.steps
    return Prediction(
        peak_bytes=step.peak_bytes,
        seconds=step.predicted.seconds,
        counts=found.counts,
        held=found.held,
        offloaded_bytes=found.offloaded_bytes,
        recompute_seconds=found.recompute_seconds,
        moved=_moved(problem.trace, plan),
    )


def _moved(trace: Trace, plan: Plan) -> tuple[Moved, ...]:
    """The largest buffers that are moved, the largest first."""
    made = {b: op for op in range(len(trace.ops)) for b in trace.writes[op]}
    needed_last = sorted(plan.moves, key=lambda move: not move[0].dead)
    moves = {gap.buffer: (gap, choice) for gap, choice in needed_last}
    largest = sorted(moves, key=lambda b: (-trace.buffers[b].nbytes, b))[:SHOWN]
    return tuple(
        Moved(
            trace.buffers[b].name,
            trace.ops[made[b]].site if b in made else "passed in",
            _words(*moves[b]),
            trace.buffers[b].nbytes,
        )
        for b in largest
    )


def _words(gap: Gap, choice: Choice) -> str:
    if isinstance(choice, Keep):
        word = "keep"
    else:
        word = "offload" if isinstance(choice, Offload) else "recompute"
    return choice_words(word, dead=gap.dead)
