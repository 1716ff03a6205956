"""timeline: step 2 of PoocH as in its paper, with overheads from whole timelines."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from outcore.policies.pooch.clock import simulated_seconds, step_seconds
from outcore.policies.pooch.log import OFFLOAD, RECOMPUTE, Kind
from outcore.policies.pooch.model import PoochModel
from outcore.policies.pooch.search import ROUNDING


def recompute_where_faster(model: PoochModel, kinds: Sequence[Kind]) -> list[Kind]:
    """Step 2: one by one, recompute the target with the least r = recompute / offload overhead.

    Section 4.4.3 of the paper. A target is dropped for good once its offload costs nothing or r
    reaches 1. Each recomputation makes the step faster, because that is what r < 1 means.
    """
    kinds = list(kinds)
    contest = [i for i, kind in enumerate(kinds) if kind is OFFLOAD] if model.fits(kinds) else []
    while contest:
        ratios = overhead_ratios(model, kinds, contest)
        contest = [i for i, ratio in ratios.items() if ratio < 1]
        if contest:
            best = min(contest, key=ratios.__getitem__)
            kinds[best] = RECOMPUTE
            contest.remove(best)
    return kinds


def overhead_ratios(
    model: PoochModel, kinds: Sequence[Kind], contest: Sequence[int]
) -> dict[int, float]:
    """Target -> recompute overhead over offload overhead, for targets that `kinds` offloads.

    Both overheads are relative to the step in which the target's copies need no time, with
    everything else the same. inf if the offload has no overhead, or if the target cannot be
    recomputed or has no room for that.
    """
    backward = model.rebuild(kinds)
    slots = model.compact(backward)
    times = step_seconds(model, model.sync_swapout(kinds), backward, slots, contest)
    now, *without = times.tolist()
    ratios = dict.fromkeys(contest, inf)
    for target, free in zip(contest, without, strict=True):
        if now - free > now * ROUNDING and model.targets[target].recomputable:
            ratios[target] = (_seconds_with(model, kinds, target) - free) / (now - free)
    return ratios


def _seconds_with(model: PoochModel, kinds: Sequence[Kind], target: int) -> float:
    """The step's seconds with `target` recomputed instead; inf if that does not fit."""
    tried = [*kinds[:target], RECOMPUTE, *kinds[target + 1 :]]
    forward, backward = model.sync_swapout(tried), model.rebuild(tried)
    if forward.peak_bytes > model.capacity_bytes or not model.fits_backward(backward):
        return inf
    return simulated_seconds(model, forward, backward)
