"""AdversarialDriver: a missing wait gives wrong bytes."""

import pytest
import torch

from outcore.execute.driver import CopySpan
from tests.cpu.adversarial import AdversarialDriver
from tests.cpu.storages import region_of, regions_of, same


@pytest.fixture
def adversary():
    return AdversarialDriver()


def test_the_adversary_is_right_when_the_program_is(adversary):
    tensor = torch.randn(4, 5)
    lane = adversary.open_lane(regions_of(tensor))
    source = tensor.clone()
    out = lane.copy_out(source, 0)
    lane.wait(out)
    lane.discard(source)
    back, handle = lane.copy_in(0, out)
    lane.wait(handle)
    assert same(tensor, back)
    lane.release(0)
    assert same(tensor, back)
    adversary.close()
    assert adversary.lanes == []


def test_reading_before_the_copy_in_is_waited_for_reads_poison(adversary):
    floats, integers = torch.ones(3), torch.ones(3, dtype=torch.int64)
    lane = adversary.open_lane(regions_of(floats, integers))
    for key, tensor in enumerate((floats, integers)):
        lane.wait(lane.copy_out(tensor, key))
    (back, _), (numbers, _) = lane.copy_in(0), lane.copy_in(1)
    assert back.isnan().all()
    assert (numbers == -1).all()


def test_freeing_before_the_copy_out_is_waited_for_copies_poison(adversary):
    lane = adversary.open_lane(regions_of(torch.ones(3)))
    source = torch.ones(3)
    out = lane.copy_out(source, 0)
    lane.discard(source)
    back, handle = lane.copy_in(0, out)
    lane.wait(handle)
    assert back.isnan().all()


def test_overwriting_before_the_copy_out_is_waited_for_copies_the_new_value(adversary):
    lane = adversary.open_lane(regions_of(torch.ones(3)))
    source = torch.ones(3)
    out = lane.copy_out(source, 0)
    source.mul_(2)
    back, handle = lane.copy_in(0, out)
    lane.wait(handle)
    assert (back == 2).all()


def test_copying_in_without_waiting_for_the_copy_out_reads_poison(adversary):
    lane = adversary.open_lane(regions_of(torch.ones(3)))
    out = lane.copy_out(torch.ones(3), 0)
    back, handle = lane.copy_in(0)
    lane.wait(handle)
    lane.wait(out)
    assert back.isnan().all()


def test_reusing_a_place_without_waiting_for_the_copy_in_reads_the_new_value(adversary):
    place = region_of(torch.ones(3))
    lane = adversary.open_lane({0: place, 1: place})
    lane.wait(lane.copy_out(torch.ones(3), 0))
    back, came = lane.copy_in(0)
    lane.wait(lane.copy_out(torch.full((3,), 2.0), 1))
    lane.wait(came)
    assert (back == 2).all()
    lane.wait(lane.copy_out(torch.ones(3), 0))
    back, came = lane.copy_in(0)
    lane.wait(lane.copy_out(torch.full((3,), 2.0), 1, came))  # now with the edge
    lane.wait(came)
    assert (back == 1).all()


def test_releasing_a_region_before_the_copy_in_is_waited_for_reads_poison(adversary):
    lane = adversary.open_lane(regions_of(torch.ones(3)))
    lane.wait(lane.copy_out(torch.ones(3), 0))
    back, came = lane.copy_in(0)
    lane.release(0)
    lane.wait(came)
    assert back.isnan().all()


@pytest.mark.parametrize("stream_order", [True, False])
def test_copies_of_one_direction_keep_their_order_where_that_is_promised(stream_order):
    driver = AdversarialDriver(stream_order=stream_order)
    spans: list[CopySpan] = []
    driver.record(spans.append)
    tensors = [torch.full((3,), float(k)) for k in range(4)]
    lane = driver.open_lane(regions_of(*tensors))
    outs = [lane.copy_out(t, k) for k, t in enumerate(tensors[:3])]
    outs.append(lane.copy_out(tensors[3], 3, outs[0]))
    lane.wait(outs[2])
    assert [s.region for s in spans] == ([0, 1, 2] if stream_order else [2])
    driver.drain()
    assert [s.region for s in spans] == ([0, 1, 2, 3] if stream_order else [2, 0, 3, 1])
    driver.close()
