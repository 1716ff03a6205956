"""Whole steps that compute on the stage, with every access of an op checked for races."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outcore import Backend, out_of_process, worker
from outcore.allocators import Card, Space, lay_out, requests
from outcore.allocators.expandable import ExpandableSegments
from outcore.errors import StepError
from outcore.execute import Driver, Executable, Lane
from outcore.execute.placed import PlacedLane
from outcore.execute.queued import QueuedDriver
from outcore.ir.hardware import Tier
from outcore.ir.layout import Layout
from outcore.ir.problem import Problem
from outcore.ir.program import Copy, Program, Run
from outcore.ir.trace import Role
from outcore.runtime import runner
from outcore.runtime.budget import engine, placing
from outcore.runtime.budget.placing import Placing
from outcore.runtime.graphs.drift import Drift
from outcore.runtime.planning import solving
from outcore.runtime.runner import Runner
from outcore.runtime.settings import options
from outcore.runtime.step import versions
from tests.cpu.queues import LateDevice, RaceError, Watched
from tests.cpu.test_drift import TickingDevice
from tests.cpu.training import (
    PROFILED_STEPS,
    Away,
    Deep,
    Normed,
    Small,
    answered_here,
    away,
    back,
    batch,
    mean_square,
    same,
    snapshot,
)

MIB = 1 << 20
STEPS = PROFILED_STEPS + 4


class Wide(nn.Module):
    """Weights of 2 MiB, with gradients of the same size; the input has a gradient, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(768, 768) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        for layer in self.layers:
            x = torch.relu_(layer(x))
        made: Tensor = x
        return made


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "deep": (partial(Deep, 16), lambda: torch.randn(16, 2 * MIB // 64), 60),
    "small": (Small, lambda: batch(0, 16, 64), 54),
    "normed": (Normed, lambda: batch(0, 8, 64), 34),
    "wide": (Wide, lambda: torch.randn(2048, 768).requires_grad_(), 100),
}


def anywhere(problem: Problem, program: Program, space: Space) -> Layout | None:
    """A layout of any size; `space` has the budget, and the gradients after a step."""
    gradients = sum(b.nbytes for b in problem.trace.buffers if b.role is Role.PARAM)
    assert space.after_bytes >= gradients
    assert space.budget_bytes == problem.hardware.capacity(Tier.DEVICE)
    return lay_out(problem, program, Space(1 << 40))


class Watch:
    """Enters the mode `Watched`, unless it is entered already."""

    def __init__(self, device: LateDevice) -> None:
        self.device, self.within = device, False

    @contextmanager
    def watching(self) -> Iterator[None]:
        if self.within:
            yield
            return
        self.within = True
        try:
            with Watched(self.device):
                yield
        finally:
            self.within = False


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """A device that is almost full, on which every step uses a layout, on the stage.

    Calls are watched if their graph is planned: nothing is measured or compiled in them.
    """
    device = TickingDevice()
    watch = Watch(device)
    monkeypatch.setattr(engine, "open_driver", lambda _, folder, __: QueuedDriver(device, folder))
    monkeypatch.setattr(placing, "MOST_LOST", 1 + STEPS)
    monkeypatch.setattr(solving, "place_out_of_process", anywhere)
    monkeypatch.setattr(out_of_process, "lay_out", anywhere)
    monkeypatch.setattr(out_of_process, "lacking_bytes", lambda *_: 0)
    monkeypatch.setattr(worker, "ask_each", answered_here)
    monkeypatch.setattr(solving, "prepare", lambda: None)
    for name in ("forward", "backward"):
        method = getattr(Runner, name)

        @wraps(method)
        def watched(self: Runner, args: list[Any], method: Any = method) -> Any:
            if self.graph.planned is None:
                return method(self, args)
            with watch.watching():
                return method(self, args)

        monkeypatch.setattr(Runner, name, watched)
    return watch


def trained(
    case: str, backend: Any, watch: Watch | None = None, *, again: bool = False
) -> list[Away]:
    gc.collect()  # memory that is still held would count
    torch._dynamo.reset()
    torch.manual_seed(0)
    make, data, _ = CASES[case]
    module, args = make(), data()
    compiled = torch.compile(module, backend=backend)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    seen = []
    for step in range(STEPS):
        torch.manual_seed(step)
        result = compiled(args)
        with watch.watching() if watch and step > PROFILED_STEPS else nullcontext():
            loss = mean_square(result)
            del result
            loss.backward(retain_graph=again)
            if again:
                loss.backward()
            seen.append(away(snapshot(module, loss)))
            optimizer.step()
            optimizer.zero_grad()
            args.grad = None
    return seen


@pytest.fixture
def moved_away(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What a call that waits holds is moved away before it comes back. Returns the bytes."""
    backward, moved = Runner.backward, []

    def first(self: Runner, args: list[Any]) -> Any:
        if self.graph.planned is not None:
            self.engine.placing.called()  # as another call would
            moved.append(self.engine.eviction.move_away(self.graph, 1 << 40))
        return backward(self, args)

    monkeypatch.setattr(Runner, "backward", first)
    return moved


def run(
    case: str,
    watch: Watch,
    monkeypatch: pytest.MonkeyPatch,
    *,
    again: bool = False,
    backend: Any = None,
) -> list[Away]:
    budget = CASES[case][2] * MIB
    card = Card(budget, ExpandableSegments())
    monkeypatch.setattr(options, "_card", lambda _: card)
    backend = backend or Backend(budget=budget)
    found = trained(case, backend, watch, again=again)
    planned = backend.engine.graphs[0].planned
    assert planned is not None
    assert planned.plan.moves
    assert planned.layout is not None
    return found


@pytest.mark.parametrize(("case", "again"), [*((case, False) for case in CASES), ("deep", True)])
def test_all_is_ordered(
    case: str, again: bool, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(case, "aot_eager", again=again)
    found = run(case, watch, monkeypatch, again=again)
    assert same(list(map(back, found)), list(map(back, expected)))
    assert watch.device.clocks["stage"]["stage"] > 1
    watch.device.check_given_back()


def test_what_is_moved_away_is_ordered(
    watch: Watch, moved_away: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained("small", "aot_eager")
    found = run("small", watch, monkeypatch)
    assert same(list(map(back, found)), list(map(back, expected)))
    assert watch.device.clocks["stage"]["stage"] > 1
    assert all(moved_away)
    watch.device.check_given_back()


@pytest.mark.parametrize("name", ["current", "event", "record"])
def test_an_interrupt_after_the_last_op_of_forward_gives_memory_back_in_order(
    name: str, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of the call may be under way, and nothing but the call knows of them yet."""
    budget = CASES["small"][2] * MIB
    monkeypatch.setattr(options, "_card", lambda _: Card(budget, ExpandableSegments()))
    method, versions_of, over = getattr(watch.device, name), versions.versions_of, [False]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if over[0]:
            over[0] = False
            raise KeyboardInterrupt
        return method(*args, **kwargs)

    def noted(*args: Any) -> Any:
        over[0] = interrupts
        return versions_of(*args)

    monkeypatch.setattr(runner, "versions_of", noted)
    monkeypatch.setattr(watch.device, name, interrupted)
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, x, interrupts = Small(), CASES["small"][1](), False
    call = torch.compile(module, backend=Backend(budget=budget, drift="off"), dynamic=False)

    def step() -> Away:
        module.zero_grad()
        torch.manual_seed(1)
        result = call(x)
        with watch.watching():
            mean_square(result).backward()
        return away([p.grad for p in module.parameters() if p.grad is not None])

    for _ in range(STEPS):
        expected = step()
    interrupts = True
    with pytest.raises(KeyboardInterrupt):
        step()
    interrupts = False
    gc.collect()
    watch.device.check_given_back()
    assert same([back(step())], [back(expected)])
    watch.device.check_given_back()


def test_timed_steps_use_the_layout(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[bool, bool]] = []
    open_lane = Placing.open_lane

    def noted(self: Placing, driver: Driver, executable: Executable, *args: Any) -> Lane:
        opened.append(("clock()" in executable.text, executable.layout is not None))
        return open_lane(self, driver, executable, *args)

    monkeypatch.setattr(Placing, "open_lane", noted)
    backend = Backend(budget=CASES["small"][2] * MIB)
    backend.record_step()
    run("small", watch, monkeypatch, backend=backend)
    assert (True, True) in opened[PROFILED_STEPS:]
    assert (True, False) not in opened[PROFILED_STEPS:]
    assert backend.engine is not None
    (graph,), trials = backend.engine.graphs, backend.engine.trials
    assert graph.planned is not None
    assert graph.status.measured is not None
    body = graph.planned.program.body
    recorded = {span.instruction for span in graph.status.measured.spans}
    assert {at for at, each in enumerate(body) if isinstance(each.action, Run | Copy)} == recorded
    trial = trials.begin(graph.captured.trace, graph.planned, Drift(1.0, 2.0, 8), step=0)
    assert trial.executable.layout is graph.planned.layout
    trials.end(trial)


def test_a_step_that_a_graph_captures_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay would share memory and events with later steps."""
    device, captured = TickingDevice(), [False]
    monkeypatch.setattr(engine, "open_driver", lambda _, folder, __: QueuedDriver(device, folder))
    monkeypatch.setattr(device, "is_capturing", lambda: captured[0])
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, x = nn.Linear(8, 8), torch.randn(4, 8)
    compiled = torch.compile(module, backend=Backend(budget="1GiB"))
    for captured[0] in (False, True, False):
        if captured[0]:
            with pytest.raises(StepError, match=r"CUDA graph cannot capture"):
                compiled(x)
        else:
            compiled(x).sum().backward()
    loss, captured[0] = compiled(x).sum(), True
    with pytest.raises(StepError, match=r"CUDA graph cannot capture"):
        loss.backward()
    captured[0] = False
    module.zero_grad()
    compiled(x).sum().backward()
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad, x.sum(0).expand(8, 8))


@torch.library.custom_op("outcore_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda _, gradient: gradient * 2)


class Foreign(nn.Module):
    """Contains an op of another package."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = Deep(16)

    def forward(self, x: Tensor) -> Any:
        return doubled(self.deep(x))


def test_ops_of_other_packages_run_on_the_stream_of_the_caller(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may use the default stream without a word, as a `<<<grid, block>>>` does."""
    monkeypatch.setitem(CASES, "foreign", (Foreign, *CASES["deep"][1:]))
    monkeypatch.setattr(options, "_card", lambda _: Card(60 * MIB, ExpandableSegments()))
    backend = Backend(budget=60 * MIB)
    expected = trained("foreign", "aot_eager")
    found = trained("foreign", backend, watch)
    assert same(list(map(back, found)), list(map(back, expected)))
    assert backend.engine is not None
    planned = backend.engine.graphs[0].planned
    assert planned is not None
    assert planned.plan.moves
    assert planned.layout is None
    assert watch.device.clocks["stage"]["stage"] == 1, "never used"


@pytest.mark.parametrize("case", ["deep", "wide"])
def test_large_results_are_made_at_home(
    case: str, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result of `deep`, gradients of weights of `wide`."""
    monkeypatch.setattr(requests, "MOST_GUEST_BYTES", MIB)
    expected = trained(case, "aot_eager")
    made: list[torch.Size] = []
    at_home = PlacedLane.at_home

    @contextmanager
    def noted(self: PlacedLane) -> Iterator[list[Tensor]]:
        on_stage = watch.device.current() == "stage"
        with at_home(self) as results:
            assert watch.device.current() == "compute"
            yield results
        made.extend([result.shape for result in results] * on_stage)

    monkeypatch.setattr(PlacedLane, "at_home", noted)
    found = run(case, watch, monkeypatch)
    assert same(list(map(back, found)), list(map(back, expected)))
    assert made
    watch.device.check_given_back()


@pytest.mark.parametrize("queue", ["stage", "compute"])
def test_a_queue_that_does_not_wait(
    queue: str, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = PlacedLane._follow

    def mutant(self: PlacedLane, later: str, earlier: str) -> None:
        if later != queue:
            follow(self, later, earlier)

    monkeypatch.setattr(PlacedLane, "_follow", mutant)
    with pytest.raises(RaceError):
        run("wide", watch, monkeypatch)


def test_what_is_given_that_dies_within_a_call(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = placing.call
    monkeypatch.setattr(runner, "call", lambda lane, *_, again=False: call(lane, [], again=again))
    with pytest.raises(RaceError):
        run("wide", watch, monkeypatch)


def test_what_the_caller_gets_that_dies_at_once(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "give", lambda *_, **__: None)
    with pytest.raises(RaceError):
        run("wide", watch, monkeypatch)
