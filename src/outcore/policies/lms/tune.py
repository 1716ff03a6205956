"""tune: tune the numbers of LMS one after another, each as large as a replay allows.

Each search assumes that a larger number needs more memory, which need not be true. What it returns
has passed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from outcore.policies.lms.swaps import Setting

TUNED = -1
"""The value of an option that is to be tuned."""

Passes = Callable[[Setting], bool]
"""Whether a setting fits, by a replay or by a lowered plan."""
Field = Literal["threshold", "ahead", "groupby"]


def tune(passes: Passes, given: Setting, count: int) -> Setting:
    """Fill in what is TUNED in `given`, for a step of `count` levels. About 3 log2(count) replays.

    The threshold comes first, at the first `sync` from the given one up at which the smallest
    threshold passes. Then come `ahead` and `groupby`. If nothing passes, all copies are waited for,
    and a threshold that is to be tuned becomes `count`: nothing is swapped.
    """
    least = Setting(
        1 if given.threshold == TUNED else given.threshold,
        1 if given.ahead == TUNED else given.ahead,
        0 if given.groupby == TUNED else given.groupby,
        given.sync,
    )
    found = least
    if given.threshold == TUNED:
        found = _tune_threshold(passes, least, count)
    elif TUNED in {given.ahead, given.groupby} and not least.waits_in and not passes(least):
        found = replace(least, sync=3)
    if found.waits_in:
        return found
    if given.ahead == TUNED:
        found = largest(passes, found, "ahead", count)
    return _tune_groupby(passes, found, count) if given.groupby == TUNED else found


def tighten(fits: Passes, found: Setting, given: Setting) -> Setting:
    """The first that fits of: `found`, without sharing, with the largest threshold that fits.

    If none fits, the tightest of them. Changes only what is TUNED in `given`.
    """
    if fits(found):
        return found
    if given.groupby == TUNED and found.groupby:
        found = replace(found, groupby=0)
        if fits(found):
            return found
    if given.threshold != TUNED:
        return found
    tightest = replace(found, threshold=1)
    return largest(fits, tightest, "threshold", found.threshold) if fits(tightest) else tightest


def largest(passes: Passes, found: Setting, field: Field, most: int) -> Setting:
    """`found`, which passes, with the largest passing value of `field` that bisection finds."""
    low, high = 1, most
    while low <= high:
        middle = (low + high) // 2
        trial = replace(found, **{field: middle})
        if passes(trial):
            found, low = trial, middle + 1
        else:
            high = middle - 1
    return found


def _tune_threshold(passes: Passes, least: Setting, count: int) -> Setting:
    """The largest threshold, at the first `sync` from the given one up at which `least` passes.

    If none passes, nothing is swapped and all copies are waited for.
    """
    for sync in range(least.sync, 4):
        trial = replace(least, sync=sync)
        if passes(trial):
            return largest(passes, trial, "threshold", count)
    return replace(least, threshold=count, sync=3)


def _tune_groupby(passes: Passes, found: Setting, count: int) -> Setting:
    """`found` with everything shared if that passes, else with the first `groupby` that does.

    Bisection tries ever smaller numbers; if none passes, nothing is shared.
    """
    everything = replace(found, groupby=count)
    if passes(everything):
        return everything
    high = count
    while high > 0:
        trial = replace(found, groupby=high // 2)
        if passes(trial):
            return trial
        high = high // 2 - 1
    return found
