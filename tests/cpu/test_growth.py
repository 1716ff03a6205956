"""Memory that a process holds only after planning: graphs are planned again to fit next to it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from outcore import Backend
from outcore.allocators.layout import LIBRARIES_BYTES
from outcore.errors import InfeasibleError, StepError
from outcore.execute.arena import LEAST_BYTES, Arena, own_arena
from outcore.execute.link import FORKED
from outcore.ir.margin import margin_bytes, slack_bytes
from outcore.runtime.budget.growth import CALLS_UNCOUNTED, Growth
from outcore.runtime.budget.plans import Plans
from outcore.runtime.budget.residency import MOST_COLLECTIONS, Residency
from outcore.runtime.graphs.external import ExternalMemory
from outcore.runtime.graphs.history import CallsAtOnce
from outcore.runtime.graphs.status import GraphStatus, GrowthRecord, Refusals
from tests.cpu.training import PROFILED_STEPS, mean_square

pytestmark = pytest.mark.skipif(
    not isinstance(own_arena(), Arena), reason="nobody keeps books without the arena"
)
WIDTH, ROWS = 256, 2048
STEPS = PROFILED_STEPS + 5
MIB = 1 << 20


class Tower(nn.Module):
    """Layers of 256 KiB with activations of 2 MiB; `broken`: with a graph break in the middle."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__()
        self.broken = broken
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:4]:
            x = torch.tanh(layer(x))
        if self.broken:
            torch._dynamo.graph_break()
        for layer in self.layers[4:]:
            x = torch.tanh(layer(x))
        return x


class Training:
    """A tower under a budget, step by step."""

    def __init__(self, backend: Any, *, broken: bool = False) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.module = Tower(broken=broken)
        self.call: Any = self.module
        if backend:
            self.call = torch.compile(self.module, backend=backend, dynamic=False)
        self.x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)

    def step(self, rows: int = ROWS) -> None:
        self.module.zero_grad()
        mean_square(self.call(self.x[:rows])).backward()

    def steps(self, count: int = STEPS, rows: int = ROWS) -> None:
        for _ in range(count):
            self.step(rows)


def test_a_loss_that_begins_later_is_planned_for() -> None:
    """What is made between the two calls is metered again once there is more of it."""
    arena = own_arena()
    assert isinstance(arena, Arena)
    budget = arena.figures().live_bytes + 26 * MIB
    backend = Backend(budget=budget)
    training = Training(backend)
    training.steps()
    parts = (each for _ in range(5) for each in (nn.Linear(WIDTH, WIDTH), nn.Sigmoid()))
    late, held = nn.Sequential(*parts).requires_grad_(False), []
    for _ in range(4):
        training.module.zero_grad()
        made = training.call(training.x)
        loss = mean_square(made) + late(made).mean()
        held.append(arena.figures().live_bytes)
        loss.backward()
        del made, loss
    assert held[0] > budget >= max(held[2:])
    report = backend.report()
    assert report.measured_peak_bytes is not None
    assert held[-1] <= report.measured_peak_bytes <= budget


@pytest.mark.parametrize("broken", [False, True], ids=["one graph", "two graphs"])
def test_what_is_made_between_is_read_once_forward_has_ended(
    monkeypatch: pytest.MonkeyPatch, *, broken: bool
) -> None:
    """Not between the calls of graphs that follow each other."""
    training, reads = Training(Backend(budget="28MiB", policy="pooch"), broken=broken), list[bool]()
    read = Residency.level_and_peak

    def noted(self: Residency, *, anew: bool = False) -> tuple[int, int] | None:
        reads.append(anew)
        return read(self, anew=anew)

    training.steps()
    monkeypatch.setattr(Residency, "level_and_peak", noted)
    training.steps(2)
    assert reads == [True, False] * 2


def inside(backend: Backend) -> None:
    report = backend.report()
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= report.budget_bytes


def grown(backend: Backend) -> list[str]:
    return [note for note in backend.report().notes if "planned again because" in note]


def accumulated(backend: Any, calls: int = 8) -> tuple[list[float], nn.Module]:
    """Train for three optimizer steps; the optimizer's state is made after the graph's plan."""
    training = Training(backend)
    adam = torch.optim.AdamW(training.module.parameters(), lr=1e-3, fused=True)
    losses = []
    for _ in range(3):
        for _ in range(calls):
            loss = mean_square(training.call(training.x)) / calls
            loss.backward()
            losses.append(loss.item())
        adam.step()
        adam.zero_grad()
    return losses, training.module


