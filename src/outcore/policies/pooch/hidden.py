"""hidden: find copies that compute does not hide when everything is offloaded.

Section 4.4.2 of PoocH's paper.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from outcore.policies.pooch.backward import Backward
from outcore.policies.pooch.clock import (
    BackwardTimes,
    fetch_seconds,
    play_backward,
    play_forward,
)
from outcore.policies.pooch.model import Forward, PoochModel
from outcore.policies.pooch.search import ROUNDING, offload_all


@dataclass(frozen=True, slots=True)
class Exposed:
    """Targets whose copies are not hidden when everything is offloaded."""

    out: tuple[int, ...]
    """The paper's L_O: targets whose copies out are not hidden, in order of copy-out."""
    stalls: dict[int, float]
    """The paper's L_I: target -> the seconds that compute waits for its copy back."""


def exposed(model: PoochModel) -> Exposed:
    """What compute has to wait for when every target is offloaded. Linear in ops and targets.

    A copy out is hidden if neither the op that needs its memory waits for it, nor the boundary, at
    which all copies out are awaited. A copy back is hidden if its break point does not wait for it.
    """
    kinds = offload_all(model)
    backward = model.rebuild(kinds)
    slots = model.compact(backward)
    fetches = fetch_seconds(model, backward)
    times = play_backward(model.log, backward.seconds, fetches, slots, 0.0, max)
    out = _exposed_out(model, model.sync_swapout(kinds))
    return Exposed(out, _stalls(model, backward, times))


def _exposed_out(model: PoochModel, forward: Forward) -> tuple[int, ...]:
    """Targets whose copies out are not hidden.

    Differs from `clock.waited`, which follows the published code: there the last op counts as
    the boundary.
    """
    out = [model.targets[i].out_seconds for i in forward.leaving]
    times = play_forward(model.log, forward, out, 0.0, max)
    awaited_at = [bisect_right(forward.due, copy) for copy in range(len(out))]
    return tuple(
        target
        for target, done, op in zip(forward.leaving, times.done, awaited_at, strict=True)
        if done > times.reached[op] * (1 + ROUNDING)
    )


def _stalls(model: PoochModel, backward: Backward, times: BackwardTimes[float]) -> dict[int, float]:
    """Target -> its share of the wait of its group, at most the time of its own copy."""
    stalls: dict[int, float] = {}
    for segment, end in times.done.items():
        wait = end - times.reached[segment]
        for target in reversed(backward.fetched[segment]):
            if wait <= end * ROUNDING:
                break
            copy = model.targets[target].in_seconds
            stalls[target] = min(wait, copy)
            wait -= copy
    return stalls
