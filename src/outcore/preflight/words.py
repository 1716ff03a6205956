"""words: write a Forecast in words."""

from __future__ import annotations

from collections.abc import Iterator

from outcore.preflight.forecast import Forecast
from outcore.runtime.settings.options import DEFAULT_POLICY
from outcore.units import format_bytes, format_seconds, parse_size, spell_size

ONE_LINE = "import outcore; outcore.wrap(model, {options})"
"""The line to add to a script, after its model is made, to train within a budget."""

WORKSPACES = (
    "workspaces of {count} convolution ops, forward and backward: they are known only after these "
    "ops have run, and may be several times as large as their tensors"
)


def verdict(found: Forecast, *, times: bool = True) -> str:
    """Whether it fits, in a sentence or two; without `times`, nothing about speed."""
    budget = format_bytes(found.budget_bytes)
    if found.fits_in_core:
        return f"It fits in {budget} without outcore."
    if found.fits:
        slowdown = f": a step takes {found.slowdown or 1:.2f} times as long" if times else ""
        if found.convolutions:  # what the estimate leaves out may be more than what it counts
            slowdown += ", if the workspaces of convolutions fit, too"
        return f"It does not fit in {budget} as it is. With outcore it does{slowdown}."
    smallest = found.smallest_budget_bytes
    if smallest <= found.budget_bytes:
        return f"It does not fit in {budget}: {found.reason}."
    return (
        f"It does not fit in {budget}, and no plan makes it fit: the smallest budget that works "
        f"is {spell_size(smallest)}."
    )


def rows(found: Forecast, *, times: bool = True) -> Iterator[tuple[str, str]]:
    """The figures, each with its name; without `times`, those of memory only."""
    seconds = f", {format_seconds(found.in_core_seconds)} a step" if times else ""
    yield "in-core", f"{format_bytes(found.in_core_peak_bytes)} at most{seconds}"
    planned = found.planned
    if planned is not None and not found.fits_in_core:
        if times:
            slowdown = f", {found.slowdown or 1:.3f} times in-core"
            seconds = f", {format_seconds(planned.seconds)} a step{slowdown}"
        yield "planned", f"{format_bytes(planned.peak_bytes)} at most{seconds}, by {found.policy}"
        yield "moved", _moved(found, times=times)
        for index, each in enumerate(planned.moved):
            site = f", made at {each.site}" if each.site else ""
            text = f"{format_bytes(each.nbytes)} {each.name}: {each.choice}{site}"
            yield "" if index else "the largest", text
    share = f"{found.smallest_budget_bytes / found.in_core_peak_bytes:.1%} of in-core"
    smallest = spell_size(found.smallest_budget_bytes)
    yield "smallest budget", f"{smallest} ({share}), set by {found.smallest_set_by}"
    if found.convolutions:
        yield "not counted", WORKSPACES.format(count=found.convolutions)


def what_to_do(found: Forecast, capacity_bytes: int) -> tuple[str, str]:
    """The name and the text of a row: the line to write in the script, or else what would help.

    `capacity_bytes`: the most that the device has.
    """
    if found.smallest_budget_bytes > capacity_bytes:
        return "what to do", "a smaller batch or smaller inputs: no plan fits what the device has"
    return "add one line", one_line(found)


def one_line(found: Forecast) -> str:
    """The line to write in the script, with the given budget, or the smallest one if that is more.

    It names the policy unless that is the default. If the policy has no plan, it names the default.
    """
    options = f'budget="{_budget(found)}"'
    if found.policy != DEFAULT_POLICY:
        policy = DEFAULT_POLICY if found.planned is None else found.policy
        options += f', policy="{policy}"'
    return ONE_LINE.format(options=options)


def _budget(found: Forecast) -> str:
    """A budget that can be met: at most the given one, unless that is too small."""
    if found.smallest_budget_bytes > found.budget_bytes:
        return spell_size(found.smallest_budget_bytes)
    needed = found.smallest_budget_bytes if found.planned is None else found.planned.peak_bytes
    for short in map(spell_size, (found.budget_bytes, _hundredths(found.budget_bytes))):
        if needed <= parse_size(short, None) <= found.budget_bytes:
            return short
    return f"{found.budget_bytes}B"


def _hundredths(nbytes: int) -> int:
    """`nbytes` rounded down to a number that two decimals can spell."""
    unit = next((unit for unit in (2**30, 2**20, 2**10) if nbytes >= unit), 100)
    return nbytes * 100 // unit * unit // 100


def _moved(found: Forecast, *, times: bool) -> str:
    planned = found.planned
    assert planned is not None  # noqa: S101 - callers make sure that there is one
    counts = planned.counts
    again = f" ({format_seconds(planned.recompute_seconds)})" if times else ""
    held = f", {planned.held} held for reruns" * bool(planned.held)
    return (
        f"{counts.offload} offloaded ({format_bytes(planned.offloaded_bytes)}), "
        f"{counts.recompute} recomputed{again}, {counts.keep} kept{held}"
    )