def test_the_state_of_an_optimizer_that_comes_late() -> None:
    backend = Backend(budget="26MiB", policy="pooch", strict=True)
    seen = accumulated(backend)
    assert backend.report().state == "planned"
    (note,) = grown(backend)
    assert note.startswith("planned again because this process holds 4.0")
    inside(backend)
    expected = accumulated(None)
    assert seen[0] == expected[0]
    assert all(map(torch.equal, seen[1].parameters(), expected[1].parameters()))


def test_what_an_optimizer_takes_after_a_step_is_known() -> None:
    """Adam's temporary tensors, for all parameters at once, and the gradients."""
    backend = Backend(budget="40MiB")
    training = Training(backend)
    adam = torch.optim.Adam(training.module.parameters(), lr=1e-3, foreach=True)
    for _ in range(PROFILED_STEPS):
        training.step()
        adam.step()
    nbytes = sum(parameter.nbytes for parameter in training.module.parameters())
    assert backend.engine is not None
    (graph,) = backend.engine.graphs
    assert 2 * nbytes <= graph.status.after_beyond_bytes <= 2.1 * nbytes


def test_what_came_right_before_a_graph_is_planned_counts() -> None:
    """Gradients accumulate in the profiled steps, and then the optimizer takes its first step."""
    training = Training(backend := Backend(budget="1GiB"))
    optimizer = torch.optim.Adam(training.module.parameters())
    for _ in range(PROFILED_STEPS - 1):
        mean_square(training.call(training.x)).backward()
    optimizer.step()
    mean_square(training.call(training.x)).backward()
    assert backend.engine is not None
    (graph,) = backend.engine.graphs
    assert graph.planned is not None
    parameters = sum(p.nbytes for p in training.module.parameters())
    assert graph.planned.external.base_bytes >= 3 * parameters  # gradients, and two for Adam


def test_where_such_a_state_has_no_room_it_is_said_once() -> None:
    """External memory rises and falls with the gradients; that is no growth."""
    backend = Backend(budget="20MiB", policy="pooch")
    with pytest.warns(UserWarning, match="no plan has room for that") as caught:
        accumulated(backend)
    assert len(caught) == 1


def test_what_fitted_as_it_was_is_moved() -> None:
    backend = Backend(budget="30MiB", policy="pooch", strict=True)
    training = Training(backend)
    training.steps()
    assert backend.report().state == "in-core"
    other = torch.empty(8 * MIB, dtype=torch.uint8)
    training.steps(3)
    assert backend.report().state == "planned"
    assert len(grown(backend)) == 1
    inside(backend)
    del other


def test_what_comes_and_has_room_is_in_the_predicted_peak() -> None:
    """It is counted once; when it is freed, the predicted peak stays."""
    backend = Backend(budget="26MiB", policy="recompute-all", strict=True)
    training = Training(backend)
    training.steps()
    before = backend.report()
    assert before.state == "planned"
    assert before.predicted_peak_bytes is not None
    assert before.budget_bytes - before.predicted_peak_bytes > 3 * MIB
    other = torch.empty(2 * MIB, dtype=torch.uint8)
    assert backend.engine is not None
    backend.engine.metering.forget_peak()
    training.steps(3)
    assert not grown(backend)
    inside(backend)
    after = backend.report()
    assert after.predicted_peak_bytes == before.predicted_peak_bytes + other.nbytes
    assert before.in_core_peak_bytes is not None
    assert after.in_core_peak_bytes == before.in_core_peak_bytes + other.nbytes
    del other
    training.steps(3)
    assert not grown(backend)
    assert backend.report().predicted_peak_bytes == after.predicted_peak_bytes


@pytest.mark.parametrize("broken", [False, True], ids=["one graph", "two graphs"])
def test_all_graphs_are_planned_beside_another_model(*, broken: bool) -> None:
    backend = Backend(budget="27MiB", policy="pooch", strict=True)
    training = Training(backend, broken=broken)
    training.steps()
    assert not grown(backend)
    other = nn.Linear(1024, 768)
    training.steps(3)
    assert grown(backend)
    inside(backend)
    del other


