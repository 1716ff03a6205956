"""Copies between a device with queues and the disk, by host buffers and worker threads."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partialmethod
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from outcore import Backend
from outcore.errors import HostMemoryError, InfeasibleError, SpillError
from outcore.execute import lane as lanes
from outcore.execute import staged
from outcore.execute.disk import SpillFile
from outcore.execute.driver import Region
from outcore.execute.handles import NOTHING
from outcore.execute.queued import QueuedDriver
from outcore.execute.staged import StagedLane
from outcore.ir.hardware import STAGING_BUFFERS, Tier, staging_bytes
from outcore.ir.memory import staging_needed
from outcore.runtime.budget import engine as runtime
from tests.cpu.ending import closes_before_each_job, ends, ends_in_a_fork, workers, workers_end
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


def test_nothing_goes_to_the_disk_and_comes_back(driver: QueuedDriver) -> None:
    lane = driver.open_lane({0: Region(0, 0, torch.float32, (0, 3), (3, 1), Tier.DISK)})
    lane.wait(lane.copy_out(torch.empty(0, 3), 0))
    tensor, back = lane.copy_in(0)
    lane.wait(back)
    assert tensor.shape == (0, 3)
    lane.close()


def test_a_place_serves_a_second_time(driver: QueuedDriver) -> None:
    """The second copy out to a place comes after the copy in from it, as the Program says."""
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


def test_what_could_not_be_written_is_not_read(
    driver: QueuedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = driver.open_lane({0: on_disk(0), 1: on_disk(1)})
    for number in (0, 1):  # bytes of an earlier time
        lane.wait(lane.copy_out(filled(-1), number))
    driver.drain()
    write, calls = SpillFile.write, count()

    def fail_once(*args: Any) -> Iterator[int]:
        if next(calls) == 0:
            raise OSError(errno.EIO, "Input/output error")
        yield from write(*args)

    monkeypatch.setattr(SpillFile, "write", fail_once)
    for number in (0, 1):
        lane.wait(lane.copy_out(filled(number), number))
    tensor, back = lane.copy_in(1)
    lane.wait(back)
    assert torch.equal(tensor, filled(1))
    _, back = lane.copy_in(0)
    with pytest.raises(SpillError, match="Input/output error"):
        lane.wait(back)
    lane.close()


def test_a_wait_is_one_for_all_that_comes_before(driver: QueuedDriver) -> None:
    """Copies of one stream run in order: waiting for the last one is enough for the others."""
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


def test_device_memory_is_free_once_its_bytes_are_on_the_host(
    driver: QueuedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk still writes them then."""
    device, going_on = driver.device, threading.Event()
    assert isinstance(device, LateDevice)
    write = os.pwritev

    def late(*args: Any) -> int:
        assert going_on.wait(10)
        return write(*args)

    lane = driver.open_lane({0: on_disk(0)})
    monkeypatch.setattr(os, "pwritev", late)
    tensor = filled(1)
    memory = StorageWeakRef(tensor.untyped_storage())
    handle = lane.copy_out(tensor, 0)
    lane.wait(handle)
    del tensor
    assert memory.expired()
    device.check_given_back()
    going_on.set()
    lane.close()


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
def test_a_closed_lane_drops_what_is_under_way(driver: QueuedDriver) -> None:
    memories = []
    for _ in range(20):
        lane = driver.open_lane({n: on_disk(n) for n in range(4)})
        for number in range(4):
            lane.wait(lane.copy_out(filled(number), number))
        for number in (0, 1):
            tensor, _ = lane.copy_in(number)
            memories.append(StorageWeakRef(tensor.untyped_storage()))
            del tensor
        lane.close()
        lane.close()
    del lane
    driver.drain()
    assert isinstance(driver.device, LateDevice)
    driver.device.check_given_back()
    assert all(memory.expired() for memory in memories)
    room = 4 * ROOM
    assert driver._disk is not None
    assert driver._disk.spill.file.nbytes <= 2 * room  # the space of closed lanes is reused
    assert not driver._disk.lanes


