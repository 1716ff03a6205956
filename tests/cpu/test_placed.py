"""PlacedLane: a lane that holds free memory, on a test device with a best-fit allocator."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from outcore.allocators.best_fit import MIB
from outcore.allocators.blocks import Pool, round_up
from outcore.allocators.placed_range import PlacedRange
from outcore.errors import StepError
from outcore.execute.driver import EmptyLane, Region
from outcore.execute.placed import EDGE_BYTES, MOST_PLUGS, PlacedLane
from outcore.execute.queued import QueuedDriver
from outcore.gauges import held_bytes, own_refusals
from outcore.ir.hardware import Tier
from outcore.ir.layout import Hold, Layout, Release
from tests.cpu.queues import LateDevice

START = 1 << 30
CPU = torch.device("cpu")
SIZES = {5: 20 * MIB, 6: 30 * MIB}
LAYOUT = Layout(
    nbytes=60 * MIB,
    moves={
        3: (Release(0), Hold(1, 0, 20 * MIB), Hold(2, 20 * MIB, 40 * MIB), Release(1)),
        7: (Release(2), Hold(3, 20 * MIB, 30 * MIB), Hold(4, 50 * MIB, 10 * MIB), Release(3)),
    },
    positions={5: 3, 6: 7},
    offsets={5: 0, 6: 20 * MIB},
    guests=frozenset(),
    at_home=frozenset(),
    peak_bytes=0,
)


class Block:
    """Device memory that is freed with the last reference to this object."""

    device = CPU

    def __init__(self, address, nbytes):
        self.address, self.nbytes = address, nbytes

    def data_ptr(self):
        return self.address

    def untyped_storage(self):
        return self


class Stage:
    """A device whose stage has `nbytes`; `log` records what orders its queues."""

    stage = "stage"

    def __init__(self, nbytes=200 * MIB):
        self.log, self.queue = [], "caller"
        self.pool = Pool()
        self.pool.put(self.pool.add(START, nbytes))

    def current(self):
        return self.queue

    @contextmanager
    def on(self, queue):
        before, self.queue = self.queue, queue
        try:
            yield
        finally:
            self.queue = before

    def event(self):
        return object()

    def record(self, _, queue):
        self.log.append(f"{queue} is at")

    def wait(self, queue, _):
        self.log.append(f"{queue} waits")

    def holds(self, _):
        return True

    def share(self, tensor, queue):
        self.log.append(f"shared with {queue}")

    def empty(self, nbytes):
        assert self.queue == "stage"
        size = round_up(nbytes, 512)
        index = self.pool.fitting(size)
        if index == len(self.pool.free):
            raise torch.OutOfMemoryError
        block = self.pool.take(index)
        if block.nbytes > size:
            self.pool.put(self.pool.cut(block, size))
        made = Block(block.start, nbytes)
        weakref.finalize(made, self.pool.put, block)
        return made


def held(lane):
    return lane.held_bytes(CPU)


class Said(list):
    """What lanes say of a layout."""

    def kept(self):
        self.append("kept")

    def lost(self, what, position):
        assert position is not None or "slot" not in what
        self.append(what)

    def failed(self, error):
        self.append(str(error))


def placed(device, layout=LAYOUT, *, holds=True):
    said = Said()
    return PlacedLane(EmptyLane(), device, layout, said, holds=holds), said


def test_tensors_get_their_places():
    device = Stage()
    lane, said = placed(device)
    with lane.call([]):
        assert held(lane) == LAYOUT.nbytes + 2 * EDGE_BYTES
        lane.place(3)
        first = device.empty(SIZES[5])
        lane.placed(5, first)
        lane.place(7)
        second = device.empty(SIZES[6])
        lane.placed(6, second)
        assert second.address - first.address == 20 * MIB
        assert held(lane) == held_bytes(CPU) == 10 * MIB + 2 * EDGE_BYTES
    assert not said
    lane.give([], last=True)
    lane.close()
    assert said == ["kept"]
    assert held(lane) == 0


def test_a_stretch_that_is_full_between_the_calls():
    """The second call has nothing left to hold, and does not take the stretch again."""
    device = Stage()
    lane, said = placed(device)
    with lane.call([]):
        lane.place(3)
        lane.placed(5, first := device.empty(SIZES[5]))
        lane.place(7)
        lane.placed(6, second := device.empty(SIZES[6]))
        lane._pieces.clear()
        third = device.empty(10 * MIB)
    with lane.call([]):
        assert held(lane) == 2 * EDGE_BYTES
    assert third.address > second.address > first.address
    assert not said


def test_between_the_calls_the_caller_can_have_what_is_free():
    device: Any = Stage(LAYOUT.nbytes + 2 * EDGE_BYTES)
    stretch = PlacedRange(LAYOUT.nbytes)
    moves = {3: tuple(stretch.open([(0, SIZES[5])]))}
    stretch.use(0, SIZES[5])
    pause, resume = stretch.pause()
    moves[7] = tuple(stretch.open([(20 * MIB, SIZES[6])]))
    layout = replace(LAYOUT, moves=moves, pause=pause, resume=resume)
    lane, said = placed(device, layout)
    with lane.call([]):
        lane.place(3)
        first = device.empty(SIZES[5])
        lane.placed(5, first)
        assert held(lane) == 40 * MIB + 2 * EDGE_BYTES
    assert held(lane) == 2 * EDGE_BYTES
    with device.on("stage"):
        lent = device.empty(40 * MIB)
        del lent
    with lane.call([]):
        assert held(lane) == 40 * MIB + 2 * EDGE_BYTES
        lane.place(7)
        lane.placed(6, device.empty(SIZES[6]))
    assert not said


def test_what_others_took_between_the_calls_is_noticed():
    device: Any = Stage(LAYOUT.nbytes + 2 * EDGE_BYTES)
    stretch = PlacedRange(LAYOUT.nbytes)
    pause, resume = stretch.pause()
    layout = replace(LAYOUT, moves={}, pause=pause, resume=resume)
    lane, said = placed(device, layout)
    with lane.call([]):
        pass
    with device.on("stage"):
        taken = device.empty(20 * MIB)
    with lane.call([]):
        assert held(lane) == 0
    assert taken.nbytes == 20 * MIB
    assert said == [f"{LAYOUT.nbytes} bytes at offset 0 of the layout"]


def test_a_tensor_elsewhere_ends_it():
    device = Stage()
    lane, said = placed(device)
    with lane.call([]):
        lane.place(3)
        lane.placed(5, Block(START, 1))
        assert held(lane) == 0
        lane.place(7)
    lane.close()
    assert len(said) == 1
    assert "slot 5" in said[0]


def test_memory_that_is_still_in_use_is_noticed_before_a_request_fails():
    """Something else keeps a tensor that the program has freed, such as a debugger."""
    device: Any = Stage(LAYOUT.nbytes + 2 * EDGE_BYTES)
    stretch = PlacedRange(LAYOUT.nbytes)
    moves = {3: tuple(stretch.open([(0, SIZES[5])]))}
    stretch.use(0, SIZES[5])
    stretch.free(0)
    moves[7] = tuple(stretch.open([(0, SIZES[5])]))
    again = replace(LAYOUT, moves=moves, positions={5: 3, 6: 7}, offsets={5: 0, 6: 0})
    lane, said = placed(device, again)
    with lane.call([]):
        lane.place(3)
        kept = device.empty(SIZES[5])
        lane.placed(5, kept)
        lane.place(7)
        assert device.empty(SIZES[5]).address != kept.address
    assert said == [f"{SIZES[5]} bytes at offset 0 of the layout"]


def test_a_call_that_fails_while_memory_is_held():
    """Such as an op that needs more memory than when it was profiled."""
    lane, said = placed(Stage())

    def failing():
        with lane.call([]):
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        failing()
    assert held(lane) == 0
    with pytest.raises(RuntimeError, match="out of memory"):
        failing()
    assert said == ["out of memory"]


def test_free_memory_elsewhere_is_held_too():
    """The free block is smaller than the stretch, so the allocator would give it to a piece."""
    device = Stage(300 * MIB)
    with device.on("stage"):
        before = [device.empty(15 * MIB), device.empty(2 * MIB)]
    del before[0]
    lane, said = placed(device)
    with lane.call([]):
        lane.place(3)
        first = device.empty(SIZES[5])
        lane.placed(5, first)
        lane.place(7)
        lane.placed(6, device.empty(SIZES[6]))
    assert not said


@pytest.mark.parametrize("nbytes", [50 * MIB, LAYOUT.nbytes + 2 * EDGE_BYTES - 512])
def test_no_room_for_it(nbytes):
    lane, said = placed(Stage(nbytes))
    before = own_refusals()
    with lane.call([]):
        assert said == ["no free range of the layout's size"]
        assert own_refusals() == before + 1
        lane.place(3)


def test_much_in_the_way():
    device = Stage((MOST_PLUGS + 2) * 40 * MIB + 500 * MIB)
    with device.on("stage"):
        blocks = [device.empty((30 if i % 2 else 2) * MIB) for i in range(2 * MOST_PLUGS + 4)]
    del blocks[1::2]
    lane, said = placed(device)
    with lane.call([]):
        assert len(said) == 1
        assert held(lane) == 0


def test_the_queues_wait_for_each_other():
    device = Stage()
    lane, _ = placed(device)
    given = [torch.zeros(1)]
    kept = weakref.ref(given[0])
    with lane.call(given):
        given.clear()
        assert device.current() == "stage"
        before = ["caller is at", "stage waits"]
        assert device.log == before
        assert kept() is not None
    assert kept() is None
    assert device.log == [*before, "stage is at", "caller waits"]
    lane.give([torch.zeros(1), None])
    assert device.log[4:] == ["shared with caller"]
    lane.close()


def test_what_lies_in_memory_of_the_caller_lives_until_a_backward_call_is_over():
    """Others could get it if it were freed earlier. What was made on the stage may be freed."""
    device = Stage()
    lane, _ = placed(device)
    argument, made = torch.zeros(1), torch.zeros(1)
    with lane.call([argument]):
        result = lane.moved(torch.zeros(1))
    crossing = [argument.detach(), result.detach(), made.detach(), None]
    weak = [weakref.ref(each) for each in crossing[:3]]
    del argument, result, made
    with lane.call([], crossing):
        crossing.clear()
        assert [each() is not None for each in weak] == [True, True, False]
    assert not any(each() is not None for each in weak)


def test_both_calls_are_made_on_one_stream():
    device = Stage()
    lane, _ = placed(device)
    with lane.call([]):
        pass
    device.queue = "another"
    with pytest.raises(StepError, match="two CUDA streams"), lane.call([]):
        pass


def test_a_step_that_raises_is_waited_for():
    device = Stage()
    lane, _ = placed(device)
    with pytest.raises(KeyError), lane.call([]):
        raise KeyError
    assert device.log[2:] == ["stage is at", "caller waits"]
    assert device.current() == "caller"


def test_a_step_that_is_dropped_leaves_nothing_under_way():
    """A copy may read memory of the caller, which the caller's queue reuses then."""
    device, memory = LateDevice(), torch.ones(100)
    regions = {0: Region.of(memory, 0, Tier.HOST)}
    lane = QueuedDriver(device).open_placed_lane(regions, LAYOUT, Said(), holds=True)
    with lane.call([memory]):
        lane.copy_out(memory, 0)
    lane.close()
    del memory
    device.check_given_back()


