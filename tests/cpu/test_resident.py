"""Elsewhere: counts tensors that no ledger counts, and seldom visits all objects for that."""

from __future__ import annotations

import gc
import sys
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import outcore
from outcore.gauges import Ledger
from outcore.measure import Elsewhere, resident, resident_bytes
from outcore.runtime import state

CPU = torch.device("cpu")
NOTHING = Ledger(0, 0, 0, lambda _: 0, lambda _: 0)
"""It counts nothing, so everything is elsewhere."""
EVENTS = ["make", "drop", "collect 0", "collect 1", "collect 2"]


def counted(elsewhere: Elsewhere) -> int:
    return resident_bytes(CPU, [], NOTHING, elsewhere)


def test_what_comes_and_goes_is_counted() -> None:
    elsewhere, held = Elsewhere(), [torch.ones(1000)]
    before = counted(elsewhere)
    assert before >= 4000
    held.append(torch.ones(100))
    assert counted(elsewhere) == before + 400
    gc.collect()
    view = held[0][:10]
    assert counted(elsewhere) == before + 400, "a view is nothing more"
    held.clear()
    assert counted(elsewhere) == before, "it holds all of its storage"
    del view
    assert counted(elsewhere) == before - 4000


def test_gradients_are_counted_once_all_is_gone_through() -> None:
    elsewhere, leaf = Elsewhere(), torch.ones(1000, requires_grad=True)
    gc.collect()  # it is in the oldest generation now
    before = counted(elsewhere)
    leaf.sum().backward()
    gc.collect()
    assert counted(elsewhere) == before + 4000


def test_a_storage_is_as_large_as_it_is_now() -> None:
    elsewhere, held = Elsewhere(), torch.ones(1000)
    gc.collect()
    before = counted(elsewhere)
    held.untyped_storage().resize_(8000)
    assert counted(elsewhere) == before + 4000
    held.untyped_storage().resize_(0)
    assert counted(elsewhere) == before - 4000


def test_what_the_collector_is_told_to_leave_alone_stays_counted() -> None:
    elsewhere, held = Elsewhere(), torch.ones(1000)
    before = counted(elsewhere)
    gc.freeze()
    try:
        gc.collect()
        assert counted(elsewhere) == before
    finally:
        gc.unfreeze()
    assert held.nbytes == 4000


def test_objects_that_were_hidden_before_the_first_call_are_noted(monkeypatch) -> None:
    for hidden, noted in ((0, False), (5, True)):
        monkeypatch.setattr(state, "frozen_objects", lambda: hidden)  # noqa: B023 - called at once
        backend = outcore.Backend("1GiB")
        backend.engine_for(CPU)
        assert any("gc.unfreeze()" in note for note in backend.report().notes) is noted
        backend.close()


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_of_all_layouts_are_counted() -> None:
    held: list[Tensor] = []
    before = resident_bytes(CPU)
    sizes = {torch.sparse_csr: (), torch.sparse_csc: (), torch.sparse_bsr: (2, 2)}
    for layout, block in (sizes | {torch.sparse_bsc: (2, 2)}).items():
        ends, others, values = torch.arange(11), torch.zeros(10, dtype=torch.int64), (10, *block)
        made = torch.sparse_compressed_tensor(ends, others, torch.ones(values), layout=layout)
        held.append(made.requires_grad_())
        del ends, others, made
        before += 11 * 8 + 10 * 8 + 10 * 4 * prod(block)
        assert resident_bytes(CPU) == before


@given(st.lists(st.sampled_from(EVENTS), max_size=20))
def test_it_is_what_is_found_anew(events: list[str]) -> None:
    elsewhere, held = Elsewhere(), list[Tensor]()
    for event in events:
        if event == "make":
            held.append(torch.ones(100 * len(held)))
        elif event == "drop":
            held = held[1:]
        else:
            gc.collect(int(event[-1]))
        assert counted(elsewhere) == resident_bytes(CPU, [], NOTHING)


