"""Graphs that have no plan next to what others hold, and which graphs make room for them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from outcore import Backend
from outcore.errors import InfeasibleError
from outcore.execute.arena import Arena, own_arena
from outcore.measure.events import EventMeter
from outcore.runtime.budget.contention import Contention
from outcore.runtime.graphs.graph import PlannedGraph
from outcore.runtime.graphs.status import GraphStatus, Refusals
from outcore.runtime.planning.shares import Shares
from tests.cpu.test_budget_kept import Tower
from tests.cpu.training import mean_square

MIB = 1 << 20
PATIENCE = 20
"""Steps within which a graph has a plan or an error: enough for several rounds of profiling."""


class Scores(nn.Module):
    """Returns a loss over many classes, and the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 512)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(x)
        return cross_entropy(scores, y), scores


class Shift(nn.Module):
    """Its backward has no op: gradients are its tangents, and it keeps nothing for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(2048, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def compiled(backend: Backend, *modules: nn.Module) -> list[Any]:
    """The modules, each compiled as a separate graph."""
    return [torch.compile(m, backend=backend, dynamic=False) for m in modules]


def graphs(backend: Backend) -> list[PlannedGraph]:
    return [] if backend.engine is None else backend.engine.graphs


def test_one_that_asks_a_graph_that_cannot_hold_less_is_not_profiled_for_ever() -> None:
    """From step 8 on, 2 MiB made between the two calls do not fit: no plan, which is an error."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    modules = nn.ModuleList((Shift(), Tower(layers=24)))
    backend = Backend(budget="5MiB", policy="pooch")
    shift, tower = compiled(backend, *modules)
    x = torch.randn(2048, 64)

    def step(*, joined: bool, nbytes: int = 0) -> None:
        result = shift(x)
        made = torch.empty(nbytes, dtype=torch.uint8)
        result = tower(result) if joined else result
        del made
        mean_square(result).backward()
        modules.zero_grad()

    for i in range(8):
        step(joined=i > 5)

    def steps() -> None:
        for _ in range(PATIENCE):
            step(joined=True, nbytes=2 * MIB)

    with pytest.raises(InfeasibleError):
        steps()


