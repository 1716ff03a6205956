"""Evaluator: what many plans of one problem would take."""

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

if TYPE_CHECKING:  # a walk takes an evaluator
    from outcore.evaluate.walk import Walk


class Evaluation(NamedTuple):
    """What a plan takes: seconds of a step, bytes on the device, bytes in the nearest outer tier.

    `fits`: it stays inside the problem's limits. A plan that cannot be carried out takes infinitely
    long, and no bytes; it does not fit.
    """

    seconds: float
    peak_bytes: int
    outer_bytes: int
    fits: bool


IMPOSSIBLE = Evaluation(math.inf, 0, 0, fits=False)


class Evaluator:
    """Evaluates plans of one problem, by arrays; compiled where numba is installed (extra `fast`).

    Its figures are those of `simulate(problem, lower(problem, plan))`, to the last bit. `gaps` are
    all that a plan may decide on, sorted, dead ones too; arrays of kinds and hints have an entry
    for each, and `default_kinds` are those of a plan that says nothing. What is offloaded goes to
    the nearest outer tier (`Hardware.outer`). An evaluator writes to arrays of its own, so each
    thread needs another.

    Raises VerifyError where the problem breaks a rule. The trace must be valid (`verify_trace`).
    """

    def __init__(self, problem: Problem) -> None:
        # Numba takes half a second to import, and only those who evaluate need it.
        from outcore.evaluate.engine import Engine  # noqa: PLC0415 - see above

        verify_problem(problem)
        live = liveness(problem.trace)
        self.problem = problem
        every = (*gaps(problem.trace), *dead_gaps(problem.trace))
        self.gaps: tuple[Gap, ...] = tuple(sorted(every))
        defaults = [RECOMPUTE if gap.dead else KEEP for gap in self.gaps]
        self.default_kinds = np.array(defaults, np.int8)
        self.engine = Engine(problem, live, self.gaps)
        self._known = frozenset(self.gaps)
        self.no_hints = np.full(len(self.gaps), NO_HINT, dtype=np.int64)
        self._budget = problem.limit_bytes(Tier.DEVICE)
        self._outer_budget = problem.limit_bytes(problem.hardware.outer)

    @property
    def compiled(self) -> bool:
        """Whether evaluations run as machine code: numba is installed."""
        return self.engine.compiled

    def walk(
        self,
        allowed: Mapping[int, Sequence[int]],
        alike: Sequence[Sequence[int]],
        seed: int | np.random.SeedSequence,
    ) -> Walk:
        """A Walk from plan to plan; its arguments are explained there."""
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
        """What the plan of `kinds` takes. Near-linear in the runs it makes.

        `limit`, in seconds: a plan that takes longer, or does not fit, is given up as soon as that
        is clear, and counts as one that cannot be carried out. It bounds the runs.

        `release` and `prefetch` are hints (`ir.plan.Offload`): op ids, NO_HINT where lowering
        decides; those of gaps that are not offloaded are ignored. Raises ValueError where an array
        has not one entry for each gap.
        """
        found = self.engine.run(*self._arrays(kinds, release, prefetch), limit)
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

        Raises ValueError as `evaluate` does, and for a kind that is none.
        """
        arrays = (array.tolist() for array in self._arrays(kinds, release, prefetch))
        tier = self.problem.hardware.outer
        choices = {gap: _choice(tier, *row) for gap, *row in zip(self.gaps, *arrays, strict=True)}
        digests = digest(self.problem), digest(self.problem.trace)
        return make_plan(choices, policy, *digests)

    def arrays(self, plan: Plan) -> tuple[NDArray[np.int8], NDArray[np.int64], NDArray[np.int64]]:
        """Kinds and hints of a plan: `plan` turns them back into it.

        Raises ValueError for what they cannot say: variants, `depart` and `arrive`, another tier.
        """
        found = [_row(self.problem.hardware.outer, plan.choice(gap)) for gap in self.gaps]
        if plan.variants or any(gap not in self._known for gap in plan.by_gap):
            raise ValueError("a plan with variants, or of another trace")
        kinds, release, prefetch = zip(*found, strict=True) if found else ((), (), ())
        return self._arrays(kinds, release, prefetch)

    def _arrays(
        self, kinds: ArrayLike, release: ArrayLike | None, prefetch: ArrayLike | None
    ) -> tuple[NDArray[np.int8], NDArray[np.int64], NDArray[np.int64]]:
        """The arguments as compiled code takes them: it checks neither lengths nor types."""
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
