"""What a host has no room for: to the disk and back, by way of buffers and worker threads."""

from __future__ import annotations

import errno
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from outcore import Backend
from outcore.errors import HostMemoryError, InfeasibleError, SpillError
from outcore.execute import lane as lanes
from outcore.execute.driver import Region
from outcore.execute.queued import QueuedDriver
from outcore.execute.staged import NOTHING, StagedLane
from outcore.ir.hardware import STAGING_BUFFERS, Tier
from outcore.runtime import engine as runtime
from tests.cpu.queues import LateDevice, RaceError
from tests.cpu.test_queued import Queued, on_tiers
from tests.cpu.training import (
    PROFILED_STEPS,
    Small,
    batch,
    mean_square,
    same,
    small_reference,
    train,
)

COUNT = 1000
NBYTES = 4 * COUNT
ROOM = 4096


def on_disk(number: int) -> Region:
    return Region(ROOM * number, NBYTES, torch.float32, (COUNT,), (1,), Tier.DISK)


def filled(value: float) -> torch.Tensor:
    return torch.full((COUNT,), float(value))


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[QueuedDriver]:
    driver = QueuedDriver(LateDevice(), tmp_path)
    yield driver
    driver.close()


def test_bytes_go_to_the_disk_and_come_back(driver: QueuedDriver) -> None:
    lane = driver.open_lane({n: on_disk(n) for n in range(6)})
    for number in range(6):  # more than there are buffers
        lane.wait(lane.copy_out(filled(number), number))
    for number in reversed(range(6)):
        tensor, back = lane.copy_in(number)
        lane.wait(back)
        assert torch.equal(tensor, filled(number))
    lane.close()


def test_a_place_serves_a_second_time(driver: QueuedDriver) -> None:
    """The second copy to a place comes after the copy from there, as the Program says."""
    lane = driver.open_lane({0: on_disk(0), 1: on_disk(0)})
    lane.wait(lane.copy_out(filled(1), 0))
    first, back = lane.copy_in(0)
    away = lane.copy_out(filled(2), 1, back)
    second, again = lane.copy_in(1, away)
    lane.wait(back)
    lane.wait(again)
    assert torch.equal(first, filled(1))
    assert torch.equal(second, filled(2))
    lane.close()


def test_a_wait_is_one_for_all_that_comes_before(driver: QueuedDriver) -> None:
    """Copies of one stream run in order: whoever waits for the last has waited for the others."""
    near = Region(0, NBYTES, torch.float32, (COUNT,), (1,))
    lane = driver.open_lane({0: on_disk(0), 1: near})
    for number in (0, 1):
        lane.wait(lane.copy_out(filled(number + 1), number))
    slow, _ = lane.copy_in(0)
    fast, last = lane.copy_in(1)
    lane.wait(last)
    assert torch.equal(slow, filled(1))
    assert torch.equal(fast, filled(2))
    lane.close()


def test_device_memory_is_free_once_its_bytes_are_on_the_host(driver: QueuedDriver) -> None:
    device = driver.device
    assert isinstance(device, LateDevice)
    lane = driver.open_lane({0: on_disk(0)})
    tensor = filled(1)
    handle = lane.copy_out(tensor, 0)
    lane.wait(handle)
    del tensor
    device.check_given_back()
    lane.close()


def test_a_closed_lane_drops_what_is_under_way(driver: QueuedDriver) -> None:
    for _ in range(20):
        lane = driver.open_lane({n: on_disk(n) for n in range(4)})
        for number in range(4):
            lane.wait(lane.copy_out(filled(number), number))
        lane.copy_in(0)
        lane.copy_in(1)
        lane.close()
        lane.close()
    driver.drain()
    assert isinstance(driver.device, LateDevice)
    driver.device.check_given_back()


