"""honest: compare what the simulator predicts for a plan with what its steps take."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.cpu.in_core import in_core_peak_bytes
from benchmarks.cpu.scale import Scale
from benchmarks.cpu.trainer import Trainer, alone
from benchmarks.cpu.worth import RECOMPUTE_ALL, SLOW_LINK
from benchmarks.kit.benchmark import Patience
from benchmarks.kit.modes import Outcore
from benchmarks.kit.rows import Check, Row, at_most, ratio
from benchmarks.kit.worker import Worker, WorkerError
from outcore.errors import InfeasibleError
from outcore.runtime.settings.options import DEFAULT_POLICY
from outcore.units import format_bytes

TIME_LIMIT = 0.15
PEAK_LIMIT = 1.05
MOST_SECONDS = 120.0
"""Time limit for one policy's steps: slow policies get fewer steps."""
ROOMY_SHARE = 1.25
"""The budget of `keep-all`, as a fraction of the in-core peak."""
POLICIES = tuple(dict.fromkeys(("keep-all", "swap-all", RECOMPUTE_ALL, "pooch", DEFAULT_POLICY)))
LINKED = tuple(policy for policy in POLICIES if policy not in {"keep-all", RECOMPUTE_ALL})
"""Policies whose time depends on the link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Honesty(Row):
    """One policy. `of_measured_ratio` is the predicted time over the measured one."""

    policy: str
    link: str
    steps: int | None = None
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    of_measured_ratio: float | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    peak_ratio: float | None = None
    stall_seconds: float | None = None


def honest(scale: Scale, patience: Patience) -> Iterator[Row]:
    """Each policy alone in a fresh process: at full speed, then with a slower link."""
    if patience.over():
        return
    peak = in_core_peak_bytes(scale.workload)
    for link in (None, SLOW_LINK) if scale.throttled else (None,):
        for policy in POLICIES if link is None else LINKED:
            if patience.over():
                return
            share = ROOMY_SHARE if policy == "keep-all" else scale.budget_share
            yield _row(scale, Outcore(policy, int(peak * share), link))


def _row(scale: Scale, mode: Outcore) -> Honesty:
    link = mode.link_limit or "disk"
    try:
        with Worker(alone, scale.workload, mode) as worker:
            worker.ask(Trainer.warm_up)
            measured, steps = worker.ask(Trainer.seconds, MOST_SECONDS, scale.rounds)
            peak = worker.ask(Trainer.peak_bytes)
            report = worker.ask(Trainer.report)
    except InfeasibleError as error:
        least = format_bytes(error.floor_bytes)
        return Honesty(policy=mode.policy, link=link, note=f"infeasible: needs {least}")
    except WorkerError as error:
        print(error, file=sys.stderr)
        return Honesty(policy=mode.policy, link=link, note=f"failed: {error.kind}")
    of_measured = ratio(report["predicted_seconds"], measured)
    tight = ratio(report["predicted_peak_bytes"], peak)
    return Honesty(
        policy=mode.policy,
        link=link,
        steps=steps,
        predicted_seconds=report["predicted_seconds"],
        measured_seconds=measured,
        of_measured_ratio=of_measured,
        predicted_peak_bytes=report["predicted_peak_bytes"],
        measured_peak_bytes=peak,
        peak_ratio=tight,
        stall_seconds=report["stall_seconds"],
        checks=(
            Check(
                f"predicted time within {TIME_LIMIT:.0%} of measured",
                of_measured is not None and abs(of_measured - 1) <= TIME_LIMIT,
            ),
            *at_most("peak", tight, PEAK_LIMIT),
        ),
    )