def test_where_there_is_no_plan_it_is_said_once() -> None:
    backend = Backend(budget="31MiB", policy="pooch")
    training = Training(backend, broken=True)
    training.steps()
    other = torch.empty(16 * MIB, dtype=torch.uint8)
    with pytest.warns(UserWarning, match=r"holds 16\.\d MiB more than when a graph was") as caught:
        training.step()
    assert len(caught) == 1
    assert "try " in str(caught[0].message)
    training.steps(3)
    assert any("more than the budget of 31.0 MiB" in note for note in backend.report().notes)
    del other


def test_when_it_has_gone_there_is_a_plan_for_less() -> None:
    backend = Backend(budget="28MiB", policy="pooch")
    training = Training(backend)
    training.steps()
    other = torch.empty(32 * MIB, dtype=torch.uint8)
    with pytest.warns(UserWarning, match="no plan has room"):
        training.step()
    other = torch.empty(8 * MIB, dtype=torch.uint8)
    training.steps(3)
    assert len(grown(backend)) == 1
    inside(backend)
    del other


@pytest.mark.parametrize("broken", [False, True], ids=["one graph", "two graphs"])
def test_graphs_of_other_sizes_notice_it_when_their_turn_comes(*, broken: bool) -> None:
    """Graphs planned before it came were idle since; graphs planned after it have room."""
    backend = Backend(budget="29MiB", policy="pooch", strict=True)
    training = Training(backend, broken=broken)
    training.steps()
    other = torch.empty(4 * MIB, dtype=torch.uint8)
    training.steps(rows=ROWS - 64)
    training.steps(3)
    assert backend.engine is not None
    growths = [graph.status.growth.replans for graph in backend.engine.graphs]
    assert any(growths[: 1 + broken])
    assert not any(growths[1 + broken :])
    inside(backend)
    del other


def test_graphs_of_a_step_make_room_for_each_other() -> None:
    """The first graph cannot make room while the second keeps its plan."""
    backend = Backend(budget="33MiB", policy="pooch", strict=True)
    training = Training(backend, broken=True)
    training.steps()
    other = torch.empty(9 * MIB, dtype=torch.uint8)
    training.steps(3)
    assert grown(backend)
    inside(backend)
    del other


def test_it_is_noticed_while_the_result_of_another_call_is_kept() -> None:
    backend = Backend(budget="27MiB", policy="pooch", strict=True)
    training = Training(backend)
    training.steps()
    assert backend.engine is not None
    (graph,) = backend.engine.registry.active()
    assert graph.planned is not None
    before = graph.planned.external_bytes
    result = mean_square(training.call(training.x[:64]))
    other = torch.empty(4 * MIB, dtype=torch.uint8)
    training.steps(3)
    assert graph.planned.external_bytes >= before + 4 * MIB
    assert not grown(backend), "it came with the other call, for all that is known"
    del result
    training.steps(3)
    assert graph.planned.external_bytes >= before + 4 * MIB
    del other


@pytest.mark.parametrize("broken", [False, True], ids=["one graph", "two graphs"])
def test_with_strict_each_step_is_an_error_until_it_has_gone(*, broken: bool) -> None:
    backend = Backend(budget="28MiB", policy="pooch", strict=True)
    training = Training(backend, broken=broken)
    training.steps()
    other = torch.empty(32 * MIB, dtype=torch.uint8)
    for _ in range(10):
        with pytest.raises(InfeasibleError, match="no plan fits a device budget of 28"):
            training.step()
    del other
    training.steps(3)
    assert not grown(backend)


def test_what_is_no_ones_any_more_is_let_go_instead() -> None:
    backend = Backend(budget="28MiB", policy="pooch", strict=True)
    training = Training(backend)
    training.steps()
    cycle: list[Any] = [torch.empty(32 * MIB, dtype=torch.uint8)]
    cycle.append(cycle)
    del cycle
    training.steps(3)
    assert not grown(backend)