def test_buffers_count_as_host_memory(tmp_path: Path) -> None:
    driver = QueuedDriver(LateDevice(), tmp_path)
    driver.hardware({Tier.DEVICE: 1 << 20, Tier.HOST: STAGING_BUFFERS * NBYTES})
    driver.open_lane({0: on_disk(0)}).close()
    assert driver.slabs.taken_bytes == STAGING_BUFFERS * NBYTES
    near = Region(0, 512, torch.float32, (128,), (1,))
    with pytest.raises(HostMemoryError, match="budget"):
        driver.open_lane({0: on_disk(0), 1: near})
    driver.close()


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_failing_disk_is_told_where_the_bytes_are_needed(
    driver: QueuedDriver, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def failing(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    lane = driver.open_lane({0: on_disk(0)})
    monkeypatch.setattr(os, call, failing)
    lane.wait(lane.copy_out(filled(1), 0))
    _, back = lane.copy_in(0)
    with pytest.raises(SpillError, match="Input/output error"):
        lane.wait(back)
    lane.close()
    monkeypatch.undo()
    again = driver.open_lane({0: on_disk(0)})
    again.wait(again.copy_out(filled(3), 0))
    tensor, back = again.copy_in(0)
    again.wait(back)
    assert torch.equal(tensor, filled(3))
    again.close()


FAULTS = {
    "the host does not wait for the device": (LateDevice, "attend", lambda *_: None),
    "nothing comes before anything": (StagedLane, "learn", lambda *_: NOTHING),
    "queues do not wait for workers": (StagedLane, "settle", lambda *_: None),
    "nothing waits for a copy": (lanes.QueuedLane, "_order", lambda *_: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_kind_of_wait_is_needed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Queued("swap-all")
    expected = trained.step()
    program = on_tiers(trained.program, Tier.DISK, Tier.HOST)
    write = os.pwritev

    def slowly(*args: Any) -> int:
        time.sleep(0.02)
        return write(*args)

    monkeypatch.setattr(os, "pwritev", slowly)
    got, _ = trained.queued_step(program=program)
    assert same([got], [expected])
    monkeypatch.setattr(*FAULTS[fault])
    try:
        got, _ = trained.queued_step(program=program)
    except (RaceError, SpillError, AssertionError):
        return
    assert not same([got], [expected])


class TestTraining:
    """A whole run on a device of queues, whose host has too little."""

    STEPS = PROFILED_STEPS + 3

    def train(
        self, monkeypatch: pytest.MonkeyPatch, **options: object
    ) -> tuple[list[list[torch.Tensor]], Backend]:
        gc.collect()
        torch._dynamo.reset()
        monkeypatch.setattr(
            runtime, "open_driver", lambda _, folder, __: QueuedDriver(LateDevice(), folder)
        )
        torch.manual_seed(0)
        module: nn.Module = Small()
        backend = Backend(**options)  # type: ignore[arg-type]  # options by name
        call = torch.compile(module, backend=backend)
        return train(module, call, [batch(0)], mean_square, self.STEPS), backend

    def test_what_the_host_has_no_room_for_goes_to_the_disk(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = small_reference(self.STEPS)
        seen, backend = self.train(
            monkeypatch,
            budget="2MiB",
            policy="swap-all",
            host_budget="1MiB",
            spill_dir=tmp_path,
        )
        assert same(seen, expected)
        assert backend.engine is not None
        planned = backend.engine.graphs[0].planned
        assert planned is not None
        taken = {tier: planned.predicted.peak(tier) for tier in Tier}
        assert taken[Tier.DISK] > 0
        assert taken[Tier.HOST] <= 1 << 20
        assert backend.report().state == "planned"

    def test_a_folder_that_is_missing_is_named_beside_what_is_needed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(InfeasibleError) as caught:
            self.train(
                monkeypatch,
                budget="2MiB",
                policy="swap-all",
                host_budget="64KiB",
                disk_budget="1GiB",
                spill_dir=tmp_path / "missing",
            )
        assert "missing" in "".join(caught.value.__notes__)
