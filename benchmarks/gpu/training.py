"""Training: the row of one way to train one workload."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.gpu.trainer import Turn
from benchmarks.kit.rounds import Turns, ratio_of_medians, seconds, spread
from benchmarks.kit.rows import Check, Row, ratio

TIME_LIMIT = 0.10
"""How far the predicted time may be off the measured one."""
SAME_CAP_BYTES = 64 << 20
"""Caps that are shares of a measured peak differ by less, from run to run."""
FAILED, TOO_LONG = "failed", "it took too long"
"""Why there are no figures, but might be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training(Row):
    """One way to train one workload.

    `of_in_core_ratio`: throughput, of that of the reference in the same turns, by medians;
    `quartiles`: of the ratio within a turn. `allocated_bytes`, `reserved_bytes`: the most that
    torch's allocator gave out, and took, during the turns; `retries`: how often in a turn it had to
    give all free memory back first; `refused`: how often that did not help, and somebody went on
    with less (cuDNN, another way, and it remembers that); `refused_before`: the same of the steps
    before the turns. `predicted_of_measured_ratio` is of outcore's graphs alone, by
    its own clock: a step has the loss and the optimizer besides. `unlike`: results (loss and
    gradients) that are not bitwise those of the reference, of `compared` that come out the same
    each time there; where eager's differ, the traced graph's.
    """

    workload: str
    mode: str
    cap_bytes: int | None = None
    turns: int | None = None
    step_seconds: float | None = None
    samples_per_second: float | None = None
    of_in_core_ratio: float | None = None
    quartiles: str | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    retries: int | None = None
    refused: int | None = None
    refused_before: int | None = None
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_seconds: float | None = None
    predicted_of_measured_ratio: float | None = None
    planning_seconds: float | None = None
    first_step_seconds: float | None = None
    keep_offload_recompute: str | None = None
    offloaded_bytes: int | None = None
    recompute_seconds: float | None = None
    unlike: int | None = None
    compared: int | None = None


def key(row: Mapping[str, Any]) -> Hashable:
    """What tells a row, as saved, from others of its benchmark."""
    if "workload" not in row:
        return row["what"], row["beside"]
    cap = row.get("cap_bytes")
    return row["workload"], row["mode"], cap and round(cap / SAME_CAP_BYTES)


def failed(row: Mapping[str, Any]) -> bool:
    """Whether a row, as saved, has no figures, but might."""
    note = row.get("note", "")
    return bool(note.startswith(FAILED) or note == TOO_LONG)


def timed(row: Training, samples: int, turns: Turns[Turn], reference: Turns[Turn]) -> Training:
    """The row with its times, and the most memory of its turns where the device counts it."""
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
        turns=len(taken),
        step_seconds=median,
        samples_per_second=samples / median,
        allocated_bytes=_most(turn.peaks.allocated_bytes for turn in taken),
        reserved_bytes=_most(turn.peaks.reserved_bytes for turn in taken),
        retries=_most(turn.peaks.retries for turn in taken),
        refused=_most(turn.peaks.refused for turn in taken),
    )


def reported(row: Training, report: dict[str, Any]) -> Training:
    """The row with what outcore says of itself; as it is for other modes."""
    if not report:
        return row
    return replace(
        row,
        budget_bytes=report["budget_bytes"],
        predicted_peak_bytes=report["predicted_peak_bytes"],
        predicted_seconds=report["predicted_seconds"],
        predicted_of_measured_ratio=ratio(report["predicted_seconds"], report["measured_seconds"]),
        planning_seconds=report["planning_seconds"],
        keep_offload_recompute="/".join(str(n) for n in report["counts"].values()),
        offloaded_bytes=report["offloaded_bytes"],
        recompute_seconds=report["recompute_seconds"],
        note="; ".join([*filter(None, [row.note]), *report["notes"]]),
    )


def compared(row: Training, results: dict[int, str], mine: tuple[str, ...]) -> Training:
    """The row with the number of results that differ, of those in `results`."""
    if not results:
        return row
    found = dict(enumerate(mine))
    unlike = sum(found.get(key) != digest for key, digest in results.items())
    return replace(row, unlike=unlike, compared=len(results))


def judged(row: Training) -> Training:
    """The row with the goals that all of outcore's rows have."""
    if row.budget_bytes is None or row.allocated_bytes is None or row.predicted_peak_bytes is None:
        return row
    off = row.predicted_of_measured_ratio
    checks: tuple[Check, ...] = (
        Check("inside the budget", row.allocated_bytes <= row.budget_bytes),
        Check("inside the predicted peak", row.allocated_bytes <= row.predicted_peak_bytes),
        Check(
            f"predicted time within {TIME_LIMIT:.0%} of measured",
            off is not None and abs(off - 1) <= TIME_LIMIT,
        ),
    )
    if row.retries is not None:
        checks += (Check("no memory given back within a step", row.retries == 0),)
    if row.refused is not None:
        refused = row.refused + (row.refused_before or 0)
        checks += (Check("no request for memory refused", refused == 0),)
    if row.compared:
        checks += (Check("bitwise equal", row.unlike == 0),)
    return replace(row, checks=row.checks + checks)


def at_least(what: str, figure: float | None, limit: float) -> tuple[Check, ...]:
    """The check that `figure`, a ratio, is at least `limit`; none where there is no figure."""
    if figure is None:
        return ()
    return (Check(f"{what} {figure:.3f} at least {limit:g}", figure >= limit),)


def _most(figures: Iterable[int | None]) -> int | None:
    return max((figure for figure in figures if figure is not None), default=None)