def test_a_metered_step_runs_as_ever():
    device = Stage()
    lane, said = placed(device, holds=False)
    with lane.call([torch.zeros(1)]):
        assert device.current() == "caller"
        lane.place(3)
        lane.placed(5, Block(START, 1))
    lane.give([torch.zeros(1)])
    lane.close()
    assert not said
    assert not device.log


def test_backward_calls_that_free_little_hold_nothing():
    device = Stage()
    lane, said = placed(device)
    with lane.call([]):
        pass
    with lane.call([], again=True):
        assert device.current() == "stage"
        assert held(lane) == 0
    assert not said


def test_large_results_are_made_at_home():
    """They are kept until a backward call that reads them is over."""
    device = Stage()
    lane, _ = placed(device)
    with lane.call([]):
        begun = len(device.log)
        with lane.at_home() as made:
            assert device.current() == "caller"
            assert device.log[begun:] == ["stage is at", "caller waits"]
            result = torch.zeros(1)
            made.append(result)
        assert device.current() == "stage"
        assert device.log[begun + 2 :] == ["caller is at", "stage waits"]
    crossing = [result.detach()]
    kept = weakref.ref(crossing[0])
    del made, result
    with lane.call([], crossing):
        crossing.clear()
        assert kept() is not None
    assert kept() is None


def test_a_metered_step_makes_them_where_it_is():
    device = Stage()
    lane, _ = placed(device, holds=False)
    with lane.call([]), lane.at_home() as made:
        made.append(torch.zeros(1))
    assert not device.log


def test_results_move_to_the_caller():
    device = Stage()
    lane, _ = placed(device)
    with lane.call([]):
        transposed = torch.arange(6.0).reshape(2, 3).t()
        copy = lane.moved(transposed)
        assert copy is not transposed
        assert torch.equal(copy, transposed)
        assert copy.stride() == transposed.stride()
        part = torch.arange(6.0)[1:]
        assert lane.moved(part) is part
