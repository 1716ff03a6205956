"""QueuedDriver: the driver for devices with queues, on a test device that detects races."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from outcore.errors import HostMemoryError, VerifyError
from outcore.execute import build, queued
from outcore.execute.driver import CopySpan, EmptyLane, Region
from outcore.execute.handles import QueuedCopy
from outcore.execute.lane import QueuedLane
from outcore.execute.queued import HOST_ALIGNMENT_BYTES, QueuedDriver
from outcore.ir.hardware import Tier
from outcore.ir.plan import Offload, make_plan
from outcore.ir.program import Copy, Program, Slot
from outcore.lower import lower
from outcore.runtime.budget.eviction import Eviction
from tests.cpu.queues import LateDevice, RaceError
from tests.cpu.test_adversarial import POISONED, Trained
from tests.cpu.training import same
from tests.pure.strategies import plans

KIB = 1 << 10
TIERS = ((Tier.HOST,), (Tier.DISK,), (Tier.HOST, Tier.DISK))
BUDGETS = {Tier.DEVICE: 1 << 20, Tier.HOST: 1 << 20}
WITH_DISK = BUDGETS | {Tier.DISK: 1 << 22}


def region(offset: int, count: int) -> Region:
    return Region(offset, 4 * count, torch.float32, (count,), (1,))


def goes_and_comes(driver: QueuedDriver) -> None:
    lane = driver.open_lane({0: region(0, 100)})
    lane.wait(lane.copy_out(torch.full((100,), 2.0), 0))
    tensor, back = lane.copy_in(0)
    lane.wait(back)
    assert bool((tensor == 2).all())
    lane.close()


@pytest.fixture
def device() -> LateDevice:
    return LateDevice()


@pytest.fixture
def driver(device: LateDevice) -> QueuedDriver:
    return QueuedDriver(device)


def test_bytes_go_and_come_back(driver: QueuedDriver) -> None:
    lane = driver.open_lane({3: region(0, 100), 4: region(512, 7)})
    values = torch.arange(100.0), torch.arange(7.0)
    away = [lane.copy_out(v.clone(), r) for v, r in zip(values, (3, 4), strict=True)]
    for handle in away:
        lane.wait(handle)
    for value, (place, out) in zip(values, zip((3, 4), away, strict=True), strict=True):
        tensor, back = lane.copy_in(place, out)
        assert not torch.equal(tensor, value)  # not yet
        lane.wait(back)
        assert torch.equal(tensor, value)
    lane.close()


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_memory_is_free_when_a_later_copy_was_waited_for(tier: Tier, tmp_path: Path) -> None:
    """Programs leave out each wait that another implies."""
    driver = QueuedDriver(LateDevice(), tmp_path)
    driver.hardware(WITH_DISK)
    driver.wider_hardware(WITH_DISK)
    places = {n: replace(region(512 * n, 100), tier=tier) for n in range(3)}
    lane = driver.open_lane(places)
    values = [torch.full((100,), float(n)) for n in places]
    held = [StorageWeakRef(value.untyped_storage()) for value in values]
    away = [lane.copy_out(value, n) for n, value in enumerate(values)]
    del values
    assert [each.expired() for each in held] == [False] * 3
    lane.wait(away[1])
    assert [each.expired() for each in held] == [True, True, False]
    first, _ = lane.copy_in(0)
    second, last = lane.copy_in(1, away[2])
    back = [StorageWeakRef(each.untyped_storage()) for each in (first, second)]
    lane.wait(last)
    assert bool((first == 0).all())
    assert bool((second == 1).all())
    assert held[2].expired(), "it comes before the copy back, which is over"
    del first, second
    assert all(each.expired() for each in back)
    lane.close()


@pytest.fixture
def stray(device: LateDevice) -> Tensor:
    """A result that an op makes on the host, so that nothing is copied."""
    device.scalars_on_host = True
    return torch.tensor(3.0)


def mixed(driver: QueuedDriver) -> QueuedLane:
    lane = driver.open_lane({0: region(0, 100), 1: Region(512, 4, torch.float32, (), ())})
    assert isinstance(lane, QueuedLane)
    return lane


def test_waiting_for_what_is_on_the_host_implies_the_copies_before(
    driver: QueuedDriver, stray: Tensor
) -> None:
    lane = mixed(driver)
    for handle in (lane.copy_out(torch.full((100,), 7.0), 0), lane.copy_out(stray, 1)):
        lane.wait(handle)
    back, _ = lane.copy_in(0)
    value, last = lane.copy_in(1)
    lane.wait(last)
    assert bool((back == 7).all())
    assert value == 3
    lane.close()


def test_a_copy_back_after_what_is_on_the_host_comes_after_the_copies_before_it(
    driver: QueuedDriver, stray: Tensor
) -> None:
    lane = mixed(driver)
    lane.copy_out(torch.full((100,), 7.0), 0)
    back, last = lane.copy_in(0, lane.copy_out(stray, 1))
    lane.wait(last)
    assert bool((back == 7).all())
    lane.close()


def test_what_is_on_the_host_hands_on_what_it_comes_after(
    driver: QueuedDriver, stray: Tensor
) -> None:
    lane = mixed(driver)
    lane.copy_out(stray, 1)
    lane.copy_in(1, lane.copy_out(torch.full((100,), 7.0), 0))
    back, last = lane.copy_in(0)
    lane.wait(last)
    assert bool((back == 7).all())
    lane.close()


def test_a_root_may_have_gaps(driver: QueuedDriver) -> None:
    place = Region(0, 4 * 12, torch.float32, (2, 3), (6, 2))
    lane = driver.open_lane({0: place})
    value = torch.arange(12.0)[:12].as_strided((2, 3), (6, 2))
    lane.wait(lane.copy_out(value, 0))
    tensor, back = lane.copy_in(0)
    lane.wait(back)
    assert torch.equal(tensor, value)
    assert (tensor.shape, tensor.stride(), tensor._base) == ((2, 3), (6, 2), None)
    lane.close()


def test_what_is_on_the_host_anyway_stays_there(driver: QueuedDriver, device: LateDevice) -> None:
    """For example the seed of attention with dropout: its backward reads it on the host."""
    device.scalars_on_host = True
    place = Region(0, 8, torch.int64, (), ())
    lane = driver.open_lane({0: place, 1: region(512, 100)})
    seed = torch.tensor(7)
    lane.wait(lane.copy_out(seed, 0))
    for _ in range(2):
        tensor, back = lane.copy_in(0)
        lane.wait(back)
        assert tensor.data_ptr() == seed.data_ptr()
    assert device.copies == 0
    lane.close()
    with pytest.raises(RuntimeError, match="freed"):
        lane.copy_in(0)


def test_a_new_plan_begins_with_nothing_kept(driver: QueuedDriver, device: LateDevice) -> None:
    driver.bound_memory(int, None)
    assert device.trims == 0, "nothing is moved"
    driver.bound_memory(int, 1 << 20)
    assert device.trims == 1
    driver.bound_memory(int, 1 << 20)
    assert device.trims == 2, "what was measured meanwhile is left over"


def test_sizes_that_may_not_return_begin_with_what_is_kept(
    driver: QueuedDriver, device: LateDevice
) -> None:
    steps = [(20, 0, 1), (20, 0, 1), (20, 1, 2), (20, 1, 2), (30, 1, 3), (None, 1, 3), (30, 1, 3)]
    for bound, retried, trims in steps:
        device.retried = retried
        driver.bound_memory(int, bound, for_good=False)
        assert device.trims == trims


def test_links_are_tried_with_what_is_left(driver: QueuedDriver, device: LateDevice) -> None:
    taken: list[int] = []
    take = device.empty

    def full(nbytes: int) -> torch.Tensor:
        taken.append(nbytes)
        if nbytes > 4 << 20:
            raise torch.OutOfMemoryError("full")
        return take(nbytes)

    device.empty = full  # type: ignore[method-assign]  # full from there on
    driver.hardware({Tier.DEVICE: 1 << 31, Tier.HOST: 1 << 31})
    assert driver.links is not None
    assert max(nbytes for nbytes, _ in driver.links.alone.copy_out) <= 4 << 20
    assert taken[0] == 16 << 20  # at most a 64th of the budget


def test_memory_given_back_too_early_is_told(driver: QueuedDriver, device: LateDevice) -> None:
    lane = driver.open_lane({0: region(0, 100)})
    handle = lane.copy_out(torch.ones(100), 0)
    handle.kept = None  # as `wait` does, but without waiting
    with pytest.raises(RaceError, match="given back"):
        device.check_given_back()


def test_both_directions_at_one_region_need_an_order(driver: QueuedDriver) -> None:
    lane = driver.open_lane({0: region(0, 100)})
    lane.copy_out(torch.ones(100), 0)
    with pytest.raises(RaceError, match="nothing orders"):
        lane.copy_in(0)


def test_a_closed_lane_leaves_nothing_under_way(driver: QueuedDriver, device: LateDevice) -> None:
    first = driver.open_lane({0: region(0, 100)})
    first.copy_out(torch.ones(100), 0)
    first.close()
    first.close()
    device.check_given_back()
    goes_and_comes(driver)


def test_a_lane_on_another_stream_waits_for_the_slab(device: LateDevice) -> None:
    driver = QueuedDriver(device)
    first = driver.open_lane({0: region(0, 100)})
    first.wait(first.copy_out(torch.ones(100), 0))
    first.copy_in(0)  # reads the slab
    first.close()
    device.switch("another")
    goes_and_comes(driver)


def test_after_orders_the_two_directions(driver: QueuedDriver) -> None:
    lane = driver.open_lane({0: region(0, 100)})
    away = lane.copy_out(torch.ones(100), 0)
    tensor, back = lane.copy_in(0, away)  # nobody has waited for `away`
    lane.wait(back)
    assert bool((tensor == 1).all())
    lane.close()


def test_a_closed_lane_copies_nothing(driver: QueuedDriver) -> None:
    lane = driver.open_lane({0: region(0, 100)})
    lane.close()
    with pytest.raises(RuntimeError, match="freed"):
        lane.copy_out(torch.ones(100), 0)


def test_an_interrupted_copy_is_waited_for(
    driver: QueuedDriver, device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = driver.open_lane({0: region(0, 100)})
    with monkeypatch.context() as patch:
        patch.setattr(device, "record", interrupted(device.record, at=2))
        with pytest.raises(KeyboardInterrupt):
            lane.copy_out(torch.ones(100), 0)
    lane.close()
    device.check_given_back()


def interrupted(call: Callable[..., None], at: int) -> Callable[..., None]:
    """Wrap `call` so that the `at`th time raises KeyboardInterrupt."""
    calls = count(1)

    def wrapped(*args: Any) -> None:
        if next(calls) == at:
            raise KeyboardInterrupt
        call(*args)

    return wrapped


def test_lanes_at_once_have_slabs_of_their_own(driver: QueuedDriver) -> None:
    lanes = [driver.open_lane({0: region(0, 50)}) for _ in range(3)]
    for value, lane in enumerate(lanes):
        lane.wait(lane.copy_out(torch.full((50,), float(value)), 0))
    for value, lane in enumerate(lanes):
        tensor, back = lane.copy_in(0)
        lane.wait(back)
        assert bool((tensor == value).all())
        lane.close()
    assert driver.slabs.taken_bytes == 3 * HOST_ALIGNMENT_BYTES


def test_a_slab_serves_the_next_step(driver: QueuedDriver) -> None:
    driver.reserve({Tier.HOST: 64 * KIB})
    for _ in range(3):
        lane = driver.open_lane({0: region(0, 100), 1: region(60 * KIB, 512)})
        lane.close()
    assert driver.slabs.taken_bytes == 64 * KIB
    driver.reserve({Tier.HOST: 8 * KIB})  # the next plan's replaces the last one's
    assert driver.slabs.taken_bytes == 8 * KIB


def test_a_larger_slab_is_made_smaller(driver: QueuedDriver, device: LateDevice) -> None:
    """The pages of a new slab would have to be requested and registered again."""
    lane = driver.open_lane({0: region(0, 100), 1: region(60 * KIB, 512)})
    lane.copy_out(torch.ones(100), 0)
    lane.close()
    (host,) = device.hosts
    driver.reserve({Tier.HOST: 8 * KIB})  # which waits for the copy
    assert not any(device.commands.values())
    assert [each for each in device.hosts if not each.expired()] == [host]
    lane = driver.open_lane({0: region(7 * KIB, 100)})
    lane.wait(lane.copy_out(torch.ones(100), 0))
    lane.close()
    assert driver.slabs.taken_bytes == 8 * KIB
    driver.reserve({Tier.HOST: 16 * KIB})  # it cannot grow
    assert driver.slabs.taken_bytes == 16 * KIB
    assert host.expired()


def test_a_small_slab_beside_a_large_one(driver: QueuedDriver, device: LateDevice) -> None:
    """A large one would have to be requested and registered again."""
    driver.reserve({Tier.HOST: 64 * KIB})
    for _ in range(3):
        driver.reserve({Tier.HOST: 8 * KIB}, keep=True)
        lane = driver.open_lane({0: region(7 * KIB, 100)})
        driver.reserve({Tier.HOST: 64 * KIB}, keep=True)
        assert driver.slabs.taken_bytes == 72 * KIB
        lane.close()
    driver.reserve({Tier.HOST: 5 * KIB}, keep=True)  # the small one is snug enough
    assert len(device.hosts) == 2


def test_no_room_for_a_small_slab_beside_a_large_one(driver: QueuedDriver) -> None:
    driver.hardware(BUDGETS)
    driver.reserve({Tier.HOST: BUDGETS[Tier.HOST]})
    driver.reserve({Tier.HOST: 8 * KIB}, keep=True)
    assert driver.slabs.taken_bytes == 8 * KIB


def test_what_moves_does_not_take_the_only_slab_that_a_plan_fits_in(driver: QueuedDriver) -> None:
    """The slab of the plan would do for what moves, but there is no room for two like it."""
    driver.hardware(BUDGETS)
    nothing: Any = None
    eviction = Eviction(nothing, driver, nothing, nothing, nothing)
    slot = SimpleNamespace(tier=Tier.HOST, offset=0, nbytes=600 * KIB)
    program: Any = SimpleNamespace(slots=(slot,))
    driver.reserve({Tier.HOST: 600 * KIB})
    for _ in range(3):
        tensor = torch.arange(350 * KIB // 4).float()
        away = eviction._move(EmptyLane(), {0: tensor}, [], Tier.HOST, program)
        assert driver.slabs.taken_bytes <= BUDGETS[Tier.HOST]
        lane = driver.open_lane({0: region(600 * KIB - 400, 100)})
        back, copied = away.lane.copy_in(0)
        away.lane.wait(copied)
        assert torch.equal(back, tensor)
        away.lane.close()
        lane.close()


def test_no_more_host_memory_than_allowed(driver: QueuedDriver) -> None:
    driver.hardware(BUDGETS)
    taken = [driver.open_lane({0: region(0, 100 * KIB)}) for _ in range(2)]
    with pytest.raises(HostMemoryError, match=r"400 KiB.* needed, 800 KiB.* of 1.00 MiB") as caught:
        driver.open_lane({0: region(0, 100 * KIB)})
    assert caught.value.budget_bytes == 1 << 20
    taken.pop().close()
    driver.open_lane({0: region(0, 100 * KIB)}).close()


def test_an_interrupt_while_a_lane_is_made_leaves_the_budget_as_it_was(
    driver: QueuedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.hardware(BUDGETS)

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(queued, "QueuedLane", stopped)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                driver.open_lane({0: region(0, 100 * KIB)})
    gc.collect()
    assert driver.slabs.taken_bytes == 0
    driver.open_lane({0: region(0, 100 * KIB)}).close()


def test_nothing_to_copy_takes_nothing(driver: QueuedDriver) -> None:
    assert isinstance(driver.open_lane({}), EmptyLane)
    driver.reserve({Tier.HOST: 0})
    assert driver.slabs.taken_bytes == 0


def test_a_storage_smaller_than_its_region_is_refused(driver: QueuedDriver) -> None:
    lane = driver.open_lane({0: region(0, 100)})
    with pytest.raises(VerifyError, match="396 bytes for a region of 400"):
        lane.copy_out(torch.ones(99), 0)
    lane.close()


def test_another_stream_in_one_step_is_refused(driver: QueuedDriver, device: LateDevice) -> None:
    lane = driver.open_lane({0: region(0, 100)})
    device.switch("another")
    with pytest.raises(RuntimeError, match="two CUDA streams"):
        lane.copy_in(0)


def test_copies_are_reported(driver: QueuedDriver) -> None:
    spans: list[CopySpan] = []
    driver.record(spans.append)
    lane = driver.open_lane({7: region(0, 100)})
    lane.wait(lane.copy_out(torch.ones(100), 7))
    lane.wait(lane.copy_in(7)[1])
    driver.drain()
    lane.close()
    assert [(s.direction, s.region, s.nbytes) for s in spans] == [("out", 7, 400), ("in", 7, 400)]
    assert all(s.start_seconds <= s.stop_seconds for s in spans)


def test_hardware_is_measured(driver: QueuedDriver) -> None:
    hardware = driver.hardware(BUDGETS)
    assert hardware.outer is Tier.HOST
    assert hardware.capacity(Tier.HOST) == 1 << 20
    assert hardware.link(Tier.HOST, Tier.DEVICE).bytes_per_second > 0
    assert hardware.slot_bytes(Tier.DEVICE, 1, copied=True) == LateDevice.rounding_bytes
    assert driver.slabs.taken_bytes == 0


def test_links_are_taken_as_they_are_beside_compute(
    driver: QueuedDriver, device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every span takes twice as long once copies are timed while the device computes."""
    spans = count(1)
    timed = 2 * 5 + 2 * 5  # one size alone in both directions, then both at once: five times each
    calls = timed + 1  # and one span of the work itself
    monkeypatch.setattr(device, "seconds", lambda *_: 1e-3 * (1 + (next(spans) > calls)))
    hardware = driver.hardware(BUDGETS)
    assert driver.links is not None
    assert (driver.links.busy_out, driver.links.busy_in) == (0.5, 0.5)
    assert driver.links.alone.copy_out == ((65536, 1e-3),)
    assert hardware.link(Tier.DEVICE, Tier.HOST).bytes_per_second == pytest.approx(65536 / 2e-3)


