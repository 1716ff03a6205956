"""link_tables: time copies through a lane, and fit a link to the times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, TypeAlias

import torch

from outcore.execute.driver import Lane, Region
from outcore.ir.hardware import Link

LinkTable: TypeAlias = tuple[tuple[int, float], ...]
"""Pairs (nbytes, seconds), one for each size of a single copy in one direction, ascending."""

_NBYTES = tuple(1 << shift for shift in range(16, 27, 2))
"""The sizes to try: 64 KiB to 64 MiB, each four times the previous one."""
_ENOUGH_SECONDS = 0.1
"""A size is timed again until its copies have taken this long in total, or often enough."""
_FEWEST_REPEATS, _MOST_REPEATS = 2, 5
_LEAST_SECONDS = 1e-9
"""The time of a copy for which a clock shows none."""
_PATIENCE_SECONDS = 0.2
"""A copy that takes this long is not repeated, and larger sizes are not tried."""


class OpensLanes(Protocol):
    """The part of a driver that `measure_link` needs."""

    def open_lane(self, regions: Mapping[int, Region]) -> Lane:
        """Open a lane of `regions`."""
        ...


class LinkTables(NamedTuple):
    """The measured times of a link: each direction alone, and whether both overlap."""

    copy_out: LinkTable
    """Times of single copies of each size; `copy_in` likewise."""
    copy_in: LinkTable
    duplex: bool
    """Whether both directions run at full rate at the same time."""


def measure_link(driver: OpensLanes, largest_nbytes: int = _NBYTES[-1]) -> LinkTables:
    """Time single copies of 64 KiB to 64 MiB, or to `largest_nbytes`, in both directions.

    This takes a second or two. Once a copy takes 0.2 s, larger sizes are left out. The first copy
    to a place counts only if there is no time for a second one, because a disk takes several times
    as long for it as for the later ones, which are what steps make. Raises `SpillError` if the
    outer tier has no room for the copies.
    """
    sizes = [n for n in _NBYTES if n <= largest_nbytes] or [_NBYTES[0]]
    lane = driver.open_lane(
        {n: Region(sum(sizes[:i]), n, torch.uint8, (n,), (1,)) for i, n in enumerate(sizes)}
    )
    copy_out: list[tuple[int, float]] = []
    copy_in: list[tuple[int, float]] = []
    try:
        for nbytes in sizes:
            probe = _Probe(lane, nbytes)
            copy_out.append((nbytes, _median_seconds(probe.copy_out)))
            copy_in.append((nbytes, _median_seconds(probe.copy_in)))
            if max(copy_out[-1][1], copy_in[-1][1]) > _PATIENCE_SECONDS:
                break
        alone = copy_out[-1][1], copy_in[-1][1]
        # The threshold is halfway between perfect overlap (the slower copy) and none (the sum).
        duplex = _median_seconds(probe.copy_both) < (max(alone) + sum(alone)) / 2
    finally:
        lane.close()
    return LinkTables(tuple(copy_out), tuple(copy_in), duplex)


def fit_link(table: LinkTable) -> Link:
    """Fit a latency and a rate to `table`: least squares of the relative errors.

    Copies for which the clock showed no time are left out, if it showed some for others.
    """
    timed = [(n, s) for n, s in table if s > 0] or [(n, _LEAST_SECONDS) for n, _ in table]
    weights = [1 / seconds**2 for _, seconds in timed]
    total = sum(weights)
    mean_nbytes = sum(w * n for w, (n, _) in zip(weights, timed, strict=True)) / total
    mean_seconds = sum(w * s for w, (_, s) in zip(weights, timed, strict=True)) / total
    rows = [
        (w, n - mean_nbytes, s - mean_seconds) for w, (n, s) in zip(weights, timed, strict=True)
    ]
    variance = sum(w * n * n for w, n, _ in rows)
    slope = sum(w * n * s for w, n, s in rows) / variance if variance else 0.0
    latency = mean_seconds - slope * mean_nbytes
    if slope <= 0 or latency < 0:  # noise, or a single size: no latency
        return Link(sum(n / s for n, s in timed) / len(timed))
    return Link(1 / slope, latency)


class _Probe:
    """Copies of `nbytes` bytes through the region whose key is `nbytes`."""

    def __init__(self, lane: Lane, nbytes: int) -> None:
        self.lane, self.region = lane, nbytes
        self.source = torch.ones(nbytes, dtype=torch.uint8, device="cpu")

    def copy_out(self) -> None:
        self.lane.wait(self.lane.copy_out(self.source, self.region))

    def copy_in(self) -> None:
        self.lane.wait(self.lane.copy_in(self.region)[1])

    def copy_both(self) -> None:
        away = self.lane.copy_out(self.source, self.region)
        _, back = self.lane.copy_in(self.region)
        self.lane.wait(away)
        self.lane.wait(back)


def _median_seconds(copy: Callable[[], None]) -> float:
    """Median time of `copy`, called until its time is used up. The first call is a warm-up."""
    first = _seconds(copy)
    times: list[float] = []
    while first < _PATIENCE_SECONDS and (
        len(times) < _FEWEST_REPEATS
        or (len(times) < _MOST_REPEATS and first + sum(times) < _ENOUGH_SECONDS)
    ):
        times.append(_seconds(copy))
    return statistics.median(times or [first])


def _seconds(copy: Callable[[], None]) -> float:
    """Wall-clock time of one call of `copy`."""
    start = time.perf_counter()
    copy()
    return time.perf_counter() - start