def visits(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """The generations of each visit to all objects in them, from now on."""
    seen: list[range] = []
    known = resident._known_tensors

    def noted(generations: range) -> list[Tensor]:
        seen.append(generations)
        return known(generations)

    monkeypatch.setattr(resident, "_known_tensors", noted)
    return seen


def test_all_objects_are_gone_through_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = visits(monkeypatch)
    elsewhere = Elsewhere()
    gc.collect()
    for _ in range(10):
        counted(elsewhere)
    assert seen[0] == resident.ALL
    assert seen.count(resident.ALL) <= 2
    seen.clear()
    gc.collect()
    counted(elsewhere)
    assert seen == [resident.ALL]


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="each collection changes the order")
def test_what_a_collection_appends_is_found_without_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elsewhere, held = Elsewhere(), list[Tensor]()
    gc.collect()
    before = counted(elsewhere)
    gc.collect(1)
    counted(elsewhere)  # from now on it knows where new objects follow
    known = resident._known_tensors
    monkeypatch.setattr(resident, "_known_tensors", lambda generations: known(resident.YOUNG))
    gc.disable()
    try:
        for number in range(1, 5):
            held.append(torch.ones(1000))
            gc.collect(1)
            held.append(torch.ones(1000))
            assert counted(elsewhere) == before + number * 8000
    finally:
        gc.enable()


def test_what_comes_while_objects_are_hidden_is_found_once_they_are_back() -> None:
    elsewhere, held = Elsewhere(), list[Tensor]()
    gc.unfreeze()  # what earlier tests left is counted from the start
    gc.collect()
    before = counted(elsewhere)
    for number in range(1, 5):
        gc.collect(1)
        counted(elsewhere)
        gc.freeze()
        try:
            held.append(torch.ones(1000))
            gc.collect(1)
            assert counted(elsewhere) == before + 8000 * number - 4000
            held.append(torch.ones(1000))
        finally:
            gc.unfreeze()
        gc.collect(1)
        assert counted(elsewhere) == before + 8000 * number


@pytest.mark.parametrize(
    "events",
    [
        ("collect 0", "make", "hide"),
        ("collect 1", "make", "hide"),
        ("make", "hide", "collect 1"),
        ("collect 2", "make", "hide", "collect 1"),
        ("collect 1", "count", "make", "hide", "collect 1"),
        ("collect 1", "collect 1", "count", "collect 1", "make", "hide"),
        ("make", "hide", "make", "collect 1", "hide", "make"),
    ],
)
def test_what_was_hidden_for_a_while_is_found(events: tuple[str, ...]) -> None:
    elsewhere, held = Elsewhere(), list[Tensor]()
    gc.unfreeze()  # what earlier tests left is counted from the start
    gc.collect()
    before = counted(elsewhere)
    gc.collect(1)
    counted(elsewhere)
    for event in events:
        if event == "make":
            held.append(torch.ones(1000))
        elif event == "hide":
            gc.freeze()
            gc.unfreeze()
        elif event == "count":
            counted(elsewhere)
        else:
            gc.collect(int(event[-1]))
    for _ in range(3):
        assert counted(elsewhere) == before + 4000 * len(held)
        gc.collect(1)


def test_objects_are_visited_once_while_no_tensor_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = visits(monkeypatch)
    elsewhere, held = Elsewhere(), [torch.ones(1000)]
    before = counted(elsewhere)
    seen.clear()
    with elsewhere.at_once():
        assert counted(elsewhere) == before
        assert len(seen) == 1
        held.clear()
        assert counted(elsewhere) == before - 4000, "what is freed is noticed"
        assert len(seen) == 1
    held.append(torch.ones(10))
    assert counted(elsewhere) == before - 4000 + 40
    assert len(seen) == 2


class OnGpu:
    """Stands for a tensor on a GPU that has a storage."""

    device = torch.device("cuda")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.tensor.untyped_storage()


@pytest.mark.parametrize(("allocated", "left"), [(5000, 1000), (3000, 0)])
def test_what_torch_did_not_allocate_is_in_no_figure_of_its_allocator(
    monkeypatch: pytest.MonkeyPatch, allocated: int, left: int
) -> None:
    """Inputs may be arrays of other libraries, or be in memory of other processes."""
    monkeypatch.setattr(resident, "allocated_bytes", lambda _: allocated)
    own, foreign = torch.ones(1000), torch.from_numpy(np.ones(1000, np.float32))
    given: list[Any] = [OnGpu(each) for each in (own, own[:10], foreign)]
    assert resident_bytes(OnGpu.device, given) == left
