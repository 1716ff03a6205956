"""Training: the row for one way to train one workload."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.gpu.trainer import Result, Turn
from benchmarks.kit.rounds import Turns, ratio_of_medians, seconds, spread
from benchmarks.kit.rows import Check, Row, ratio
from outcore.report import Recorded

FAR = 0.01
"""The most that a result may differ from the reference, relative to its norm. Where kernels add in
varying order, results differ by far less."""
ROUNDING = 1e-6
"""A norm of this part of a step's largest one may be nothing but rounding: that of a bias in front
of a batch norm, for example."""
TIME_LIMIT = 0.10
"""How far the predicted time may be from the measured one."""
SAME_CAP_BYTES = 64 << 20
"""Caps that are shares of a measured peak differ from run to run, but by less than this."""
FAILED, TOO_LONG = "failed", "it took too long"
"""Notes of rows that have no figures, but might have them if measured again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training(Row):
    """One way to train one workload."""

    workload: str
    mode: str
    cap_bytes: int | None = None
    """The most device memory that the process may use; None means all."""
    turns: int | None = None
    step_seconds: float | None = None
    host_seconds: float | None = None
    """The part of it in which the host gave the step's commands."""
    samples_per_second: float | None = None
    of_in_core_ratio: float | None = None
    """Throughput relative to the reference in the same turns, by medians."""
    quartiles: str | None = None
    """Quartiles of that ratio within a turn."""
    allocated_bytes: int | None = None
    """The most that torch's allocator gave out during the turns, or that outcore metered if that is
    more: in a metered step, its meter resets what the allocator counts."""
    reserved_bytes: int | None = None
    """The most that torch's allocator reserved during the turns."""
    retries: int | None = None
    """How often in a turn the allocator first had to release all its free memory."""
    refused: int | None = None
    """How often that did not help, and the request was refused.

    The caller then continued with less memory: cuDNN uses another algorithm, and remembers that.
    """
    refused_before: int | None = None
    """The same for the steps before the turns."""
    placed_steps: int | None = None
    """Steps so far in which every tensor lay where the plan's layout says (decision 0037)."""
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_seconds: float | None = None
    predicted_of_measured_ratio: float | None = None
    """Predicted over measured time of outcore's graphs, by its own clock.

    A step has the loss and the optimizer in addition.
    """
    ops_of_planned_ratio: float | None = None
    """Time of the ops in a recorded step, over their time in the profile; `wait_seconds` and
    `between_seconds` are the rest of that step (`outcore.report.recorded`)."""
    wait_seconds: float | None = None
    between_seconds: float | None = None
    out_of_planned_ratio: float | None = None
    """Rate of copies to the host in that step, over the rate that the prediction uses."""
    in_of_planned_ratio: float | None = None
    """The same for copies back."""
    planning_seconds: float | None = None
    first_step_seconds: float | None = None
    keep_offload_recompute: str | None = None
    offloaded_bytes: int | None = None
    recompute_seconds: float | None = None
    unlike: int | None = None
    """How many `compared` results (loss and gradients) are not bitwise those of the reference.

    If some differ from eager's, all are compared with the traced graph's instead.
    """
    compared: int | None = None
    """Number of results that are the same each time in the reference."""
    far: int | None = None
    """How many of all results, also of those that vary, are more than `FAR` from the reference."""
    metered_peak_bytes: int | None = None
    """The most that tensors held in a step, by outcore's meter: without what a layout holds."""
    details: dict[str, Any] | None = None
    """Seconds of each turn, and outcore's report after a recorded step, whole."""


def key(row: Mapping[str, Any]) -> Hashable:
    """What distinguishes a row, as saved, from others of its benchmark."""
    if "workload" not in row:
        return row["what"], row["beside"]
    cap = row.get("cap_bytes")
    return row["workload"], row["mode"], cap and round(cap / SAME_CAP_BYTES)


def failed(row: Mapping[str, Any]) -> bool:
    """Whether a row, as saved, has no figures, but might have them if measured again."""
    note = row.get("note", "")
    return bool(note.startswith(FAILED) or note == TOO_LONG)


def timed(row: Training, samples: int, turns: Turns[Turn], reference: Turns[Turn]) -> Training:
    """The row with its times, and with the peaks of its turns if the device counts them."""
    taken = [turn for turn in turns if turn is not None]
    median = seconds(turns)
    if reference:
        row = replace(
            row,
            of_in_core_ratio=ratio_of_medians(reference, turns),
            quartiles=spread(reference, turns),
        )
    return replace(
        row,
        details={"turns": _seconds(turns), "turns_of_reference": _seconds(reference)},
        turns=len(taken),
        step_seconds=median,
        host_seconds=_median(turn.host_seconds for turn in taken),
        samples_per_second=samples / median,
        allocated_bytes=_most(turn.peaks.allocated_bytes for turn in taken),
        reserved_bytes=_most(turn.peaks.reserved_bytes for turn in taken),
        retries=_most(turn.peaks.retries for turn in taken),
        refused=_most(turn.peaks.refused for turn in taken),
    )


