"""exact: check that results are identical under every policy and budget, inside the budget.

Loss, gradients and buffers of every step, profiled ones included, are compared with torch's
`aot_eager`, which runs the same kernels, and with eager. The peak is metered once the plan runs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.cpu.scale import Scale
from benchmarks.cpu.trainer import Trainer
from benchmarks.cpu.workloads import case_names
from benchmarks.kit.benchmark import Patience
from benchmarks.kit.digests import differing
from benchmarks.kit.modes import EVERY_POLICY, AotEager, Eager, Mode, Outcore
from benchmarks.kit.rows import Check, Row
from benchmarks.kit.worker import Worker, WorkerError
from outcore.errors import InfeasibleError
from outcore.execute.malloc import own_malloc
from outcore.ir.margin import MARGIN_DIVISOR
from outcore.policies import floor, resolve, spec_text
from outcore.units import format_bytes

STEPS = 8
"""Five steps until the plan runs, and three under it; one more is metered."""
KEEP_ALL = "keep-all"
FINE_BYTES = 1024
"""The smallest buffers to move if there is no plan with the default, 64 KiB."""

Digests = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exactness(Row):
    """One model under one policy and budget.

    The last three fields count tensors, over all steps, that are not bitwise equal.
    """

    case: str
    policy: str
    share: float | None
    """Where the budget lies between the floor (0) and the in-core peak (1).

    None for `keep-all`: it gets a budget that everything fits, and would be infeasible below that.
    """
    state: str | None = None
    graphs: int | None = None
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    keep_offload_recompute: str | None = None
    unlike_aot_eager: int | None = None
    unlike_eager: int | None = None
    aot_eager_unlike_eager: int | None = None


def exact(scale: Scale, patience: Patience) -> Iterator[Row]:
    """Every policy at every budget, for every model; one process per model."""
    for case in scale.cases or case_names():
        if patience.over():
            return
        try:
            yield from _rows(case, scale.shares, patience)
        except WorkerError as error:
            yield Exactness(case=case, policy="all", share=None, note=f"failed: {error.kind}")


def _rows(case: str, shares: tuple[float, ...], patience: Patience) -> Iterator[Row]:
    with Worker(Comparison, case) as worker:
        yield worker.ask(Comparison.row, KEEP_ALL, None)
        for policy in (name for name in EVERY_POLICY if name != KEEP_ALL):
            for share in shares:
                if not patience.over():
                    yield worker.ask(Comparison.row, policy, share)


class Comparison:
    """One model, the results of torch's own ways to train it, and its range of budgets."""

    def __init__(self, case: str) -> None:
        own_malloc()
        self.case = case
        self.eager, _ = self._run(Eager())
        self.aot_eager, peak = self._run(AotEager())
        self.floor_bytes, self.planned_peak_bytes = self._range()
        self.in_core_bytes = min(peak, self.planned_peak_bytes)

    def row(self, policy: str, share: float | None) -> Exactness:
        """Train under `policy` and compare. `share` is as in `Exactness`; None: everything fits.

        If `policy` has no plan, it is tried again with smaller buffers allowed to move.
        """
        row = self._try(policy, share)
        return row if row.state or share is None else self._try(_fine(policy), share)

    def _try(self, policy: str, share: float | None) -> Exactness:
        budget = self._budget_bytes(share)
        row = Exactness(case=self.case, policy=policy, share=share, budget_bytes=budget)
        try:
            return self._compared(row)
        except InfeasibleError as error:
            return replace(row, note=f"infeasible: needs {format_bytes(error.floor_bytes)}")
        finally:
            _forget()

    def _budget_bytes(self, share: float | None) -> int:
        """A budget in bytes, including the engine's safety margin."""
        if share is None:
            budget = self.planned_peak_bytes * 1.02
        else:
            budget = self.floor_bytes + share * (self.in_core_bytes - self.floor_bytes)
        return int(budget * MARGIN_DIVISOR / (MARGIN_DIVISOR - 1)) + 1

    def _compared(self, row: Exactness) -> Exactness:
        trainer = Trainer(self.case, Outcore(row.policy, row.budget_bytes or 0))
        seen = tuple(trainer.digests() for _ in range(STEPS))
        measured = trainer.peak_bytes()
        report = trainer.report()
        counts = report["counts"]
        row = replace(
            row,
            state=report["state"],
            graphs=report["graphs"],
            predicted_peak_bytes=report["predicted_peak_bytes"],
            measured_peak_bytes=measured,
            keep_offload_recompute="/".join(str(n) for n in counts.values()),
            unlike_aot_eager=differing(seen, self.aot_eager),
            unlike_eager=differing(seen, self.eager),
            aot_eager_unlike_eager=differing(self.aot_eager, self.eager),
            note="; ".join(report["notes"]),
        )
        return replace(row, checks=_checks(row))

    def _run(self, mode: Mode) -> tuple[Digests, int]:
        """Results of all steps, and the metered peak of one more step."""
        trainer = Trainer(self.case, mode)
        seen, peak = tuple(trainer.digests() for _ in range(STEPS)), trainer.peak_bytes()
        del trainer
        _forget()
        return seen, peak

    def _range(self) -> tuple[int, int]:
        """The floor and the in-core peak as planned, both without a safety margin.

        If there are several graphs, the floor is that of the last one: nothing runs between its
        calls.
        """
        trainer = Trainer(self.case, Outcore(KEEP_ALL))
        trainer.warm_up()
        backend = trainer.backend
        assert backend is not None and backend.engine is not None  # noqa: PT018 - one fact
        engine = backend.engine
        margin = engine.settings.budget_bytes // MARGIN_DIVISOR
        planned = [g.planned for g in engine.registry.active() if g.planned is not None]
        peak = (backend.report().in_core_peak_bytes or 0) - margin
        problem = planned[-1].problem
        lowest = floor(replace(problem, outside_bytes=problem.outside_bytes - margin)).nbytes
        del trainer, backend, engine, planned, problem
        _forget()
        return lowest, peak


def _fine(policy: str) -> str:
    given: Any = resolve(policy)
    return spec_text(replace(given, min_bytes=FINE_BYTES))


def _checks(row: Exactness) -> tuple[Check, ...]:
    equal = not row.unlike_aot_eager and row.unlike_eager == row.aot_eager_unlike_eager
    measured, predicted = row.measured_peak_bytes, row.predicted_peak_bytes
    inside = predicted is not None and (measured or 0) <= predicted <= (row.budget_bytes or 0)
    return (
        Check("bitwise equal", equal),
        Check("measured <= predicted <= budget", inside),
    )


def _forget() -> None:
    """Release what is left of one training: the next one would count it as held."""
    torch.compiler.reset()
    gc.collect()
