"""What waiting calls hold is moved away when another call finds too little room beside them."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from outcore import Backend
from outcore.errors import HostMemoryError, InfeasibleError, SpillError
from outcore.execute.arena import Arena, own_arena
from outcore.ir.hardware import Tier
from outcore.ir.program import Program
from outcore.runtime.budget.eviction import Eviction, choose
from outcore.runtime.conduct.first_steps import AGAIN
from tests.cpu.test_asked_room import PATIENCE, Towers, graphs, peak_bytes
from tests.cpu.test_budget_kept import Tower
from tests.cpu.training import mean_square

Array = np.ndarray[Any, Any]

BUDGET = "7.5MiB"
ALONE = 8
"""Steps of one tower, after which it is planned."""


def eviction(backend: Backend) -> Eviction:
    assert backend.engine is not None
    return backend.engine.eviction


def move_all(backend: Backend) -> None:
    """Move all away that can be."""
    eviction(backend).move_away(graphs(backend)[0], 1 << 40)


def inside(towers: Towers, order: Sequence[int], more_bytes: int = 0) -> None:
    """Run a step, which must stay inside the budget; weights and inputs count.

    `more_bytes`: by how much it may exceed it.
    """
    engine, arena = towers.backend.engine, own_arena()
    if not isinstance(arena, Arena) or engine is None:
        pytest.skip("nobody keeps books without the arena")
    towers.modules.zero_grad()
    towers.backend.report()  # ends the session of the last step
    apart = engine.residency.resident_bytes() - arena.figures().live_bytes
    assert peak_bytes(lambda: towers.step(order)) + apart <= (
        engine.settings.budget_bytes + more_bytes
    )


def gradients(towers: Towers) -> list[Tensor]:
    found = [p.grad for p in towers.modules.parameters() if p.grad is not None]
    return [gradient.clone() for gradient in found]


def expected(towers: Towers, *orders: Sequence[int]) -> list[list[Array]]:
    """The gradients of steps in plain PyTorch, in memory that is not counted."""
    calls, towers.calls = towers.calls, list(towers.modules)
    found = []
    for order in orders:
        towers.step(order)
        found.append([gradient.numpy().copy() for gradient in gradients(towers)])
    towers.calls = calls
    towers.modules.zero_grad()
    return found


def same(found: list[Tensor], plain: list[Array]) -> bool:
    return len(found) == len(plain) and all(map(np.array_equal, found, plain))


def alone(budget: str = BUDGET, **options: Any) -> Towers:
    """Two towers, of which one is planned, and fills the budget."""
    towers = Towers(budget, **options)
    towers.steps((0,), times=ALONE)
    return towers


def test_a_graph_that_comes_late_is_profiled_at_once() -> None:
    towers = alone()
    (plain,) = expected(towers, (0, 1))
    towers.step((0, 1))
    assert same(gradients(towers), plain)
    assert eviction(towers.backend).times
    note = towers.backend.report().notes[-1]
    assert note == eviction(towers.backend).note
    assert "to the disk" in note


def test_it_happens_no_more_once_graphs_hold_less() -> None:
    towers = alone()
    towers.step((0, 1))
    times = eviction(towers.backend).times
    towers.steps((0, 1), times=PATIENCE)
    assert eviction(towers.backend).times == times
    inside(towers, (0, 1))


@pytest.mark.parametrize(
    ("before", "order", "budget"),
    [
        (((0, 1),), (0, 1, 1, 0), "7MiB"),
        (((1,), (0,)), (0, 1, 0), "10MiB"),  # what is made between the two calls counts, too
    ],
)
def test_another_order_of_planned_calls_stays_inside_the_budget(
    before: Sequence[Sequence[int]], order: Sequence[int], budget: str
) -> None:
    towers = Towers(budget)
    (plain,) = expected(towers, order)
    towers.steps(*before, times=ALONE)
    for _ in range(2):
        inside(towers, order)
        assert same(gradients(towers), plain)
    assert eviction(towers.backend).times


def test_one_step_with_more_calls_costs_later_ones_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held is counted only while more calls are outstanding than planned for."""
    towers = Towers("16MiB")
    towers.steps((0, 1), times=ALONE)
    towers.step((0, 1, 1))
    towers.steps((0, 1), times=4)
    counted = list[int]()
    lacking = Eviction._lacking

    def counting(self: Eviction, ahead_bytes: int) -> int:
        counted.append(ahead_bytes)
        return lacking(self, ahead_bytes)

    monkeypatch.setattr(Eviction, "_lacking", counting)
    towers.steps((0, 1), times=4)
    assert not counted
    towers.step((0, 1, 1))
    assert counted


