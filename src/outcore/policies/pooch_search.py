"""PoocH's two steps and its delay of fetches, over its own model of a step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import inf

from outcore.policies.pooch_model import KEEP, OFFLOAD, RECOMPUTE, Backward, Kind, PoochModel


def feasible(model: PoochModel, kinds: Sequence[Kind]) -> bool:
    """Whether the model finds room for `kinds` at every moment."""
    return model.forward(kinds) is not None and model.fits(kinds, model.rebuild(kinds))


def keep_from_the_output(model: PoochModel) -> list[Kind]:
    """Step 1: keep targets, the last copied out first, while memory allows; time plays no part.

    First those that the all-offload run had to wait for, up to the first that does not fit; then all,
    leaving out those that do not fit. All offloaded where not even that fits.
    """
    kinds = [OFFLOAD] * len(model.targets)
    forward = model.forward(kinds)
    if forward is None or not feasible(model, kinds):
        return kinds
    for target in reversed(forward.waited):
        if not _keep(model, kinds, target):
            break
    for target in reversed(range(len(kinds))):
        _keep(model, kinds, target)
    return kinds


def _keep(model: PoochModel, kinds: list[Kind], target: int) -> bool:
    """Keep `target` if that fits, else let it be offloaded."""
    kinds[target] = KEEP
    if not feasible(model, kinds):
        kinds[target] = OFFLOAD
    return kinds[target] is KEEP


def recompute_where_cheaper(model: PoochModel, kinds: list[Kind]) -> list[Kind]:
    """Step 2: one by one, recompute the target with the least r = recompute / offload overhead.

    A target leaves the contest for good once its offload costs nothing or r reaches 1.
    """
    kinds = list(kinds)
    contest = [i for i, kind in enumerate(kinds) if kind is OFFLOAD]
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
    whole = _seconds(model, kinds, backward, slots)
    ratios = {}
    for target in contest:
        saved = whole - _seconds(model, kinds, backward, slots, free=target)
        ratios[target] = recompute_overhead(model, kinds, target) / saved if saved > 0 else inf
    return ratios


def recompute_overhead(model: PoochModel, kinds: list[Kind], target: int) -> float:
    """Backward compute with `target` recomputed less that with it kept; inf where it cannot be.

    A sum of compute, no timeline: that the extra compute hides other copies is not credited.
    """
    if not model.targets[target].recomputable:
        return inf
    again = model.rebuild(_with(kinds, target, RECOMPUTE))
    if not model.fits(kinds, again):
        return inf
    return sum(again.seconds) - sum(model.rebuild(_with(kinds, target, KEEP)).seconds)


def _with(kinds: list[Kind], target: int, kind: Kind) -> list[Kind]:
    return [*kinds[:target], kind, *kinds[target + 1 :]]


def step_seconds(model: PoochModel, kinds: Sequence[Kind], slots: Sequence[int]) -> float:
    """Time of the step as the model sees it."""
    return _seconds(model, kinds, model.rebuild(kinds), slots)


def _seconds(
    model: PoochModel,
    kinds: Sequence[Kind],
    backward: Backward,
    slots: Sequence[int],
    free: int = -1,
) -> float:
    forward = model.forward(kinds, free)
    assert forward is not None, "only what fits is timed"
    fetches = model.fetch_seconds(backward, free)
    return forward.seconds + model.backward_seconds(backward.seconds, fetches, slots)


def delay(model: PoochModel, backward: Backward, slots: Sequence[int]) -> list[int]:
    """Issue each group as late as the backward pass's time allows, never past its own break point."""
    late = list(slots)
    fetches = model.fetch_seconds(backward)
    limit = model.backward_seconds(backward.seconds, fetches, late)
    limit *= 1 + 1e-12  # the same sum in another order

    def on_time(group: int, slot: int) -> bool:
        tried = [*late[:group], slot, *late[group + 1 :]]
        return model.backward_seconds(backward.seconds, fetches, tried) <= limit

    following = len(late) - 1
    for group in reversed(range(len(late))):
        later = range(late[group] + 1, min(group, following) + 1)
        late[group] += bisect_left(later, True, key=lambda slot: not on_time(group, slot))  # noqa: B023
        following = late[group]
    return late