def test_a_second_backward_finds_the_bytes_again(driver: QueuedDriver) -> None:
    lane = driver.open_lane({n: on_disk(n) for n in range(3)})
    for number in range(3):
        lane.wait(lane.copy_out(filled(number), number))
    for _ in range(2):
        for number in reversed(range(3)):
            tensor, back = lane.copy_in(number)
            lane.wait(back)
            assert torch.equal(tensor, filled(number))
    lane.close()


def test_lanes_at_once_share_buffers_and_nothing_else(driver: QueuedDriver) -> None:
    lanes = [driver.open_lane({n: on_disk(n) for n in range(3)}) for _ in range(3)]
    for number in range(3):
        for which, lane in enumerate(lanes):
            lane.wait(lane.copy_out(filled(10 * which + number), number))
    assert driver.slabs.taken_bytes == staging_bytes(NBYTES)
    for number in reversed(range(3)):
        for which, lane in enumerate(lanes):
            tensor, back = lane.copy_in(number)
            lane.wait(back)
            assert torch.equal(tensor, filled(10 * which + number))
    for lane in lanes:
        lane.close()


def test_larger_buffers_take_the_place_of_smaller_ones(driver: QueuedDriver) -> None:
    first = driver.open_lane({0: on_disk(0)})
    first.wait(first.copy_out(filled(1), 0))
    large = Region(0, 4 * NBYTES, torch.float32, (4 * COUNT,), (1,), Tier.DISK)
    second = driver.open_lane({0: large})
    second.wait(second.copy_out(torch.full((4 * COUNT,), 2.0), 0))
    assert driver.slabs.taken_bytes == staging_bytes(4 * NBYTES)
    for lane, expected in ((first, filled(1)), (second, torch.full((4 * COUNT,), 2.0))):
        tensor, back = lane.copy_in(0)
        lane.wait(back)
        assert torch.equal(tensor, expected)
        lane.close()
    driver.reserve({Tier.DISK: ROOM})  # the next plan's replace the last one's
    assert driver.slabs.taken_bytes == 0


LARGE = Region(0, 4 * NBYTES, torch.float32, (4 * COUNT,), (1,), Tier.DISK)