def test_a_disk_lies_beyond_the_host(tmp_path: Path) -> None:
    driver = QueuedDriver(LateDevice(), tmp_path)
    near, wide = driver.hardware(WITH_DISK), driver.wider_hardware(WITH_DISK)
    assert near.capacity(Tier.DISK) == 0
    assert wide is not None
    assert (wide.outer, wide.capacity(Tier.DISK)) == (Tier.HOST, 1 << 22)
    for ends in ((Tier.DEVICE, Tier.DISK), (Tier.DISK, Tier.DEVICE)):
        host = near.link(*(Tier.HOST if tier is Tier.DISK else tier for tier in ends))
        assert wide.link(*ends).bytes_per_second < host.bytes_per_second
    assert driver.wider_hardware(BUDGETS) is None
    driver.close()
    assert not list(tmp_path.iterdir())


def test_memory_that_is_shared_is_no_outer_tier(driver: QueuedDriver, device: LateDevice) -> None:
    device.shares_memory = True
    hardware = driver.hardware(BUDGETS)
    assert hardware.capacity(Tier.HOST) == 0
    assert not hardware.links
    assert driver.wider_hardware(WITH_DISK) is None


@pytest.mark.parametrize("declined", [Tier.HOST, Tier.DISK])
def test_a_tier_without_a_budget_is_none(declined: Tier, tmp_path: Path) -> None:
    driver, budgets = QueuedDriver(LateDevice(), tmp_path), WITH_DISK | {declined: 0}
    near = driver.hardware(budgets)
    assert bool(near.links) == (declined is Tier.DISK)
    assert driver.wider_hardware(budgets) is None
    driver.close()


