"""The link to the disk: its throttle, and how it is measured."""

import os
import time
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outcore.errors import SpillError
from outcore.execute import link_tables
from outcore.execute.cpu import COPY_IN_OVERHEAD_BYTES, CpuDriver
from outcore.execute.disk import FILE_BLOCK_BYTES, region_nbytes
from outcore.execute.driver import CopySpan
from outcore.execute.link import FileRoom, Throttle
from outcore.ir.hardware import Tier
from tests.cpu.ending import closes_before_each_job, ends
from tests.cpu.storages import regions_of


class FakeTime:
    """A clock that only sleep and work advance; sleeps may take too long."""

    def __init__(self, oversleep_seconds: float = 0.0) -> None:
        self.now, self.oversleep_seconds = 100.0, oversleep_seconds

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds <= 0.0201
        self.now += seconds + self.oversleep_seconds


@pytest.mark.parametrize("oversleep_seconds", [0.0, 0.003])
@pytest.mark.parametrize("work_seconds", [0.0, 0.005])
@given(rate=st.floats(1e6, 1e9), sizes=st.lists(st.integers(1, 30_000_000), min_size=1, max_size=5))
def test_a_throttled_link_takes_its_time(oversleep_seconds, work_seconds, rate, sizes):
    fake = FakeTime(oversleep_seconds)
    throttle = Throttle(rate, lambda: fake.now, fake.sleep)
    issued = fake.now
    for nbytes in sizes:
        throttle.begin(issued)
        for left in range(nbytes, 0, -throttle.chunk_bytes):
            share = min(left, throttle.chunk_bytes)
            fake.now += work_seconds * share / throttle.chunk_bytes * min(1, rate / 4e8)
            throttle.moved(share)
    ideal = sum(sizes) / rate
    taken = fake.now - issued
    assert taken >= ideal * 0.999
    assert taken <= max(ideal, 0.1) * 1.05 + oversleep_seconds


def test_an_idle_link_saves_nothing_up():
    fake = FakeTime()
    throttle = Throttle(1e6, lambda: fake.now, fake.sleep)
    for _ in range(3):
        fake.now += 50
        start = fake.now
        throttle.begin(start)
        throttle.moved(16_000)
        assert fake.now - start == pytest.approx(0.016)


def test_a_stalled_disk_earns_a_small_credit_only():
    fake = FakeTime()
    throttle = Throttle(1e6, lambda: fake.now, fake.sleep)
    throttle.begin(fake.now)
    fake.now += 10
    start = fake.now
    for _ in range(100):
        throttle.moved(10_000)
    assert fake.now - start >= 0.94


def test_a_link_without_limit_never_sleeps():
    def never(seconds: float) -> None:
        raise AssertionError(seconds)

    Throttle(None, lambda: 0.0, never).moved(1 << 40)


def test_chunks_are_whole_blocks_and_short_in_time():
    for rate in (1.0, 1e5, 150 * 2**20, 1e12):
        chunk_bytes = Throttle(rate).chunk_bytes
        assert chunk_bytes % FILE_BLOCK_BYTES == 0
        assert chunk_bytes == FILE_BLOCK_BYTES or chunk_bytes / rate <= 0.02


def test_the_driver_throttles_each_direction(tmp_path):
    driver = CpuDriver(tmp_path, link_bytes_per_second=float(40 << 20))
    spans: list[CopySpan] = []
    tensor = torch.randn(1 << 20)
    lane = driver.open_lane(regions_of(tensor, tensor))
    lane.wait(lane.copy_out(tensor, 0))
    driver.record(spans.append)
    issued = time.perf_counter()
    out = lane.copy_out(tensor, 1)
    _, back = lane.copy_in(0)
    lane.wait(out)
    lane.wait(back)
    assert len(spans) == 2
    for span in spans:  # a busy machine takes longer; none may be faster
        assert span.stop_seconds - issued >= 0.1
    lane.close()
    driver.close()


def test_a_lane_that_is_lost_gives_its_room_back(tmp_path):
    """As if an interrupt came between opening it and whoever would close it."""
    driver = CpuDriver(tmp_path)
    tensor = torch.randn(1 << 16)
    files = []
    for _ in range(3):
        lane = driver.open_lane(regions_of(tensor))
        assert isinstance(lane, FileRoom)
        lane.copy_out(tensor, 0)
        files.append((lane.file, lane.file.nbytes))
        del lane
    assert len(set(files)) == 1
    driver.close()