def test_smaller_buffers_are_gone_when_larger_ones_are_made(
    driver: QueuedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has no room for both, even if a lane that used the smaller ones is still open."""
    device = driver.device
    assert isinstance(device, LateDevice)
    first = driver.open_lane({0: on_disk(0)})
    first.wait(first.copy_out(filled(1), 0))
    first.wait(first.copy_in(0)[1])
    small, host, alive = list(device.hosts), device.host, []

    def counted(nbytes: int) -> torch.Tensor:
        alive.append(sum(not each.expired() for each in small))
        return host(nbytes)

    monkeypatch.setattr(device, "host", counted)
    second = driver.open_lane({0: LARGE})
    assert len(small) == STAGING_BUFFERS
    assert alive == [0] * STAGING_BUFFERS
    second.wait(second.copy_out(torch.full((4 * COUNT,), 2.0), 0))
    for lane, expected in ((second, torch.full((4 * COUNT,), 2.0)), (first, filled(1))):
        tensor, back = lane.copy_in(0)
        lane.wait(back)
        assert torch.equal(tensor, expected)
        lane.close()
    assert driver.slabs.taken_bytes == staging_bytes(4 * NBYTES)


@pytest.mark.parametrize("made", range(STAGING_BUFFERS))
def test_without_memory_for_larger_buffers_an_open_lane_goes_on(
    driver: QueuedDriver, monkeypatch: pytest.MonkeyPatch, made: int
) -> None:
    first = driver.open_lane({0: on_disk(0)})
    first.wait(first.copy_out(filled(1), 0))
    host, calls = driver.device.host, count()

    def refused(nbytes: int) -> torch.Tensor:
        if next(calls) == made:
            raise HostMemoryError(reason="refused", needed_bytes=nbytes)
        memory: torch.Tensor = host(nbytes)
        return memory

    with monkeypatch.context() as patch:
        patch.setattr(driver.device, "host", refused)
        with pytest.raises(HostMemoryError, match="refused"):
            driver.open_lane({0: LARGE})
    tensor, back = first.copy_in(0)
    first.wait(back)
    assert torch.equal(tensor, filled(1))
    first.close()
    assert driver.slabs.taken_bytes == staging_bytes(NBYTES)


@pytest.mark.parametrize("at", range(1, 5))
@pytest.mark.parametrize("method", ["record", "wait", "copy"])
def test_an_interrupt_loses_no_buffer(
    driver: QueuedDriver, monkeypatch: pytest.MonkeyPatch, method: str, at: int
) -> None:
    """After more interrupts than there are buffers, the next steps still have all of them."""
    monkeypatch.setattr(staged, "_LOST_SECONDS", 0.05)
    device, compute = driver.device, threading.current_thread()
    call = getattr(device, method)
    for _ in range(STAGING_BUFFERS):
        lane = driver.open_lane({0: on_disk(0)})
        calls = count(1)

        def interrupted(*args: Any, calls: Iterator[int] = calls) -> None:
            if threading.current_thread() is compute and next(calls) == at:
                raise KeyboardInterrupt
            call(*args)

        with monkeypatch.context() as patch:
            patch.setattr(device, method, interrupted)
            with contextlib.suppress(KeyboardInterrupt):
                lane.wait(lane.copy_out(filled(1), 0))
                lane.wait(lane.copy_in(0)[1])
        lane.close()
    test_bytes_go_to_the_disk_and_come_back(driver)


def test_a_lane_lost_to_an_interrupt_keeps_no_buffers(
    driver: QueuedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(driver.device, "event", interrupted)  # the lane is half made
        with pytest.raises(KeyboardInterrupt):
            driver.open_lane({0: on_disk(0)})
    gc.collect()
    driver.reserve({Tier.DISK: ROOM})
    assert driver.slabs.taken_bytes == 0
    test_bytes_go_to_the_disk_and_come_back(driver)


def test_a_copy_from_the_host_interrupted_beside_a_disk_is_waited_for(
    driver: QueuedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = Region(0, NBYTES, torch.float32, (COUNT,), (1,))
    lane = driver.open_lane({0: on_disk(0), 1: near})
    lane.wait(lane.copy_out(filled(1), 1))
    device = driver.device
    assert isinstance(device, LateDevice)
    copy = device.copy

    def interrupted(*args: Any) -> None:
        copy(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(device, "copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lane.copy_in(1)
    lane.close()
    device.check_given_back()


def test_buffers_count_as_host_memory(tmp_path: Path) -> None:
    driver = QueuedDriver(LateDevice(), tmp_path)
    room = staging_bytes(NBYTES)
    driver.hardware({Tier.DEVICE: 1 << 20, Tier.HOST: room})
    driver.open_lane({0: on_disk(0)}).close()
    assert driver.slabs.taken_bytes == room
    near = Region(0, 512, torch.float32, (128,), (1,))
    with pytest.raises(HostMemoryError, match="budget"):
        driver.open_lane({0: on_disk(0), 1: near})
    driver.close()


def test_slabs_that_nobody_uses_make_way_for_buffers(tmp_path: Path) -> None:
    driver = QueuedDriver(LateDevice(), tmp_path)
    driver.hardware({Tier.DEVICE: 1 << 20, Tier.HOST: staging_bytes(NBYTES)})
    driver.open_lane({0: Region(0, NBYTES, torch.float32, (COUNT,), (1,))}).close()
    driver.open_lane({0: on_disk(0)}).close()
    assert driver.slabs.taken_bytes == staging_bytes(NBYTES)
    driver.close()


def test_buffers_that_cannot_be_had_are_not_counted(
    driver: QueuedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: int) -> torch.Tensor:
        raise HostMemoryError(reason="refused", needed_bytes=1)

    with monkeypatch.context() as patch:
        patch.setattr(driver.device, "host", refused)
        with pytest.raises(HostMemoryError, match="refused"):
            driver.open_lane({0: on_disk(0)})
    assert driver.slabs.taken_bytes == 0
    test_bytes_go_to_the_disk_and_come_back(driver)


def test_a_driver_that_nobody_holds_ends_its_workers(tmp_path: Path) -> None:
    before = workers()
    driver = QueuedDriver(LateDevice(), tmp_path)
    driver.open_lane({0: on_disk(0)}).close()
    assert len(workers() - before) == 2
    alive = weakref.ref(driver)
    del driver
    gc.collect()
    assert alive() is None
    assert workers_end(before)


def test_a_closed_driver_leaves_the_disk_alone(driver: QueuedDriver) -> None:
    driver.open_lane({0: on_disk(0)}).close()
    driver.close()
    for call in (lambda: driver.reserve({Tier.DISK: 1}), lambda: driver.open_lane({0: on_disk(0)})):
        with pytest.raises(SpillError, match="closed"):
            call()


def test_a_forked_process_closes_the_driver(driver: QueuedDriver) -> None:
    driver.open_lane({0: on_disk(0)}).close()
    assert ends_in_a_fork(driver.close)
    test_bytes_go_to_the_disk_and_come_back(driver)


@pytest.mark.parametrize("queue", ["out", "into"])
def test_a_driver_closed_as_a_copy_is_issued_does_not_hang(
    driver: QueuedDriver, monkeypatch: pytest.MonkeyPatch, queue: str
) -> None:
    """As by a signal's handler, which runs on the thread that issues."""
    lane = driver.open_lane({0: on_disk(0)})
    assert driver._disk is not None
    closes_before_each_job(driver._disk.spill, queue, monkeypatch)

    def step() -> None:
        with contextlib.suppress(SpillError):
            lane.wait(lane.copy_out(filled(1), 0))
            lane.wait(lane.copy_in(0)[1])

    assert ends(step)
    lane.close()


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


@pytest.mark.parametrize("waiting", [True, False])
def test_a_buffer_is_not_taken_while_the_device_reads_it(
    driver: QueuedDriver, monkeypatch: pytest.MonkeyPatch, *, waiting: bool
) -> None:
    """Three copies back at once through two buffers; without the wait the first is overwritten."""
    lane = driver.open_lane({n: on_disk(n) for n in range(3)})
    for number in range(3):
        lane.wait(lane.copy_out(filled(number), number))
    if not waiting:
        forget = lambda self, buffer, _: self._free.put(buffer)  # noqa: E731 - it stands for a method
        monkeypatch.setattr(staged.Stages, "give", forget)
        driver.drain()
        for buffer in driver._disk.stages(1)["in"]._all:
            buffer.busy = None
    fetched = [lane.copy_in(number) for number in range(3)]
    driver._disk.spill.drain()
    for _, back in fetched:
        lane.wait(back)
    right = [torch.equal(tensor, filled(n)) for n, (tensor, _) in enumerate(fetched)]
    assert all(right) == waiting
    lane.close()


def _without_attending(self: Any, *args: Any, move: Any) -> None:
    """Do what a worker does, but without waiting for the device."""
    device = self.stages.device
    wait_on_host, device.wait_on_host = device.wait_on_host, lambda _: None
    try:
        move(self, *args)
    finally:
        device.wait_on_host = wait_on_host


FAULTS: dict[str, tuple[object, str, object]] = {
    "a worker does not wait for the device": (
        staged.SpillCopy,
        "_move",
        partialmethod(_without_attending, move=staged.SpillCopy._move),
    ),
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
    """Training on a test device with queues, whose host memory is too small."""

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
        driver = backend.engine.driver
        assert isinstance(driver, QueuedDriver)
        assert driver.slabs.taken_bytes <= 1 << 20  # including the buffers for the disk
        assert backend.report().state == "planned"
        buffers = staging_needed(planned.problem.trace, planned.plan)
        assert buffers > 0
        left = backend.engine.eviction._room_bytes(backend.engine.graphs[0], Tier.HOST)
        assert left <= (1 << 20) - taken[Tier.HOST] - buffers

    def test_a_folder_that_is_missing_is_named_beside_what_is_needed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gone = tmp_path / "missing"
        monkeypatch.setattr("outcore.runtime.settings.options.spill_folder", lambda: gone)
        with pytest.raises(InfeasibleError) as caught:
            self.train(monkeypatch, budget="2MiB", policy="swap-all", host_budget="64KiB")
        assert str(gone) in "".join(caught.value.__notes__)
