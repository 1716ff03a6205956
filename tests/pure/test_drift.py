"""drift: when planned steps count as off, and the links that timed copies imply."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.ir.hardware import Hardware, Link, Tier
from outcore.runtime.graphs.drift import (
    DRIFT,
    WARM_UP_STEPS,
    WATCHED_STEPS,
    Drift,
    DriftWatch,
    as_measured,
)
from outcore.runtime.graphs.status import GraphStatus

OUT, IN = (Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE)
seconds = st.floats(1e-6, 1e3)
copies = st.lists(st.tuples(st.integers(1, 1 << 30), seconds), min_size=1, max_size=20)


def machine(*links):
    capacity = ((Tier.DEVICE, 1 << 30), (Tier.HOST, 1 << 30), (Tier.DISK, 1 << 30))
    return Hardware("a test's", capacity, links)


@pytest.mark.parametrize(
    ("predicted", "measured", "off"),
    [
        (1.0, 1.0, False),
        (1.0, 1.25, False),
        (1.0, 1.26, True),
        (1.0, 0.75, False),
        (1.0, 0.74, True),
        (4.0, 5.1, True),
        (0.0, 0.0, False),
        (0.0, 1e-9, True),
    ],
)
def test_a_quarter_either_way(predicted, measured, off):
    assert Drift(predicted, measured, 16).beyond(DRIFT) == off


@given(predicted=seconds, measured=st.floats(0, 1e6))
def test_without_a_margin_nothing_is_off(predicted, measured):
    assert not Drift(predicted, measured, 16).beyond(None)


@given(predicted=seconds, measured=seconds, scale=st.sampled_from([2.0**-20, 0.5, 4.0, 2.0**20]))
def test_the_unit_of_time_does_not_matter(predicted, measured, scale):
    drift = Drift(predicted, measured, 16)
    scaled = Drift(predicted * scale, measured * scale, 16)
    assert drift.beyond(DRIFT) == scaled.beyond(DRIFT)


def test_text():
    assert str(Drift(2.0, 2.84, 16)) == "measured 1.42x the prediction over 16 steps"
    assert "much more than the prediction" in str(Drift(0.0, 1.0, 16))
    assert math.isinf(Drift(0.0, 1.0, 16).ratio)


def test_a_watch_looks_once_warm_and_then_now_and_then():
    watch = DriftWatch()
    due = [steps for steps in range(100) if watch.due(steps)]
    first = WARM_UP_STEPS + WATCHED_STEPS + 1
    assert due == list(range(first, 100, WATCHED_STEPS))


def test_a_watch_asks_once_per_step():
    watch = DriftWatch()
    steps = WARM_UP_STEPS + WATCHED_STEPS + 1
    assert [watch.due(steps) for _ in range(3)] == [True, False, False]


def test_a_watch_that_looks_late_waits_as_long_again():
    watch = DriftWatch()
    assert watch.due(1000)
    assert not watch.due(1000 + WATCHED_STEPS - 1)
    assert watch.due(1000 + WATCHED_STEPS)


def test_each_direction_by_itself():
    out, into = Link(100.0, 1.0), Link(100.0, 1.0)
    disk = (Tier.DISK, Tier.DEVICE, Link(7.0))
    before = machine((*OUT, out), (*IN, into), disk)
    # Predicted: 2 s and 3 s. Together they took 10 s.
    after = as_measured(before, {OUT: [(100, 3.0), (200, 7.0)], IN: []})
    assert after.link(*OUT) == Link(50.0, 2.0)
    assert after.link(*IN) == into
    assert after.links[2] == disk
    assert after.capacity_bytes == before.capacity_bytes


@given(rate=st.floats(1.0, 1e12), latency=st.floats(0.0, 1.0), pairs=copies)
def test_all_copies_take_in_sum_what_they_took(rate, latency, pairs):
    after = as_measured(machine((*OUT, Link(rate, latency))), {OUT: pairs}).link(*OUT)
    predicted = sum(after.seconds(nbytes) for nbytes, _ in pairs)
    assert predicted == pytest.approx(sum(took for _, took in pairs))


@given(rate=st.floats(1.0, 1e12), latency=st.floats(0.0, 1.0), sizes=st.lists(st.integers(0, 99)))
def test_copies_that_took_what_was_predicted_change_nothing(rate, latency, sizes):
    link = Link(rate, latency)
    pairs = [(nbytes, link.seconds(nbytes)) for nbytes in sizes]
    assert as_measured(machine((*OUT, link)), {OUT: pairs}).link(*OUT) == link


def test_copies_without_times_change_nothing():
    before = machine((*OUT, Link(100.0, 1.0)))
    assert as_measured(before, {OUT: [(100, 0.0)], IN: [(100, 1.0)]}) == before


class Interrupting:
    """A clock during whose calls the training thread notes another step."""

    def __init__(self, status):
        self.status = status

    def seconds(self, start, stop):
        self.status.times.note(((0, 1), (2, 3)))
        self.status.history.came_back(self.status.times.steps, 0)
        return stop - start

    def come(self, _):
        return True


def test_times_are_asked_while_steps_go_on():
    status = GraphStatus()
    for step in range(WATCHED_STEPS):
        status.times.note(((0, 1), (2, 3)))
        status.history.came_back(step, 0)
    clock: Any = Interrupting(status)
    assert status.times.seconds(clock) == 2
    assert status.drift(clock, WATCHED_STEPS) is None, "there is no plan"
