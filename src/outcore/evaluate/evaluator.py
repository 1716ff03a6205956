"""Evaluator: the predicted time and memory of many plans of one problem."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from outcore.evaluate.kinds import KEEP, NO_HINT, OFFLOAD, RECOMPUTE, RECOMPUTE_STAY
from outcore.ir.hardware import Tier
from outcore.ir.liveness import dead_gaps, gaps, liveness
from outcore.ir.plan import Choice, Gap, Keep, Offload, Plan, Recompute, make_plan
from outcore.ir.problem import Problem
from outcore.ir.store import digest
from outcore.ir.verify_problem import verify_problem

if TYPE_CHECKING:  # walk.py imports this module
    from outcore.evaluate.walk import Walk


class Evaluation(NamedTuple):
    """A plan's predicted seconds per step, bytes on the device and bytes in the nearest outer tier.

    `fits`: it stays within the problem's limits. A plan that cannot be carried out has infinite
    seconds and no bytes, and does not fit.
    """

    seconds: float
    peak_bytes: int
    outer_bytes: int
    fits: bool


IMPOSSIBLE = Evaluation(math.inf, 0, 0, fits=False)


class Evaluator:
    """Evaluates plans of one problem, given as arrays. Compiled if numba is installed (`fast`).

    The figures are those of `simulate(problem, lower(problem, plan))`, to the last bit. `gaps` are
    all gaps that a plan may decide on, sorted, dead ones included. Arrays of kinds and hints have
    one entry per gap. `default_kinds` is a plan that lists nothing. What is offloaded is copied to
    the nearest outer tier (`Hardware.outer`). An evaluator writes to its own arrays, so each thread
    needs its own evaluator.

    Raises VerifyError if the problem breaks a rule. The trace must be valid (`verify_trace`).
    """

    def __init__(self, problem: Problem) -> None:
        # Importing numba takes half a second, and only evaluations need it.
        from outcore.evaluate.runner import KernelRunner  # noqa: PLC0415 - see above

        verify_problem(problem)
        live = liveness(problem.trace)
        self.problem = problem
        every = (*gaps(problem.trace), *dead_gaps(problem.trace))
        self.gaps: tuple[Gap, ...] = tuple(sorted(every))
        defaults = [RECOMPUTE if gap.dead else KEEP for gap in self.gaps]
        self.default_kinds = np.array(defaults, np.int8)
        self.runner = KernelRunner(problem, live, self.gaps)
        self._known = frozenset(self.gaps)
        self.no_hints = np.full(len(self.gaps), NO_HINT, dtype=np.int64)
        self._budget = problem.limit_bytes(Tier.DEVICE)
        self._outer_budget = problem.limit_bytes(problem.hardware.outer)

    @property
    def compiled(self) -> bool:
        """Whether evaluations run as machine code, which needs numba."""
        return self.runner.compiled

    def walk(
        self,
        allowed: Mapping[int, Sequence[int]],
        alike: Sequence[Sequence[int]],
        seed: int | np.random.SeedSequence,
    ) -> Walk:
        """A Walk from plan to plan; see there for the arguments."""
        from outcore.evaluate.walk import Walk  # noqa: PLC0415 - loads numba, as in __init__

        return Walk(self, allowed, alike, seed)

    def evaluate(
        self,
        kinds: ArrayLike,
        *,
        release: ArrayLike | None = None,
        prefetch: ArrayLike | None = None,
        limit: float = math.inf,
    ) -> Evaluation:
        """Evaluate the plan of `kinds`. Near-linear in the runs of its program.

        `limit`, in seconds: a plan that takes longer, or does not fit, is given up as soon as that
        is clear. The result is that of a plan that cannot be carried out. A limit also bounds the
        number of reruns, except of ops that take no time.

        `release` and `prefetch` are hints (`ir.plan.Offload`): op ids, or NO_HINT to let lowering
        decide. Hints of gaps that are not offloaded are ignored. Raises ValueError if an array does
        not have one entry per gap.
        """
        found = self.runner.run(*self._arrays(kinds, release, prefetch), limit)
        if found is None:
            return IMPOSSIBLE
        seconds, peak, extent = found
        fits = peak <= self._budget and extent <= self._outer_budget
        return Evaluation(seconds, peak, extent, fits)

    def plan(
        self,
        kinds: ArrayLike,
        policy: str = "",
        *,
        release: ArrayLike | None = None,
        prefetch: ArrayLike | None = None,
    ) -> Plan:
        """The Plan that `evaluate` evaluates; `policy` is the spec text of its policy.

        Raises ValueError as `evaluate` does, and for an unknown kind.
        """
        arrays = (array.tolist() for array in self._arrays(kinds, release, prefetch))
        tier = self.problem.hardware.outer
        choices = {gap: _choice(tier, *row) for gap, *row in zip(self.gaps, *arrays, strict=True)}
        digests = digest(self.problem), digest(self.problem.trace)
        return make_plan(choices, policy, *digests)

    def arrays(self, plan: Plan) -> tuple[NDArray[np.int8], NDArray[np.int64], NDArray[np.int64]]:
        """The kinds and hints of `plan`, from which `self.plan` makes the same plan again.

        Raises ValueError for what arrays cannot express: variants, `depart`, `arrive`, other tiers.
        """
        found = [_row(self.problem.hardware.outer, plan.choice(gap)) for gap in self.gaps]
        if plan.variants or any(gap not in self._known for gap in plan.by_gap):
            raise ValueError("a plan with variants, or of another trace")
        kinds, release, prefetch = zip(*found, strict=True) if found else ((), (), ())
        return self._arrays(kinds, release, prefetch)

    def _arrays(
        self, kinds: ArrayLike, release: ArrayLike | None, prefetch: ArrayLike | None
    ) -> tuple[NDArray[np.int8], NDArray[np.int64], NDArray[np.int64]]:
        """The arguments as compiled code needs them: it checks neither lengths nor types."""
        made = (
            np.ascontiguousarray(kinds, np.int8),
            self.no_hints if release is None else np.ascontiguousarray(release, np.int64),
            self.no_hints if prefetch is None else np.ascontiguousarray(prefetch, np.int64),
        )
        for array in made:
            if array.shape != self.no_hints.shape:
                raise ValueError(f"an array of {array.shape} for {len(self.gaps)} gaps")
        return made


def _row(tier: Tier, choice: Choice) -> tuple[int, int, int]:
    """Kind, release and prefetch of a choice."""
    if isinstance(choice, Keep):
        return KEEP, NO_HINT, NO_HINT
    if isinstance(choice, Recompute):
        return RECOMPUTE_STAY if choice.stay else RECOMPUTE, NO_HINT, NO_HINT
    if choice.tier is not tier or choice.depart is not None or choice.arrive is not None:
        raise ValueError(f"{choice} has no array")
    release, prefetch = (NO_HINT if h is None else h for h in (choice.release, choice.prefetch))
    return OFFLOAD, release, prefetch


def _choice(tier: Tier, kind: int, release: int, prefetch: int) -> Choice:
    if kind == OFFLOAD:
        return Offload(tier, release=_hint(release), prefetch=_hint(prefetch))
    if kind not in (KEEP, RECOMPUTE, RECOMPUTE_STAY):
        raise ValueError(f"{kind} is no kind")
    return Keep() if kind == KEEP else Recompute(stay=kind == RECOMPUTE_STAY)


def _hint(op: int) -> int | None:
    return None if op == NO_HINT else op