class Scales(nn.Module):
    """Large weights and small activations."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 8192, bias=False)
        self.down = nn.Linear(8192, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        few = x[:16]
        return torch.cat([few + self.down(torch.relu(self.up(few))), x[16:]])


def test_gradients_of_calls_that_have_come_back_in_the_step_are_held_too() -> None:
    """Now and then a step has one more call, for which there is no plan."""
    towers = Towers("24MiB", (partial(Tower, layers=24), Scales), policy="swap-all")
    towers.steps((0, 1), times=ALONE + 2)
    for _ in range(2):
        inside(towers, (0, 1, 1), more_bytes=1 << 20)
        towers.steps((0, 1), times=20)


def test_a_step_with_a_leaner_program_gives_a_peak() -> None:
    towers = Towers("9.5MiB", policy="keep-all")
    towers.steps((1,), (0,), times=ALONE)
    assert towers.backend.engine is not None
    towers.backend.engine.metering.forget_peak()
    towers.steps((0, 1, 0), times=4)
    assert eviction(towers.backend).leaner
    assert towers.backend.report().measured_peak_bytes is not None


def test_a_full_host_is_asked_again_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a leaner program has room in the outer tiers may differ from call to call."""
    towers, reserve = Towers("9.5MiB", policy="keep-all"), Eviction._reserve
    (plain,) = expected(towers, (0, 1, 0))
    towers.steps((1,), (0,), times=ALONE)

    def full(self: Eviction, program: Program | None) -> None:
        executions = (graph.execution for graph in graphs(towers.backend))
        if any(each and each.lean and each.lean.program is program for each in executions):
            raise HostMemoryError(reason="it is full", needed_bytes=1)
        reserve(self, program)

    with monkeypatch.context() as patch:
        patch.setattr(Eviction, "_reserve", full)
        towers.step((0, 1, 0))
    assert not eviction(towers.backend).leaner
    towers.modules.zero_grad()
    towers.step((0, 1, 0))
    assert eviction(towers.backend).leaner
    assert same(gradients(towers), plain)


def test_a_call_that_needs_too_much_even_then_runs_a_leaner_program() -> None:
    """The first call fills the budget as it comes back. Then others have left gradients."""
    towers = Towers("9.5MiB", policy="keep-all")
    (plain,) = expected(towers, (0, 1, 0))
    towers.steps((1,), (0,), times=ALONE)
    gradients_bytes = sum(p.nbytes for p in towers.modules.parameters())
    inside(towers, (0, 1, 0), gradients_bytes)
    assert same(gradients(towers), plain)
    assert eviction(towers.backend).leaner
    assert "slower program" in towers.backend.report().notes[-1]


def test_any_orders_at_any_time() -> None:
    """Some calls never come back."""
    rng = random.Random(0)
    towers = Towers("7MiB")
    orders = [tuple(rng.choices((0, 1), k=rng.randint(1, 4))) for _ in range(30)]
    plain = dict(zip(orders, expected(towers, *orders), strict=True))
    towers.steps((0,), (1,), times=ALONE)
    waiting: list[Tensor] = []
    for order in orders:
        try:
            if rng.random() < 0.3:
                waiting = [towers.calls[order[0]](towers.x.detach().requires_grad_())]
            towers.step(order)
        except InfeasibleError:  # planned with too little room
            towers.modules.zero_grad()
        else:
            assert same(gradients(towers), plain[order])
        if rng.random() < 0.5:
            waiting.clear()
    assert eviction(towers.backend).times
    assert waiting is not None


@contextmanager
def moved_away(backend: Backend) -> Iterator[None]:
    """Everything that waiting calls hold is moved away as any of them comes back."""
    moving: Any = eviction(backend)
    moving.before_backward = lambda graph, _: moving.move_away(graph, 1 << 40)
    try:
        yield
    finally:
        del moving.before_backward


@pytest.mark.parametrize("order", [(0,), (1, 0), (0, 1, 1)])
def test_what_was_moved_away_comes_back(order: Sequence[int]) -> None:
    towers = Towers("16MiB")
    (plain,) = expected(towers, order)
    towers.steps(order, times=ALONE)
    with moved_away(towers.backend):
        towers.step(order)
    assert same(gradients(towers), plain)
    assert eviction(towers.backend).times