def reported(row: Training, report: dict[str, Any]) -> Training:
    """The row with the figures of outcore's report; unchanged for other modes."""
    if not report:
        return row
    return replace(
        row,
        placed_steps=report.get("placed_steps"),
        budget_bytes=report["budget_bytes"],
        predicted_peak_bytes=report["predicted_peak_bytes"],
        metered_peak_bytes=report["measured_peak_bytes"],
        allocated_bytes=_most((row.allocated_bytes, report["measured_peak_bytes"])),
        predicted_seconds=report["predicted_seconds"],
        predicted_of_measured_ratio=ratio(report["predicted_seconds"], report["measured_seconds"]),
        planning_seconds=report["planning_seconds"],
        keep_offload_recompute="/".join(str(n) for n in report["counts"].values()),
        offloaded_bytes=report["offloaded_bytes"],
        recompute_seconds=report["recompute_seconds"],
        note="; ".join([*filter(None, [row.note]), *report["notes"]]),
    )


def recorded(row: Training, report: dict[str, Any]) -> Training:
    """The row with the figures of a recorded step, and with the whole report, if there is one."""
    if not report:
        return row
    row = replace(row, details={**(row.details or {}), "report": report})
    if report["recorded"] is None:
        return row
    found = Recorded(**report["recorded"])
    rates = {link["name"]: ratio(link["measured_rate"], link["rate"]) for link in report["links"]}
    return replace(
        row,
        ops_of_planned_ratio=found.ops_ratio,
        wait_seconds=found.wait_seconds,
        between_seconds=found.between_seconds,
        out_of_planned_ratio=rates.get("out to host"),
        in_of_planned_ratio=rates.get("in from host"),
    )


def compared(row: Training, results: dict[int, str], mine: Sequence[Result]) -> Training:
    """The row with the number of results that differ, of those in `results`."""
    if not results:
        return row
    found = {number: result.digest for number, result in enumerate(mine)}
    unlike = sum(found.get(key) != digest for key, digest in results.items())
    return replace(row, unlike=unlike, compared=len(results))


def near(row: Training, results: Sequence[Result], mine: Sequence[Result]) -> Training:
    """The row with the number of results that are far from those of the reference."""
    if not results:
        return row
    least = ROUNDING * max(result.norm for result in results)
    pairs = zip(results, mine, strict=False)
    far = abs(len(results) - len(mine)) + sum(not _is_near(*pair, least) for pair in pairs)
    return replace(row, far=far)


def _is_near(theirs: Result, mine: Result, least: float) -> bool:
    off = max(abs(mine.norm - theirs.norm), abs(mine.along - theirs.along))
    near = off <= FAR * max(theirs.norm, least)  # not if either is not a number
    return near or mine.digest == theirs.digest


def judged(row: Training) -> Training:
    """The row with the goals that all of outcore's rows have."""
    if row.budget_bytes is None or row.allocated_bytes is None or row.predicted_peak_bytes is None:
        return row
    off = row.predicted_of_measured_ratio
    checks: tuple[Check, ...] = (
        Check("inside the budget", row.allocated_bytes <= row.budget_bytes),
        Check("inside the predicted peak", row.allocated_bytes <= row.predicted_peak_bytes),
    )
    if off is not None:  # steps of ever new lengths are metered, not timed
        fits = abs(off - 1) <= TIME_LIMIT
        checks += (Check(f"predicted time within {TIME_LIMIT:.0%} of measured", fits),)
    if row.retries is not None:
        checks += (Check("no memory given back within a step", row.retries == 0),)
    if row.refused is not None:
        refused = row.refused + (row.refused_before or 0)
        checks += (Check("no request for memory refused", refused == 0),)
    if row.metered_peak_bytes is not None:
        inside = row.metered_peak_bytes <= row.predicted_peak_bytes
        checks += (Check("tensors inside the predicted peak", inside),)
    if row.compared:
        checks += (Check(f"{row.compared} results bitwise equal", row.unlike == 0),)
    if row.far is not None:
        checks += (Check(f"all results within {FAR:.0%}", row.far == 0),)
    return replace(row, checks=row.checks + checks)


def at_least(what: str, figure: float | None, limit: float) -> tuple[Check, ...]:
    """The check that `figure`, a ratio, is at least `limit`; no check if there is no figure."""
    if figure is None:
        return ()
    return (Check(f"{what} {figure:.3f} at least {limit:g}", figure >= limit),)


def _seconds(turns: Turns[Turn]) -> list[float | None]:
    return [None if turn is None else turn.seconds for turn in turns]


def _median(figures: Iterable[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return statistics.median(known) if known else None


def _most(figures: Iterable[int | None]) -> int | None:
    return max((figure for figure in figures if figure is not None), default=None)
