"""clock: the time of a step in PoocH's model: compute and one link in each direction.

Copies run in order. Times are floats, or arrays with one entry per variant of the step. With
arrays, planning compares the step as it is with the steps in which one target's copies need no
time, for all targets at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from outcore.policies.pooch.backward import Backward
from outcore.policies.pooch.log import Log
from outcore.policies.pooch.model import Forward, PoochModel

Times = NDArray[np.float64]
T = TypeVar("T", float, Times)
"""A time: one float, or an array with one float per variant of the step."""


@dataclass(frozen=True, slots=True)
class ForwardTimes(Generic[T]):
    """Times of a forward pass."""

    reached: list[T]
    """When compute reaches each op, then the boundary."""
    done: list[T]
    """When each copy out is done."""
    end: T
    """When compute and all copies out are done."""


def play_forward(
    log: Log, forward: Forward, copies: Sequence[T], zero: T, larger: Callable[[T, T], T]
) -> ForwardTimes[T]:
    """Simulate the forward pass. All copies out are awaited at the boundary.

    `copies` are the times of the copies out, in order of `forward.leaving`. `zero` and `larger` are
    the zero and the maximum for the type of times.
    """
    clock, channel = zero, zero
    reached: list[T] = []
    done: list[T] = []
    leaving = deque(log.targets[i].gap.after for i in forward.leaving)
    awaited = 0
    for index, (op, due) in enumerate(zip(log.forward, forward.due, strict=True)):
        reached.append(clock)
        if due > awaited:
            clock, awaited = larger(clock, done[due - 1]), due
        clock = clock + op.seconds
        while leaving and leaving[0] == index:
            leaving.popleft()
            channel = larger(clock, channel) + copies[len(done)]
            done.append(channel)
    reached.append(clock)
    return ForwardTimes(reached, done, larger(clock, channel))


@dataclass(frozen=True, slots=True)
class BackwardTimes(Generic[T]):
    """Times of a backward pass."""

    reached: list[T]
    """When compute reaches each segment."""
    done: dict[int, T]
    """Segment -> when its fetches are done, for the segments that fetch anything."""
    end: T
    """When compute is done."""


def play_backward(
    log: Log,
    seconds: Sequence[float],
    fetches: Mapping[int, T],
    slots: Sequence[int],
    zero: T,
    larger: Callable[[T, T], T],
) -> BackwardTimes[T]:
    """Simulate the backward pass: segment i waits for its fetches, which run after earlier ones.

    `fetches` are the times of the copies back, per segment that has any. `slots[i]` is the break
    point at which those of segment i are issued. `zero` and `larger` are as for `play_forward`.
    """
    clock, channel = zero + log.lead_in.seconds, zero
    reached: list[T] = []
    done: dict[int, T] = {}
    waiting = sorted(fetches, reverse=True)
    for index, more in enumerate(seconds):
        reached.append(clock)
        while waiting and slots[waiting[-1]] <= index:
            group = waiting.pop()
            done[group] = channel = larger(channel, clock) + fetches[group]
        if index in done:
            clock = larger(clock, done[index])
        clock = clock + more
    return BackwardTimes(reached, done, clock)


def waited(model: PoochModel, forward: Forward) -> list[int]:
    """Targets whose copies out were not done when they had to be, at the boundary at the latest.

    As in the published code, the last forward op counts as the boundary.
    """
    out = [model.targets[i].out_seconds for i in forward.leaving]
    times = play_forward(model.log, forward, out, 0.0, max)
    last = len(forward.due) - 1
    needed_by = [min(bisect_right(forward.due, copy), last) for copy in range(len(times.done))]
    return [
        target
        for target, done, op in zip(forward.leaving, times.done, needed_by, strict=True)
        if done >= times.reached[op]
    ]


def fetch_seconds(model: PoochModel, backward: Backward) -> dict[int, float]:
    """The times of the copies back, per segment that has any."""
    return {
        segment: sum(model.targets[i].in_seconds for i in group)
        for segment, group in enumerate(backward.fetched)
        if group
    }


def backward_seconds(model: PoochModel, backward: Backward, slots: Sequence[int]) -> float:
    """Time of the backward pass with fetches issued at `slots`."""
    fetches = fetch_seconds(model, backward)
    return play_backward(model.log, backward.seconds, fetches, slots, 0.0, max).end


def simulated_seconds(model: PoochModel, forward: Forward, backward: Backward) -> float:
    """Time of a step of these passes, with fetches issued as `compact` places them."""
    out = [model.targets[i].out_seconds for i in forward.leaving]
    there = play_forward(model.log, forward, out, 0.0, max)
    return there.end + backward_seconds(model, backward, model.compact(backward))


def step_seconds(
    model: PoochModel,
    forward: Forward,
    backward: Backward,
    slots: Sequence[int],
    free: Sequence[int],
) -> Times:
    """The step's time as it is, then, for each i, if copies of target free[i] need no time."""
    charged = 1.0 - (np.array([-1, *free]) == np.arange(len(model.targets))[:, np.newaxis])
    zero = np.zeros(len(free) + 1)
    out = [model.targets[i].out_seconds * charged[i] for i in forward.leaving]
    there = play_forward(model.log, forward, out, zero, np.maximum)
    fetches = {
        segment: sum((model.targets[i].in_seconds * charged[i] for i in group), zero)
        for segment, group in enumerate(backward.fetched)
        if group
    }
    back = play_backward(model.log, backward.seconds, fetches, slots, zero, np.maximum)
    times: Times = there.end + back.end
    return times
