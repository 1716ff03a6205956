"""words: what a page says in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outcore.explain import Explanation, Late, Total, WaitsFor
from outcore.ir.plan import Keep
from outcore.report.figures import Report
from outcore.units import format_bytes, format_seconds, parse_size, spell_size

_STATES = {
    "profiling": "Not planned yet: the first steps are being measured.",
    "in-core": "Nothing is planned: the step runs as PyTorch runs it, with everything in memory.",
}
_WHAT = {
    WaitsFor.COPY_BACK: "Compute needs data that is not back on the device yet",
    WaitsFor.MEMORY: "Compute needs memory that is not free until a copy out is done",
    WaitsFor.PLAN: "The plan asks compute to wait here for a copy",
    WaitsFor.CLOCK: "Memory is given back here, and its copy out is later than expected",
    WaitsFor.END: "All is computed, and a copy out is still under way",
}
_WHY = {
    Late.LINK: "the link was busy with other copies",
    Late.MEMORY: "there was no room on the device to fetch it sooner",
    Late.HINT: "the plan does not start the copy sooner",
    Late.CALL: "it is written over in the backward pass, so it is fetched there",
    Late.COPY_OUT: "it was still on its way out",
    Late.ROOM: "its place outside was still taken",
    Late.TIME: "the copy started as soon as it could, and takes longer than there is",
}
_TRY = {
    Late.LINK: "Move less: raise the budget, or use a policy that recomputes more (search weighs "
    "both). A faster link helps as well; outcore doctor shows how fast this machine's is.",
    Late.MEMORY: "Raise the budget a little: the memory in the way is that of the op beside it. "
    "A smaller batch helps too.",
    Late.HINT: "Try the policy search, which looks for better moments.",
    Late.CALL: "Raise the budget, so that it can stay.",
    Late.COPY_OUT: "It comes back too soon to be worth the trip: raise the budget, or try search.",
    Late.ROOM: "Give the outer memory more room: host_budget, or disk_budget.",
    Late.TIME: "The link is slow beside the computing: recompute instead, or raise the budget.",
}


def headline(report: Report) -> str:
    """The report in one sentence."""
    budget, peak = spell_budget(report.budget_bytes), report.predicted_peak_bytes
    if peak is None:
        return _STATES.get(report.state, _STATES["profiling"])
    if peak > report.budget_bytes:
        over = format_bytes(peak - report.budget_bytes)
        return f"Does not fit in {budget}: the plan needs {over} more."
    needs = format_bytes(report.in_core_peak_bytes or 0)
    if not moves(report):
        return f"Fits in {budget} as it is: the step needs {needs}, and nothing is moved."
    times = ratio(report.predicted_seconds, report.in_core_seconds)
    return (
        f"Fits in {budget}: a step is predicted to take {times} as long as with everything in "
        f"memory, which would need {needs}."
    )


def moves(report: Report) -> bool:
    """Whether anything is offloaded or recomputed."""
    choices = (choice for step in report.steps for _, choice in step.plan.choices)
    return any(not isinstance(choice, Keep) for choice in choices)


def spell_budget(nbytes: int) -> str:
    """A budget as it was given, if it was given in round numbers."""
    spelled = spell_size(nbytes).replace(".00", "")
    if parse_size(spelled, None) != nbytes:
        return format_bytes(nbytes)
    return f"{spelled[:-3]} {spelled[-3:]}" if spelled.endswith("iB") else spelled


def summary(report: Report, explained: Sequence[Explanation]) -> Iterator[str]:
    """What follows on the headline: what was measured, the bound, and most of the waiting."""
    least, predicted, measured = (
        report.lower_bound_seconds,
        report.predicted_seconds,
        report.measured_seconds,
    )
    if measured is not None and predicted:
        took, times = format_seconds(measured), ratio(measured, predicted)
        yield f"Measured: a step takes {took}, {times} the predicted {format_seconds(predicted)}."
    if least and predicted and moves(report):
        over = 100 * max(0.0, predicted / least - 1)
        yield (
            f"No plan under this budget can take less than {format_seconds(least)}: "
            f"this one is predicted to take {over:.1f}% more."
        )
    if explained and moves(report):
        yield _waiting(explained)


def _waiting(explained: Sequence[Explanation]) -> str:
    """How much of the step compute waits, and the cause of most of that."""
    waited = sum(each.stall_seconds for each in explained)
    if not waited:
        return "Compute never waits: every copy is done beside it, in time."
    part = f"{100 * waited / sum(each.seconds for each in explained):.1f}%"
    found = [total for each in explained for total in each.totals]
    longest = max(found, key=_seconds)
    share = f"{100 * longest.seconds / waited:.0f}% of that is" if len(found) > 1 else "That is"
    why = f"{wait_what(longest)}: {wait_why(longest)}"
    return f"Compute waits for copies {part} of the step. {share} for one cause. {why}."


def _seconds(total: Total) -> float:
    return total.seconds


def wait_what(total: Total) -> str:
    """What compute waits for."""
    return _WHAT[total.waits_for]


def wait_why(total: Total) -> str:
    """Why that was late."""
    return _WHY[total.late]


def wait_try(total: Total) -> str:
    """What to try against it."""
    return _TRY[total.late]


def ratio(seconds: float | None, of: float | None) -> str:
    """One time as so many times another."""
    return f"{seconds / of:.2f}x" if seconds is not None and of else "-"


def seconds_text(seconds: float | None) -> str:
    """A time; a dash where it is not known."""
    return "-" if seconds is None else format_seconds(seconds)


def bytes_text(nbytes: int | None) -> str:
    """A size; a dash where it is not known."""
    return "-" if nbytes is None else format_bytes(nbytes)
