"""Layouts on a nearly full GPU: large tensors lie where the layout puts them."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import pytest
import torch

from benchmarks.kit.modes import same_graph
from outcore import Backend, worker
from outcore.allocators import lay_out, layout, requests
from outcore.execute.placed import PlacedLane
from outcore.runtime.budget.fragments import OFTEN, SETTLING_STEPS
from outcore.runtime.budget.placing import IN_PIECES, STARVED
from outcore.runtime.planning import solving
from tests.cpu.training import Deep, answered_here, mean_square, train
from tests.gpu.training import PROFILED_STEPS

MIB = 1 << 20
LIMIT_BYTES = 1280 * MIB
LAYERS = 20
"""Each makes maps of 64 MiB."""
PAGES_BYTES = 96 * MIB
"""More than what is left of pages of 20 MiB that are in use in part."""
STEPS = PROFILED_STEPS + 6


@contextmanager
def nearly_full():
    """Limit the memory that this process may use on the GPU; the bytes are given."""
    device = torch.device("cuda", torch.cuda.current_device())
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.get_per_process_memory_fraction(device)
    total = torch.cuda.get_device_properties(device).total_memory
    limit = LIMIT_BYTES + torch.cuda.memory_reserved(device)
    torch.cuda.set_per_process_memory_fraction(limit / total, device)
    try:
        yield limit
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def trained(backend, steps=STEPS, before=lambda call: None, loss_of=mean_square):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Deep(LAYERS).cuda()
    compiled = torch.compile(module, backend=backend)
    seeded = torch.Generator().manual_seed(0)
    maps = torch.randn(16, MIB, generator=seeded).cuda()

    def call(*args):
        before(lambda: compiled(*args))
        return compiled(*args)

    return train(module, call, [maps], loss_of, steps)


@pytest.mark.parametrize("large", [False, True])
def test_tensors_lie_where_they_should(large, monkeypatch):
    """`large`: the result is too large to be copied out of the stretch, so it is made outside."""
    if large:
        for module in (layout, requests):
            monkeypatch.setattr(module, "MOST_GUEST_BYTES", 32 * MIB)
        monkeypatch.setattr(solving, "place_out_of_process", lay_out)
        monkeypatch.setattr(worker, "ask_each", answered_here)
    expected = trained(same_graph)
    with nearly_full():
        backend = Backend()
        backend.record_step()
        found = trained(backend)
    planned = backend.engine.graphs[0].planned
    assert planned.plan.moves
    assert backend.report().recorded is not None
    assert planned.layout is not None
    assert bool(planned.layout.at_home) == large
    assert bool(planned.layout.guests) != large
    assert backend.engine.placing.note == ""
    assert backend.engine.placing.steps > 2
    assert planned.peak_bytes <= backend.engine.settings.budget_bytes
    for step, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert all(map(torch.equal, one, other)), f"step {step}"


def test_a_layout_beside_what_comes_between_steps_is_left():
    """An allocation that no profiled step had makes the allocator free and remake the stretch."""
    steps = 2 * PROFILED_STEPS + OFTEN + SETTLING_STEPS + 3
    expected = trained(same_graph, steps)
    left = list[bool]()

    def between(_):
        graphs = [] if backend.engine is None else backend.engine.graphs
        if graphs and graphs[0].planned is not None:
            left.append(graphs[0].planned.layout is None)
            torch.empty(LIMIT_BYTES * 3 // 4, dtype=torch.uint8, device="cuda")

    with nearly_full():
        backend = Backend()
        found = trained(backend, steps, between)
    assert left == sorted(left)
    assert OFTEN < left.count(False) <= OFTEN + SETTLING_STEPS + 2
    assert left[-1]
    assert backend.engine.placing.note == IN_PIECES
    for step, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert all(map(torch.equal, one, other)), f"step {step}"


def test_a_layout_for_which_too_much_is_held_is_left(monkeypatch):
    """An op asks for more than when it was profiled: free memory is held, so it gets none."""
    steps = 2 * PROFILED_STEPS + 6
    expected = trained(same_graph, steps)
    said = list[str]()
    place = PlacedLane.place

    def greedy(lane, position):
        place(lane, position)
        torch.empty(LIMIT_BYTES, dtype=torch.uint8, device="cuda")

    def ask(call):
        if backend.engine is not None and backend.engine.placing.steps == 2 and not said:
            with monkeypatch.context() as patch:
                patch.setattr(PlacedLane, "place", greedy)
                with pytest.raises(torch.OutOfMemoryError) as found:
                    call()
            said.extend(found.value.__notes__)

    with nearly_full():
        backend = Backend()
        found = trained(backend, steps, ask)
    assert "no later plan has those" in said[-1]
    (graph,) = backend.engine.graphs
    assert graph.planned.layout is None
    assert not graph.tightened
    assert backend.engine.placing.note == STARVED
    for step, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert all(map(torch.equal, one, other)), f"step {step}"


def test_a_step_that_skips_its_backward_ends_no_layout():
    """Its call is held until the next one has begun, beside which there is no room for two."""
    expected = trained(same_graph)
    held = list[torch.Tensor]()
    placed = list[int]()

    def skip(call):
        held.clear()
        if backend.engine is not None:
            placed.append(backend.engine.placing.steps)
            if placed[-1] == 1 and placed.count(1) == 1:
                held.append(call())

    with nearly_full():
        backend = Backend()
        found = trained(backend, before=skip)
    planned = backend.engine.graphs[0].planned
    assert planned.layout is not None
    assert planned.calls == 1
    assert placed[-1] > 2
    for step, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert all(map(torch.equal, one, other)), f"step {step}"


def test_between_the_calls_the_caller_can_have_what_the_layout_leaves_free():
    """As for a figure of quality that a script computes now and then."""
    expected = trained(same_graph)
    lent = list[torch.Size]()

    def loss_of(found):
        graphs = [] if backend.engine is None else backend.engine.graphs
        planned = graphs[0].planned if graphs else None
        if not lent and planned is not None and backend.engine.placing.steps:
            assert planned.layout is not None
            assert sum(hold.nbytes for hold in planned.layout.resume) > PAGES_BYTES
            free = limit - torch.cuda.memory_allocated() - PAGES_BYTES
            lent.append(torch.empty(free, dtype=torch.uint8, device="cuda").shape)
        return mean_square(found)

    with nearly_full() as limit:
        backend = Backend()
        found = trained(backend, loss_of=loss_of)
    assert lent
    assert backend.engine.placing.steps > 1, "the layout is used again"
    assert backend.engine.placing.note == ""
    for step, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert all(map(torch.equal, one, other)), f"step {step}"