def test_one_that_asks_a_graph_that_is_called_no_more_is_not_profiled_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call of that graph stays outstanding: its result is kept, and trained on."""
    monkeypatch.setattr(Shares, "_seen_to_take", lambda *_: 0)
    torch._dynamo.reset()
    torch.manual_seed(0)
    modules = nn.ModuleList((Tower(layers=12), Scores()))
    backend = Backend(budget="24MiB", policy="pooch", strict=True)
    tower, scores = compiled(backend, *modules)
    x, y = torch.randn(2048, 64), torch.arange(2048) % 512

    def step(given: Tensor) -> None:
        scores(given, y)[0].backward()
        modules.zero_grad()

    for _ in range(4):
        step(tower(x))
    kept = tower(x)
    scores(kept, y)  # no backward for this call either
    while not any(graph.status.asked_bytes for graph in graphs(backend)):
        step(tower(x))
    try:
        for _ in range(PATIENCE):
            step(kept.detach().requires_grad_())
    except InfeasibleError:
        return
    assert all(graph.planned is not None for graph in graphs(backend))


def peak_bytes(step: Callable[[], None]) -> int:
    """The most bytes held in a step, including all that was held before it."""
    arena, meter = own_arena(), EventMeter()
    if not isinstance(arena, Arena):
        pytest.skip("nobody keeps books without the arena")
    before, start = arena.figures().live_bytes, time.time_ns()
    assert meter.start()
    step()
    reading = meter.stop()
    assert reading is not None
    return before + reading.peak_bytes(start, time.time_ns())


TWO = partial(Tower, layers=12), partial(Tower, layers=13)


class Towers:
    """Two towers or other `modules`, each a graph; steps call some of them in a given order."""

    def __init__(
        self, budget: str, modules: Sequence[Callable[[], nn.Module]] = TWO, **options: Any
    ) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.modules = nn.ModuleList(make() for make in modules)
        self.backend = Backend(budget=budget, **{"policy": "pooch", **options})
        self.calls = compiled(self.backend, *self.modules)
        self.x = torch.randn(2048, 64)

    def step(self, order: Sequence[int]) -> None:
        self.modules.zero_grad()
        result = self.x.detach().requires_grad_()
        for each in order:
            result = self.calls[each](result)
        mean_square(result).backward()

    def steps(self, *orders: Sequence[int], times: int) -> None:
        for _ in range(times):
            for order in orders:
                self.step(order)

    def inside(self, order: Sequence[int]) -> None:
        self.backend.report()  # ends the session of the last step
        budget = self.backend.report().budget_bytes
        assert peak_bytes(lambda: self.step(order)) <= budget


@pytest.mark.parametrize("apart", [0, 8])
def test_planned_graphs_that_come_to_wait_for_each_other_make_room(apart: int) -> None:
    """Each alone may hold 4 MiB; together, from the first step on, they fit the budget."""
    towers = Towers("7.5MiB")
    towers.steps((1,), (0,), times=apart)
    towers.steps((0, 1), times=PATIENCE)
    towers.inside((0, 1))


@pytest.mark.parametrize("alone", [0, 8])
def test_a_graph_that_comes_later_is_left_room_to_be_profiled(alone: int) -> None:
    """What the planned graph holds is moved away once; from its next call on it holds less."""
    towers = Towers("7.5MiB")
    towers.steps((0,), times=alone)
    towers.steps((0, 1), times=PATIENCE)
    assert all(graph.planned is not None for graph in graphs(towers.backend))
    towers.inside((0, 1))


def refusal(lacking_bytes: int) -> InfeasibleError:
    return InfeasibleError(
        budget_bytes=1000, floor_bytes=1000 + lacking_bytes, op="op", needed_bytes=1
    )


class Asked:
    """A planned graph that can leave `can_leave_bytes` to others, and the graphs that ask it."""

    def __init__(self, can_leave_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            "outcore.runtime.budget.contention.kept_bytes", lambda _: 1000 - self.left_bytes
        )
        self.can_leave_bytes = can_leave_bytes
        self.left_bytes: int = 0
        self.status: Any = GraphStatus()
        self.execution: Any = SimpleNamespace(planned=self, trial=None)
        self.planned = self
        graph: Any = self
        registry: Any = SimpleNamespace(
            graphs=[], active=lambda: [graph], outstanding=lambda _: {}, keeps=True
        )
        plans: Any = SimpleNamespace(leaving_more=self.leaving_more)
        self.contention = Contention(registry, registry, plans)

    def leaving_more(self, _: Any, __: Any, more_bytes: int) -> int:
        if more_bytes > self.can_leave_bytes:
            raise refusal(more_bytes)
        return more_bytes

    def settle(self, left_bytes: int) -> Any:
        self.left_bytes = left_bytes
        return self.execution

    def ask(self, lacking_bytes: int) -> bool:
        """Have a graph that lacks `lacking_bytes` ask it."""
        graph: Any = SimpleNamespace(observed={self}, status=GraphStatus(), asked={})
        return self.contention.make_room(graph, refusal(lacking_bytes))

    def call(self) -> None:
        """Begin its next call."""
        graph: Any = self
        self.contention.leaving_more(graph, self.execution)


def test_a_smaller_request_is_met_where_a_larger_one_was_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Asked(100, monkeypatch)
    assert asked.ask(150)
    asked.call()
    assert asked.left_bytes == 0
    assert not asked.ask(150), "it could not, and cannot"
    assert asked.ask(50)
    asked.call()
    assert 50 <= asked.left_bytes <= 100


def test_a_smaller_request_is_met_beside_a_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(100, monkeypatch)
    assert asked.ask(150)
    assert asked.ask(50)
    asked.call()
    if not asked.left_bytes:
        assert asked.ask(50)
        asked.call()
    assert 50 <= asked.left_bytes <= 100


class Bulge(nn.Module):
    """Its hidden layer is much wider than its input and output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.there, self.back = nn.Linear(64, width), nn.Linear(width, 64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.back(torch.tanh(self.there(x)))
        return result


@pytest.mark.parametrize("changes", [False, True])
def test_graphs_do_with_little_more_where_their_order_changes(*, changes: bool) -> None:
    """In one order 28 MiB are enough; in-core they need 40."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    modules = nn.ModuleList(Bulge(4096 + 64 * i) for i in range(3))
    backend = Backend(budget="36MiB", policy="pooch", strict=True)
    calls, x = compiled(backend, *modules), torch.randn(512, 64)

    def step(order: Sequence[Any]) -> None:
        modules.zero_grad()
        result = x.detach().requires_grad_()
        for call in order:
            result = call(result)
        mean_square(result).backward()

    for i in range(PATIENCE):
        step(calls[::-1] if changes and i % 2 else calls)
    assert all(graph.planned is not None for graph in graphs(backend))
    backend.report()  # ends the session of the last step
    budget = backend.report().budget_bytes
    for order in (calls, calls[::-1]):
        assert peak_bytes(partial(step, order)) <= budget


@pytest.mark.parametrize("budget", ["5MiB", "5.5MiB", "6MiB", "7MiB"])
def test_graphs_that_alternate_need_no_more_than_they_take(budget: str) -> None:
    """What waits as one of them runs is part of what it met, and is not counted once more."""
    towers = Towers(budget)
    towers.steps((0, 1, 0), times=PATIENCE)
    towers.inside((0, 1, 0))


def test_a_graph_that_takes_turns_with_another_tells_of_a_budget_at_least() -> None:
    """How much one needs depends on the plan of the other, which was made for this budget."""
    with pytest.raises(InfeasibleError, match="is at least"):
        Towers("4.5MiB").steps((0, 1, 0), times=PATIENCE)


def test_a_plan_that_is_not_found_keeps_nothing_of_its_step() -> None:
    """Planned graphs become outstanding together, and there is no plan for that."""
    towers = Towers("5.5MiB")
    towers.steps((1,), (0,), times=8)
    given, left = [], []

    def step() -> None:
        towers.modules.zero_grad()
        x = towers.x.detach().requires_grad_()
        given.append(ref(x))
        first, second = towers.calls
        mean_square(first(second(first(x)))).backward()

    gc.collect()
    gc.disable()
    try:
        for _ in range(PATIENCE):
            step()
            left += [given[-1]() is not None]
        assert any(graph.status.refused != Refusals() for graph in graphs(towers.backend))
        assert not any(left)
    finally:
        gc.enable()


def test_what_grows_is_noticed_past_the_mixes_that_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory found with several outstanding calls is not held when a step's first call begins."""
    monkeypatch.setattr("outcore.runtime.graphs.observations.MOST_MIXES", 1)
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = nn.ModuleList([Tower(layers=6)])
    backend = Backend(budget="12MiB", policy="pooch", strict=True)
    (call,), x = compiled(backend, *module), torch.randn(2048, 64)

    def step() -> None:
        module.zero_grad()
        results = [call(x.detach().requires_grad_()).repeat(1, 2)[:, 64:] for _ in range(3)]
        mean_square(sum(results)).backward()

    for _ in range(8):
        step()
    kept = torch.empty(4 * MIB, dtype=torch.uint8)
    try:
        for _ in range(PATIENCE):
            step()
    except InfeasibleError:  # noticed
        return
    backend.report()  # ends the session of the last step
    assert peak_bytes(step) <= backend.report().budget_bytes
    del kept


@pytest.mark.parametrize("dropped", [True, False])
def test_what_a_dropped_call_begins_with_is_not_added_to_what_others_wait_for(
    *, dropped: bool
) -> None:
    """A graph is called twice in a step: after, and before, what plain PyTorch keeps.

    If the result of its first call is only read, as of an encoder whose codes are trained on, the
    two are never held at once. Otherwise they are.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    modules = nn.ModuleList((Tower(layers=10), Tower(layers=1), Tower(layers=11)))
    backend = Backend(budget="32MiB", policy="pooch")
    first, last, (shared,) = modules[0], modules[2], compiled(backend, modules[1])
    x = torch.randn(2048, 64).requires_grad_()

    def step() -> None:
        modules.zero_grad()
        given = shared(first(x))
        if dropped:
            given = given.detach().requires_grad_()
        mean_square(last(shared(given))).backward()

    for _ in range(PATIENCE):
        step()
    report = backend.report()
    assert all(graph.planned is not None for graph in graphs(backend))
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    excess = report.predicted_peak_bytes / report.measured_peak_bytes
    assert 1 <= excess < 1.1
