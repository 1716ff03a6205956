"""words: write the sentences of a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outcore.ir.hardware import Tier
from outcore.ir.program import Copy
from outcore.report.figures import Report
from outcore.report.page.account import Account, seconds_of, stall_seconds_of, total
from outcore.report.page.reruns import longest_rerun
from outcore.report.page.waits import is_search, totals, why_text
from outcore.units import format_bytes, format_seconds, parse_size, spell_size

_STATES = {
    "profiling": "Not planned yet: the first steps are being measured.",
    "unplanned": "Nothing is planned: the step runs as PyTorch runs it, with everything in memory.",
}
DEAR = 0.05
"""Above this fraction of a step, a page suggests another policy than recomputing."""


def headline(report: Report) -> str:
    """The report in one sentence, above all whether the budget is met; measurements come first."""
    budget, peak = spell_budget(report.budget_bytes), report.predicted_peak_bytes
    held = report.measured_peak_bytes
    if held is not None and held > report.budget_bytes > 0:
        over = format_bytes(held - report.budget_bytes)
        return f"Over the budget of {budget}: a step was measured to hold {over} more."
    if peak is None:
        return _STATES.get(report.state, _STATES["profiling"])
    if peak > report.budget_bytes:
        over = format_bytes(peak - report.budget_bytes)
        return f"Does not fit in {budget}: the plan needs {over} more."
    return _over_outside(report) or _fits(report, budget)


def is_over(report: Report) -> bool:
    """Whether a budget is exceeded, as measured or as predicted."""
    peaks = report.measured_peak_bytes or 0, report.predicted_peak_bytes or 0
    return max(peaks) > report.budget_bytes > 0 or bool(_over_outside(report))


def _over_outside(report: Report) -> str:
    """What a plan needs beyond the limit of host or disk; empty if it stays within both."""
    for step in report.steps:
        for tier in (Tier.HOST, Tier.DISK):
            limit = step.problem.limit_bytes(tier)
            over = step.predicted.peak(tier) - limit
            if over > 0:
                more = format_bytes(over)
                words = f"Does not fit: the plan needs {more}"
                if not limit:
                    return f"{words} of the {tier.value}, and may use none of it."
                return f"{words} more than the {tier.value}'s {spell_budget(limit)}."
    return ""


def _fits(report: Report, budget: str) -> str:
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
    return any(step.plan.moves for step in report.steps)


def copies(report: Report) -> bool:
    """Whether anything is copied."""
    return any(isinstance(x.action, Copy) for step in report.steps for x in step.program.body)


def spell_budget(nbytes: int) -> str:
    """A budget as the user wrote it, if it is a round number; 0 means that it is not known yet."""
    if not nbytes:
        return "not known yet"
    spelled = spell_size(nbytes).replace(".00", "")
    if parse_size(spelled, None) != nbytes:
        return format_bytes(nbytes)
    return f"{spelled[:-3]} {spelled[-3:]}" if spelled.endswith("iB") else spelled


def summary(report: Report, accounts: Sequence[Account]) -> Iterator[str]:
    """The sentences below the headline: measurements, the bound, and what slows the step most."""
    yield from _measured(report)
    least, predicted = report.lower_bound_seconds, report.predicted_seconds
    if least and predicted and moves(report):
        over = 100 * max(0.0, predicted / least - 1)
        yield (
            f"No plan under this budget can take less than {format_seconds(least)}: "
            f"this one is predicted to take {over:.1f}% more."
        )
    if accounts and moves(report):
        yield from _recomputing(report, accounts)
        if copies(report):
            yield _waiting(accounts)


def _measured(report: Report) -> Iterator[str]:
    """Measured time and peak, and which graphs the predictions leave out."""
    took, predicted = report.measured_seconds, report.predicted_seconds
    held, peak = report.measured_peak_bytes, report.predicted_peak_bytes
    planned, partly = len(report.steps), 0 < len(report.steps) < report.graphs
    if took is not None and predicted and not partly:
        times = ratio(took, predicted)
        yield (
            f"Measured: a step takes {format_seconds(took)}, {times} the predicted "
            f"{format_seconds(predicted)}."
        )
    if held is not None and held > report.budget_bytes > 0:
        said = f"The prediction was {format_bytes(peak)}. " if peak is not None else ""
        yield (
            f"It held {format_bytes(held)} at most. {said}Possible reasons: tensors that the "
            "training loop keeps, or ops that need more than when they were profiled. A budget "
            "that is lower by as much leaves room for them."
        )
    if partly:
        yield (
            f"{planned} of the {report.graphs} graphs of a step have a plan, and all predictions "
            "here are for those: the others are still being profiled, or run as PyTorch "
            "runs them."
        )


def _recomputing(report: Report, accounts: Sequence[Account]) -> Iterator[str]:
    """How much of the step is recomputed, the longest part of that, and another policy to try."""
    copied = copies(report)
    if not copied:
        yield "Nothing is copied: what has no room is dropped, and computed again."
    longest = longest_rerun(accounts)
    if longest is None:
        return
    again = total(accounts, lambda each: each.recompute_seconds)
    part = again / (seconds_of(accounts) or 1.0)
    yield (
        f"Computing again takes {format_seconds(again)}, {100 * part:.1f}% of the step. "
        f"The longest: {longest}."
    )
    if not copied and part > DEAR and not is_search(report.policy):
        yield (
            "The plan does not copy at all: try the policy search, which copies during compute if "
            "that costs less than computing again."
        )


def _waiting(accounts: Sequence[Account]) -> str:
    """How much of the step compute waits, and the cause of most of that."""
    waited = stall_seconds_of(accounts)
    if not waited:
        return "Compute never waits: every copy overlaps with it, and ends in time."
    part = f"{100 * waited / seconds_of(accounts):.1f}%"
    longest, *others = totals(accounts)
    share = f"{100 * longest.seconds / waited:.0f}% of that is" if others else "That is"
    why = why_text(longest)
    return f"Compute waits for copies {part} of the step. {share} for one cause. {why}."


def still(report: Report, waited: float) -> str:
    """The sentence above the causes of waits: how long compute waits, or why it never does."""
    if waited:
        return f"Compute waits for {format_seconds(waited)} of the predicted step."
    if copies(report):
        return "It never does: every copy is done before it is needed."
    return "It never does: nothing is copied."


def ratio(seconds: float | None, of: float | None) -> str:
    """One time as a multiple of another."""
    return f"{seconds / of:.2f}x" if seconds is not None and of else "-"


def seconds_text(seconds: float | None) -> str:
    """A time, or a dash if it is not known."""
    return "-" if seconds is None else format_seconds(seconds)


def bytes_text(nbytes: int | None) -> str:
    """A size, or a dash if it is not known."""
    return "-" if nbytes is None else format_bytes(nbytes)