def test_a_closed_driver_takes_no_more(driver: QueuedDriver) -> None:
    lane = driver.open_lane({0: region(0, 100)})
    assert isinstance(lane, QueuedLane)
    memory = StorageWeakRef(lane._open[0].memory.untyped_storage())
    driver.close()
    driver.close()
    assert not memory.expired()
    lane.close()
    assert memory.expired()
    with pytest.raises(HostMemoryError, match="closed"):
        driver.open_lane({0: region(0, 100)})


def test_a_slab_given_back_in_the_middle_of_taking_one(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a finalizer that the garbage collector runs: `give` must not wait for the lock."""
    driver = QueuedDriver(device)
    other = driver.open_lane({0: region(0, 100)})
    host = device.host

    def closing(nbytes: int) -> torch.Tensor:
        other.close()
        return host(nbytes)

    monkeypatch.setattr(device, "host", closing)
    driver.open_lane({0: region(0, 200)}).close()
    assert driver.slabs.taken_bytes == 1024 + 512


# ---- whole programs -----------------------------------------------------------------------------


def on_tiers(program: Program, *tiers: Tier) -> Program:
    """The program with its slots outside the device in `tiers` by turns, at the same offsets."""

    def moved(slot: Slot) -> Slot:
        away = slot.tier is not Tier.DEVICE
        return replace(slot, tier=tiers[slot.buffer % len(tiers)]) if away else slot

    return replace(program, slots=tuple(map(moved, program.slots)))


class Queued(Trained):
    """A planned model whose next steps run on a device of queues."""

    def queued_step(
        self, deaf: int = 0, program: Program | None = None, evict_to: Tier | None = None
    ) -> tuple[list[torch.Tensor], LateDevice]:
        """A step; if `evict_to` is given, what waits is moved there between the two calls."""
        engine = self.engine
        self.driver = getattr(self, "driver", engine.driver)
        device = LateDevice()
        device.deaf = deaf
        engine.driver = QueuedDriver(device)
        trace, program = self.graph.captured.trace, program or on_tiers(self.program, Tier.HOST)
        self.follow(build(trace, program, device.generator, POISONED))
        moving: Any = engine.eviction
        moving._driver, moving._tiers = engine.driver, lambda: [evict_to] if evict_to else []
        moving._room_bytes = lambda *_: 1 << 40
        moving.before_backward = lambda graph, _: moving.move_away(graph, 1 << 40)
        result = self.step()
        device.check_given_back()
        engine.driver.close()
        engine.driver = moving._driver = self.driver  # later tests count what a driver holds
        return result, device


@pytest.mark.parametrize(
    "policy",
    ["swap-all", "swap-all-naive", "recompute-all", "swap-opt", "pooch", "pooch{early=true}"],
)
def test_late_queues_change_nothing(policy: str) -> None:
    trained = Queued(policy)
    expected = trained.step()
    moved = any(isinstance(each.action, Copy) for each in trained.program.body)
    if not policy.startswith("pooch"):  # it may recompute, if the disk was busy when measured
        assert moved == (policy != "recompute-all")
    for tiers in TIERS:
        got, device = trained.queued_step(program=on_tiers(trained.program, *tiers))
        assert same([got], [expected])
        assert (device.copies > 0) == moved


def test_a_missed_wait_is_caught() -> None:
    """Every wait is needed: a missed one is a race, or gives other numbers."""
    trained = Queued("swap-all")
    expected = trained.step()
    _, device = trained.queued_step()
    assert device.waits >= 3 * device.copies // 2
    caught = 0
    for missed in range(1, device.waits + 1):
        try:
            got, _ = trained.queued_step(missed)
        except RaceError:
            caught += 1
        else:
            caught += not same([got], [expected])
    assert caught == device.waits


def kept(trained: Queued) -> Program:
    """The program that keeps everything, which needs more than the budget."""
    planned = trained.graph.planned
    assert planned is not None
    return lower(replace(planned.problem, budget_bytes=1 << 40), make_plan({}))


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_what_is_moved_away_while_it_waits_comes_back(keeps: bool, tier: Tier) -> None:
    trained = Queued("swap-all")
    program = kept(trained) if keeps else None
    expected = trained.step()
    _, before = trained.queued_step(program=program)
    got, device = trained.queued_step(program=program, evict_to=tier)
    assert same([got], [expected])
    assert device.copies > before.copies


class DeafLane(QueuedLane):
    """A lane in which the compute queue waits for no copy out."""

    __slots__ = ()

    def wait(self, handle: QueuedCopy, /) -> None:
        if handle.direction == "in":
            super().wait(handle)


def test_what_is_moved_away_is_freed_after_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Queued("swap-all")
    expected, program = trained.step(), kept(trained)
    open_lane = QueuedDriver.open_lane

    def deaf(self: QueuedDriver, regions: dict[int, Region]) -> Any:
        lane: Any = open_lane(self, regions)
        if regions:
            lane.__class__ = DeafLane
        return lane

    monkeypatch.setattr(QueuedDriver, "open_lane", deaf)
    try:
        got, _ = trained.queued_step(program=program, evict_to=Tier.HOST)
    except RaceError:
        return
    assert not same([got], [expected])


@pytest.fixture(scope="module")
def trained() -> Iterator[Queued]:
    found = Queued("swap-all")
    yield found
    vars(found).clear()  # later tests count memory
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def expected(trained: Queued) -> Iterator[list[Tensor]]:
    """The results of a step under its plan."""
    found = trained.queued_step()[0]
    yield found
    found.clear()


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_plan_runs_without_races(
    trained: Queued, expected: list[Tensor], data: st.DataObject
) -> None:
    """Plans that no policy would make give the same gradients, with copies as late as allowed."""
    planned = trained.graph.planned
    assert planned is not None
    problem = replace(planned.problem, budget_bytes=1 << 40)
    plan = data.draw(plans(problem))
    program = on_tiers(lower(problem, plan), *data.draw(st.sampled_from(TIERS)))
    evict_to = data.draw(st.sampled_from((None, Tier.HOST, Tier.DISK)))
    got, device = trained.queued_step(program=program, evict_to=evict_to)
    assert same([got], [expected])
    assert device.copies >= sum(isinstance(choice, Offload) for _, choice in plan.choices)