def test_what_grows_on_is_planned_for_ahead() -> None:
    backend = Backend(budget="30MiB", policy="pooch", strict=True)
    training = Training(backend)
    training.steps()
    kept = []
    for _ in range(20):
        kept.append(torch.empty(MIB // 2, dtype=torch.uint8))
        training.step()
    assert len(grown(backend)) == 1
    assert backend.engine is not None
    (graph,) = backend.engine.graphs
    assert graph.status.growth.replans == 3, "and not each time that 2 MiB have come"
    training.steps(2)
    inside(backend)
    kept.clear()


def test_what_came_before_it_is_compiled_anew_is_counted_once() -> None:
    """The old plan has no room for it, so it is not reused: the graph is profiled again."""
    backend = Backend(budget="24MiB", policy="pooch", strict=True)
    training = Training(backend)
    training.steps()
    other = torch.empty(4 * MIB, dtype=torch.uint8)
    torch._dynamo.reset()
    gc.collect()
    training.call = torch.compile(training.module, backend=backend, dynamic=False)
    training.steps()
    assert backend.engine is not None
    (graph,) = backend.engine.registry.active()
    assert graph.planned is not None
    assert 4 * MIB <= graph.planned.external_bytes < 5 * MIB
    inside(backend)
    del other


def test_after_another_profile_growth_counts_from_the_plan_that_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here the layout of a plan turns out to be of no use."""
    backend = Backend(budget="24MiB", policy="pooch", strict=True)
    training = Training(backend)
    training.steps()
    other = torch.empty(4 * MIB, dtype=torch.uint8)
    training.steps(3)
    assert len(grown(backend)) == 1
    assert backend.engine is not None
    (graph,) = backend.engine.graphs
    with monkeypatch.context() as patched:
        patched.setattr(backend.engine.placing, "is_in_vain", lambda _: True)
        training.step()
    assert backend.report().state == "profiling"
    training.steps()
    assert backend.report().state == "planned"
    assert graph.planned is not None
    assert graph.planned.external_bytes >= 4 * MIB
    assert not grown(backend)
    inside(backend)
    more = torch.empty(4 * MIB, dtype=torch.uint8)
    training.steps(3)
    (note,) = grown(backend)
    assert "holds 4.0" in note
    inside(backend)
    del other, more


def test_what_was_refused_to_a_plan_is_not_refused_to_the_one_after_another_profile() -> None:
    """What other graphs asked for stays: they still need it."""
    status = GraphStatus(
        refused=Refusals(2, 3, 3, 3),
        growth=GrowthRecord(2, 2, 1),
        at_once=CallsAtOnce(2, 2),
        left_at_least=5,
        asked_bytes={5},
    )
    status.unsettle()
    assert status == GraphStatus(at_once=CallsAtOnce(2, 2), left_at_least=5, asked_bytes={5})


@pytest.mark.parametrize(
    ("others", "held", "beyond"),
    [
        (30, 70, None),  # as planned: 40 on top of outstanding calls
        (30, 75, None),  # plus the margin
        (30, 76, 46),
        (10, 55, None),
        (10, 56, 46),  # fewer outstanding than planned: others may still come
        (0, 45, None),
        (0, 46, 46),
        (60, 100, None),  # more outstanding: not for `Growth` to notice
    ],
)
@pytest.mark.parametrize("lacking", [0, 20])
def test_calls_that_may_come_yet_leave_no_room_for_what_came(
    others: int, held: int, beyond: int | None, lacking: int
) -> None:
    little = min(lacking, slack_bytes(1000))
    held -= little
    counted: Any = SimpleNamespace(
        base_bytes=lambda *_: held - others,
        with_others_bytes=lambda _: 0,
        others_bytes=lambda *_: others,
        allocated_bytes=lambda: held,
        overlooks_tensors=False,
    )
    plans: Any = SimpleNamespace(lacking_bytes=lambda *_: lacking, bound_memory=lambda: None)
    external = ExternalMemory(base_bytes=40)
    planned = SimpleNamespace(external=external, peak_bytes=1000, layout=None)
    execution: Any = SimpleNamespace(planned=planned, foreseen_bytes=None, uncounted=0)
    graph: Any = SimpleNamespace(status=GraphStatus(refused=Refusals(growth_bytes=0)))
    nothing: Any = None
    settings: Any = SimpleNamespace(budget_bytes=1000, strict=False)
    growth = Growth(settings, nothing, counted, nothing, plans)
    assert growth._base_beyond(graph, execution, ()) == (beyond and beyond - little)
    assert graph.status.growth.unplanned_bytes == (0 if beyond is None else beyond - 40)
    if beyond is None:
        assert execution.foreseen_bytes == 40 - little
        execution.foreseen_bytes = None
        plans.lacking_bytes = lambda *_: -20
        assert growth._base_beyond(graph, execution, ()) is None
        assert execution.foreseen_bytes == 60


@pytest.mark.parametrize("laid", [False, True])
@pytest.mark.parametrize("more", [LIBRARIES_BYTES, LIBRARIES_BYTES + 3 * MIB])
def test_a_layout_has_room_for_what_libraries_keep(*, laid: bool, more: int) -> None:
    """They take it in the first step with the layout. The budget's margin is 2 MiB."""
    allocated = [100 * MIB]
    counted: Any = SimpleNamespace(
        base_bytes=lambda *_: allocated[-1],
        with_others_bytes=lambda _: 0,
        others_bytes=lambda *_: 0,
        allocated_bytes=lambda: allocated[-1],
        collect=lambda: False,
        overlooks_tensors=False,
    )
    plans: Any = SimpleNamespace(lacking_bytes=lambda *_: 0, bound_memory=lambda: None)
    external = ExternalMemory(base_bytes=100 * MIB)
    layout = object() if laid else None
    planned = SimpleNamespace(external=external, peak_bytes=400 * MIB, layout=layout)
    execution: Any = SimpleNamespace(planned=planned, foreseen_bytes=None, uncounted=0)
    graph: Any = SimpleNamespace(status=GraphStatus(refused=Refusals(growth_bytes=0)))
    nothing: Any = None
    settings: Any = SimpleNamespace(budget_bytes=400 * MIB, strict=True)
    growth = Growth(settings, nothing, counted, nothing, plans)
    assert growth._base_beyond(graph, execution, ()) is None
    allocated.append(allocated[-1] + more)
    beyond = growth._base_beyond(graph, execution, ())
    assert (beyond is None) == (laid and more == LIBRARIES_BYTES)
    assert graph.status.growth.unplanned_bytes == (
        0 if beyond is None else more - LIBRARIES_BYTES * laid
    )


def test_what_is_no_ones_any_more_is_let_go_in_each_of_some_steps() -> None:
    """Once per step, however many graphs it has."""
    nothing: Any = None
    found = [0]

    def collect() -> bool:
        found[-1] += 1
        return found[-1] == 1

    held: Any = SimpleNamespace(collect=collect)
    growth = Growth(nothing, nothing, held, nothing, nothing)
    for step in range(MOST_COLLECTIONS + 2):
        found.append(0)
        assert [growth._collected() for _ in range(20)] == [step < MOST_COLLECTIONS, *[False] * 19]


def test_growth_may_use_the_margin_up() -> None:
    backend = Backend(budget="28MiB", policy="pooch", strict=True)
    training = Training(backend)
    training.steps()
    before = backend.report()
    assert before.predicted_peak_bytes is not None
    left = before.budget_bytes - before.predicted_peak_bytes + margin_bytes(before.budget_bytes)
    held = torch.zeros(left // 4 - 1024)
    training.steps(3)
    after = backend.report()
    assert not grown(backend)
    assert after.predicted_peak_bytes == after.budget_bytes
    del held


def many_small() -> list[torch.Tensor]:
    """The arena does not serve them."""
    return [torch.zeros(LEAST_BYTES // 8) for _ in range(8 * MIB // LEAST_BYTES)]


def of_numpy() -> torch.Tensor:
    """No allocator of torch reports it."""
    return torch.from_numpy(np.zeros(4 * MIB, np.uint8))


@pytest.mark.parametrize(("make", "calls"), [(many_small, 1), (of_numpy, CALLS_UNCOUNTED)])
def test_whatever_tensors_hold_is_counted(make: Callable[[], object], calls: int) -> None:
    backend = Backend(budget="26MiB", policy="pooch", strict=True)
    training = Training(backend)
    training.steps()
    assert not grown(backend)
    held = make()
    training.steps(calls)
    (note,) = grown(backend)
    assert "holds 4.0" in note
    inside(backend)
    del held


def test_growth_in_a_forked_process_is_not_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the step cannot run at all: pytest makes an error of a warning about memory."""

    def forked(*_: Any) -> int:
        raise StepError(reason=FORKED)

    training = Training(Backend(budget="26MiB", policy="pooch"))
    training.steps()
    monkeypatch.setattr(Plans, "beside_more", forked)
    held = torch.zeros(4 * MIB, dtype=torch.uint8)
    with pytest.raises(StepError, match="was forked from"):
        training.steps(1)
    del held


def test_nothing_is_counted_while_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(Backend(budget="28MiB", policy="pooch", strict=True))
    training.steps()

    def counted(*_: Any) -> int:
        raise AssertionError

    monkeypatch.setattr(Residency, "external_bytes", counted)
    training.steps(3)
