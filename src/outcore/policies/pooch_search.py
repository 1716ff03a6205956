"""PoocH's two steps and its delay of fetches, over its own model of a step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from math import inf

from outcore.policies.pooch_clock import backward_seconds, step_seconds, waited
from outcore.policies.pooch_log import KEEP, OFFLOAD, RECOMPUTE, Kind
from outcore.policies.pooch_model import Backward, PoochModel


def keep_from_the_output(model: PoochModel) -> list[Kind]:
    """Step 1: keep targets, the last copied out first, while memory allows; time plays no part.

    First those that the all-offload run had to wait for, up to the first that does not fit; then
    all, leaving out those that do not fit. All are offloaded where not even that fits.
    """
    kinds = [OFFLOAD] * len(model.targets)
    if not model.fits(kinds):
        return kinds
    for target in reversed(waited(model, model.sync_swapout(kinds))):
        if not _keep(model, kinds, target):
            break
    for target in reversed([i for i, kind in enumerate(kinds) if kind is OFFLOAD]):
        _keep(model, kinds, target)
    return kinds


def _keep(model: PoochModel, kinds: list[Kind], target: int) -> bool:
    """Keep `target` if that fits, else let it be offloaded."""
    kinds[target] = KEEP
    if not model.fits(kinds):
        kinds[target] = OFFLOAD
    return kinds[target] is KEEP


def recompute_where_cheaper(model: PoochModel, kinds: list[Kind]) -> list[Kind]:
    """Step 2: one by one, recompute the target with the least r = recompute / offload overhead.

    A target leaves the contest for good once its offload costs nothing or r reaches 1.
    """
    kinds = list(kinds)
    fits = model.fits(kinds)
    contest = [i for i, kind in enumerate(kinds) if kind is OFFLOAD] if fits else []
    while contest:
        ratios = {i: ratio for i, ratio in _ratios(model, kinds, contest).items() if ratio < 1}
        if not ratios:
            break
        best = min(ratios, key=ratios.__getitem__)
        kinds[best] = RECOMPUTE
        contest = [i for i in ratios if i != best]
    return kinds


def _ratios(model: PoochModel, kinds: list[Kind], contest: Sequence[int]) -> dict[int, float]:
    """Per target of `contest`: recompute overhead over offload overhead; inf: stays offloaded."""
    backward = model.rebuild(kinds)
    slots = model.compact(backward)
    times = step_seconds(model, model.sync_swapout(kinds), backward, slots, contest)
    compute = sum(backward.seconds)
    ratios = {}
    for target, without in zip(contest, times[1:], strict=True):
        overhead = times[0] - without
        recompute = recompute_overhead(model, kinds, target, compute) if overhead > 0 else inf
        ratios[target] = recompute / overhead if overhead > 0 else inf
    return ratios


def recompute_overhead(
    model: PoochModel, kinds: list[Kind], target: int, compute_seconds: float
) -> float:
    """Backward compute with `target` recomputed less `compute_seconds`; inf where it cannot be.

    A sum of compute, no timeline: that the extra compute hides other copies is not credited. PoocH
    subtracts the compute with the target kept, which is the same as with it offloaded.
    """
    if not model.targets[target].recomputable:
        return inf
    tried = [*kinds[:target], RECOMPUTE, *kinds[target + 1 :]]
    again = model.rebuild(tried)
    return sum(again.seconds) - compute_seconds if model.fits_backward(tried, again) else inf


def delay(model: PoochModel, backward: Backward, slots: Sequence[int]) -> list[int]:
    """Issue each group as late as the pass's time allows, never past its own break point."""
    late = list(slots)

    def seconds(group: int, slot: int) -> float:
        return backward_seconds(model, backward, [*late[:group], slot, *late[group + 1 :]])

    limit = backward_seconds(model, backward, late)
    following = len(late) - 1
    for group in reversed([i for i, fetched in enumerate(backward.fetched) if fetched]):
        later = range(late[group] + 1, min(group, following) + 1)
        late[group] += bisect_right(later, limit, key=partial(seconds, group))
        following = late[group]
    return late