def test_another_backward_call_finds_it_again() -> None:
    towers = Towers("16MiB")
    towers.steps((0,), times=ALONE)

    def twice(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        towers.modules.zero_grad()
        loss = mean_square(call(towers.x.detach().requires_grad_()))
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(towers)

    plain = [gradient.numpy() for gradient in twice(towers.modules[0])]
    twice(towers.calls[0])
    with moved_away(towers.backend):
        assert same(twice(towers.calls[0]), plain)


def test_a_call_that_never_comes_back_leaves_nothing_behind() -> None:
    towers = alone()
    engine = towers.backend.engine
    assert engine is not None
    result = towers.calls[0](towers.x.detach().requires_grad_())
    move_all(towers.backend)
    (store,) = engine.stores.all()
    assert store.private_bytes == 0
    ((lane, *_),) = store.away
    del result, store
    gc.collect()
    assert not len(engine.stores)
    with pytest.raises(SpillError):
        lane.wait(lane.copy_in(0)[1])


def test_without_room_on_the_disk_things_stay_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then the step is an error, and the next one has room."""
    towers = alone()
    (plain,) = expected(towers, (0, 1))
    monkeypatch.setattr(Eviction, "_room_bytes", lambda *_: 0)
    with pytest.raises(InfeasibleError) as raised:
        towers.step((0, 1))
    assert AGAIN in raised.value.__notes__
    assert not eviction(towers.backend).times
    del raised
    towers.step((0, 1))
    assert same(gradients(towers), plain)


def test_an_error_on_the_way_back_is_that_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    towers = alone()
    (plain,) = expected(towers, (0, 1))
    engine = towers.backend.engine
    assert engine is not None
    open_lane = type(engine.driver).open_lane
    opened: list[Any] = []

    def noted(*args: Any) -> Any:
        opened.append(open_lane(*args))
        return opened[-1]

    monkeypatch.setattr(type(engine.driver), "open_lane", noted)
    result = towers.calls[0](towers.x.detach().requires_grad_())
    move_all(towers.backend)
    opened[-1].close()
    with pytest.raises(SpillError):
        mean_square(result).backward()
    del result
    towers.step((0, 1))
    assert same(gradients(towers), plain)


def test_what_others_hold_stays() -> None:
    """Inputs and results of calls are not moved: nothing would be freed."""
    torch._dynamo.reset()
    backend = Backend(budget="16MiB", policy="keep-all")
    module = Tower(layers=2)
    call = torch.compile(module, backend=backend, dynamic=False)
    x = torch.randn(2048, 64, requires_grad=True)
    for _ in range(ALONE):
        mean_square(call(x)).backward()
    result = call(x)
    engine = backend.engine
    assert engine is not None
    (store,) = engine.stores.all()
    held = sum(t.nbytes for t in store.crossing if isinstance(t, Tensor))
    move_all(backend)
    kept = sum(t.nbytes for t in store.crossing if isinstance(t, Tensor))
    assert held - kept == store.executable.private_bytes == store.away_bytes
    assert kept > 0
    mean_square(result).backward()


def test_room_on_the_disk_is_left_to_plans() -> None:
    towers = alone(disk_budget="64MiB", policy="swap-all")
    (graph,) = graphs(towers.backend)
    assert graph.planned is not None
    needed = graph.planned.predicted.peak(Tier.DISK)
    assert needed > 0
    assert eviction(towers.backend)._room_bytes(graph, Tier.DISK) == (64 << 20) - needed
    towers.steps((0, 1), times=PATIENCE)
    plans = [each.planned for each in graphs(towers.backend)]
    needed = sum(plan.predicted.peak(Tier.DISK) for plan in plans if plan is not None)
    for each in graphs(towers.backend):
        assert eviction(towers.backend)._room_bytes(each, Tier.DISK) == (64 << 20) - needed


@pytest.mark.parametrize(
    ("nbytes", "chosen"),
    [
        (0, []),
        (1, ["small"]),
        (10, ["small"]),
        (11, ["middle"]),
        (30, ["middle", "small"]),
        (45, ["large"]),
        (500, ["middle", "small", "large"]),
    ],
)
def test_little_more_is_moved_than_is_lacking(nbytes: int, chosen: list[str]) -> None:
    sizes = {"small": 10, "middle": 20, "large": 100}
    names = dict(enumerate(sizes))
    found = choose(dict(enumerate(sizes.values())), nbytes)
    assert sorted(names[key] for key in found) == sorted(chosen)