def test_a_throttled_link_measures_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr(link_tables, "_NBYTES", (1 << 16, 1 << 20, 1 << 24, 64 << 20))
    rate = float(64 << 20)
    driver = CpuDriver(tmp_path, link_bytes_per_second=rate)
    tables = link_tables.measure_link(driver)
    for table in (tables.copy_out, tables.copy_in):
        assert table[-1][0] < 64 << 20  # 64 MiB would take a second
        assert all(seconds >= nbytes / rate for nbytes, seconds in table)
    driver.close()


def test_the_hardware_is_ram_and_disk(driver):
    hardware = driver.hardware({Tier.DEVICE: 1 << 20, Tier.DISK: 2 << 30})
    for link in (
        hardware.link(Tier.DEVICE, Tier.DISK),
        hardware.link(Tier.DISK, Tier.DEVICE),
    ):
        assert link.bytes_per_second > 0
    assert (hardware.capacity(Tier.DEVICE), hardware.capacity(Tier.DISK)) == (1 << 20, 2 << 30)
    assert hardware.slot_bytes(Tier.DEVICE, 100, copied=True) == 100 + COPY_IN_OVERHEAD_BYTES
    assert hardware.slot_bytes(Tier.DISK, 5000, copied=False) == region_nbytes(5000)


def test_a_trial_stays_inside_the_disk_budget(driver, monkeypatch):
    allocate, ends = os.posix_fallocate, []

    def counted(fd, offset, nbytes):
        ends.append(offset + nbytes)
        allocate(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", counted)
    driver.hardware({Tier.DEVICE: 1 << 30, Tier.DISK: 4 << 20})
    assert 1 << 20 < max(ends) <= 4 << 20


def test_measuring_covers_the_sizes_asked_for(driver):
    tables = link_tables.measure_link(driver, largest_nbytes=1 << 20)
    for table in (tables.copy_out, tables.copy_in):
        assert [nbytes for nbytes, _ in table] == [1 << 16, 1 << 18, 1 << 20]
        assert all(seconds > 0 for _, seconds in table)


@given(
    rate=st.floats(1e6, 1e11),
    latency=st.floats(0, 1e-2),
    sizes=st.lists(st.integers(1, 26), min_size=2, unique=True),
)
def test_a_linear_link_is_fitted_exactly(rate, latency, sizes):
    table = tuple((1 << s, latency + (1 << s) / rate) for s in sorted(sizes))
    link = link_tables.fit_link(table)
    for nbytes, seconds in table:
        assert link.seconds(nbytes) == pytest.approx(seconds, rel=0.02)


def test_a_table_without_a_trend_still_gives_a_link():
    assert link_tables.fit_link(((1000, 1.0),)).bytes_per_second == 1000
    link = link_tables.fit_link(((1000, 2.0), (4000, 1.0)))
    assert link.bytes_per_second > 0
    assert link.latency_seconds == 0


def test_a_clock_may_show_no_time_for_small_copies():
    link = link_tables.fit_link(((1000, 0.0), (1 << 20, 0.1)))
    assert link.seconds(1 << 20) == pytest.approx(0.1, rel=0.01)
    assert link_tables.fit_link(((1000, 0.0),)).seconds(1000) < 1e-6


def test_a_driver_closed_in_the_middle_of_a_drain_does_not_hang(
    driver: CpuDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a signal's handler, which runs on the thread that drains."""
    driver.reserve({Tier.DISK: 1})
    assert driver._spill is not None
    closes_before_each_job(driver._spill, "out", monkeypatch)
    assert ends(driver.drain)


@pytest.mark.parametrize("queue", ["out", "into"])
def test_a_driver_closed_as_a_copy_is_issued_does_not_hang(
    driver: CpuDriver, monkeypatch: pytest.MonkeyPatch, queue: str
) -> None:
    tensor = torch.ones(10)
    regions = regions_of(tensor)
    driver.open_lane(regions).close()
    assert driver._spill is not None
    closes_before_each_job(driver._spill, queue, monkeypatch)
    lane = driver.open_lane(regions)

    def step() -> None:
        with suppress(SpillError):
            lane.wait(lane.copy_out(tensor, 0))
            lane.wait(lane.copy_in(0)[1])

    assert ends(step)
    lane.close()
