"""search: PoocH's two steps and its delay of fetches, over its own model of a step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import takewhile
from math import inf

from outcore.policies.pooch.backward import Backward, Detour
from outcore.policies.pooch.clock import (
    fetch_seconds,
    play_backward,
    step_seconds,
    waited,
)
from outcore.policies.pooch.log import KEEP, OFFLOAD, RECOMPUTE, Kind
from outcore.policies.pooch.model import PoochModel
from outcore.policies.pooch.room import room_of

ROUNDING = 1e-12
"""Sums of the same times in another order differ by less than this fraction."""


def offload_all(model: PoochModel) -> list[Kind]:
    """Offload every target."""
    return [OFFLOAD] * len(model.targets)


def keep_from_the_output(model: PoochModel) -> list[Kind]:
    """Step 1: keep targets, the last copied out first, while memory allows; time plays no part.

    First come those that the all-offload run had to wait for, up to the first that does not fit.
    Then come all others; those that do not fit are skipped. If not even offloading everything fits,
    all are offloaded.
    """
    kinds = offload_all(model)
    room = room_of(model)
    if not room.enough:
        return kinds
    first = reversed(waited(model, model.sync_swapout(kinds)))
    for target in takewhile(room.keep, first):
        kinds[target] = KEEP
    for target in reversed(range(len(kinds))):
        if kinds[target] is OFFLOAD and room.keep(target):
            kinds[target] = KEEP
    return kinds


def recompute_where_cheaper(model: PoochModel, kinds: list[Kind]) -> list[Kind]:
    """Step 2: one by one, recompute the target with the least r = recompute / offload overhead.

    A target is dropped for good once its offload costs nothing or r reaches 1.
    """
    kinds = list(kinds)
    fits = model.fits(kinds)
    contest = [i for i, kind in enumerate(kinds) if kind is OFFLOAD] if fits else []
    detours: dict[int, Detour] = {}
    while contest:
        ratios = _ratios(model, kinds, contest, detours)
        if not ratios:
            break
        best = min(ratios, key=ratios.__getitem__)
        kinds[best] = RECOMPUTE
        taken = detours[best]
        detours = {i: detours[i] for i in ratios if not detours[i].meets(taken)}
        contest = [i for i in ratios if i != best]
    return kinds


def _ratios(
    model: PoochModel, kinds: Sequence[Kind], contest: Sequence[int], detours: dict[int, Detour]
) -> dict[int, float]:
    """Target -> recompute overhead over offload overhead, for those in `contest` with less than 1.

    `detours` has the detours that are known already; those computed here are added to it.
    """
    backward = model.rebuild(kinds)
    slots = model.compact(backward)
    times = step_seconds(model, model.sync_swapout(kinds), backward, slots, contest)
    compute = sum(backward.seconds)
    ratios = {}
    for target, overhead in zip(contest, (times[0] - times[1:]).tolist(), strict=True):
        if overhead <= 0 or not model.targets[target].recomputable:
            continue
        if target not in detours:
            detours[target] = model.detour(kinds, backward, target)
        recompute = recompute_overhead(model, backward, detours[target], compute)
        if recompute / overhead < 1:
            ratios[target] = recompute / overhead
    return ratios


def recompute_overhead(
    model: PoochModel, backward: Backward, detour: Detour, compute_seconds: float
) -> float:
    """Backward compute with `detour` minus `compute_seconds`; inf if there is no room for it.

    This is a sum of compute, not a timeline: it gives no credit for copies that the extra compute
    hides. PoocH subtracts the compute with the target kept, which is the same as with it offloaded.
    """
    if detour.peak_bytes > model.capacity_bytes:
        return inf
    return detour.total_seconds(backward) - compute_seconds


def delay(model: PoochModel, backward: Backward, slots: Sequence[int]) -> list[int]:
    """Issue each group as late as the pass's time allows, never past its own break point.

    From the last group to the first: a copy may start so late that it and everything that has to
    follow it still end in time. About linear in segments.
    """
    fetches = fetch_seconds(model, backward)
    early = play_backward(model.log, backward.seconds, fetches, slots, 0.0, max)
    end = early.end * (1 + ROUNDING)
    late = list(slots)
    # `next_slot`: the slot of the group after this one. `copies`: the time from the start of that
    # group's copies to the end of the pass. `issued`: the same for the first group at each slot.
    # `rest`: the time from reaching the next break point to the end.
    next_slot, copies = len(late) - 1, 0.0
    issued: dict[int, float] = {}
    rest = 0.0
    for segment in reversed(range(len(late))):
        rest += backward.seconds[segment]
        if segment in fetches:
            copies = fetches[segment] + max(rest, copies)
            later = range(late[segment] + 1, min(segment, next_slot) + 1)
            late[segment] += bisect_right(later, end - copies, key=early.reached.__getitem__)
            next_slot = late[segment]
            issued[next_slot] = copies
        rest = max(rest, issued.get(segment, 0.0))
    return late
