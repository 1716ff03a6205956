"""Inputs and results of calls: which are still held, and how much of them a trace counts."""

from __future__ import annotations

import torch

from outcore.ir.text import parse
from outcore.ir.trace import Trace
from outcore.runtime.step.call_tensors import CallTensors, call_tensors

CPU = torch.device("cpu")

TRACE = """
trace boundary 1
buffer 0 input 4000 B
buffer 1 input 800 B
buffer 2 activation 4000 B
value %0 on 0 float32 (1000,) stride (1,)
value %1 on 1 float32 (200,) stride (1,)
value %2 on 2 float32 (1000,) stride (1,)
value %3 on 2 float32 (500,) stride (1,)
inputs %0, %1
op 0 forward f(%0, %1) -> %2
outputs (%2, %3)
"""


def given(*pairs: tuple[int, object]) -> CallTensors:
    """The call tensors of `pairs`: the number of a Value, and the object passed for it."""
    return call_tensors(parse(TRACE, Trace), pairs, CPU)


def test_what_somebody_holds_is_there() -> None:
    kept, dropped = torch.ones(1000), torch.ones(200)
    found = given((0, kept), (1, dropped))
    assert found.gone == set()
    assert found.gone_bytes == 0
    del dropped
    assert found.gone == {1}
    assert found.gone_bytes == 800
    assert [storage.data_ptr() for storage in found.live] == [kept.data_ptr()]


def test_it_holds_nothing_itself() -> None:
    found = given((0, torch.ones(1000)))
    assert not found.live
    assert found.gone == {0}


def test_two_views_of_a_buffer_are_one_storage() -> None:
    whole = torch.ones(1000)
    half = whole[:500]
    found = given((2, whole), (3, half))
    del whole
    assert not found.gone, "its memory is there as long as one view of it"
    del half
    assert found.gone == {2}
    assert found.gone_bytes == 4000


def test_what_a_storage_has_beyond_the_trace_counts_while_it_is_there() -> None:
    part = torch.ones(1500)[:1000]
    found = given((0, part))
    assert found.beyond_bytes == 2000
    del part
    assert found.beyond_bytes == 0


def test_two_inputs_in_one_storage_are_two_buffers_of_it() -> None:
    both = torch.ones(1200)
    found = given((0, both[:1000]), (1, both[1000:]))
    assert found.beyond_bytes == 0
    del both
    assert found.gone == {0, 1}
    assert found.gone_bytes == 4800


def test_results_come_to_what_was_given() -> None:
    inputs = torch.ones(1000)
    before = given((0, inputs))
    results = torch.ones(1000)
    found = before | given((2, results))
    assert len(found.live) == 2
    del results
    assert found.gone == {2}


def test_a_result_in_the_memory_of_an_input_that_is_gone_is_there() -> None:
    memory = bytearray(4000)
    before = given((0, torch.frombuffer(memory, dtype=torch.float32)))
    results = torch.frombuffer(memory, dtype=torch.float32)
    found = before | given((2, results))
    assert found.gone == {0}
    assert len(found.live) == 1
    assert (found.gone_bytes, found.beyond_bytes) == (4000, 0)
    del results
    assert found.gone == {0, 2}


def test_an_input_that_is_returned_is_both() -> None:
    same = torch.ones(1000)
    found = given((0, same)) | given((2, same))
    assert len(found.live) == 1
    del same
    assert found.gone == {0, 2}


def test_what_lies_elsewhere_or_is_no_tensor_does_not_count() -> None:
    found = given((0, torch.empty(1000, device="meta")), (1, 3.0), (2, None))
    assert not found.live
    assert not found.gone
