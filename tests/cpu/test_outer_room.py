"""More calls are outstanding than ever, and the outer tiers have no room for them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from outcore import Backend
from outcore.execute.cpu import CpuDriver
from outcore.execute.disk import SpillFile
from outcore.execute.queued import QueuedDriver
from outcore.ir.hardware import Tier
from outcore.runtime.budget import engine
from outcore.runtime.graphs.graph import PlannedGraph
from outcore.runtime.graphs.planned import Planned
from outcore.runtime.step import store
from tests.cpu.queues import LateDevice
from tests.cpu.test_asked_room import Towers, graphs
from tests.cpu.test_eviction import expected, gradients
from tests.cpu.test_eviction import same as equal
from tests.cpu.training import PROFILED_STEPS, Small, batch, mean_square, same, snapshot


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """A file of overrides by which all is offloaded that may be."""
    path = tmp_path / "rules.json"
    path.write_text('[{"match": "*", "action": "offload"}]')
    return path


@pytest.fixture
def offloading(rules: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Backend]:
    """Makes a Backend that offloads to host memory only."""
    monkeypatch.setattr(
        engine, "open_driver", lambda _, folder, __: QueuedDriver(LateDevice(), folder)
    )
    return partial(Backend, budget="1GiB", overrides=rules, disk_budget=0)


@pytest.fixture
def needed(offloading: Callable[..., Backend]) -> int:
    """The host memory that a call offloads to."""
    backend = offloading(host_budget="64MiB")
    outstanding([1] * (PROFILED_STEPS + 1), backend)
    return the_plan(backend).predicted.peak(Tier.HOST)


def test_a_call_without_room_on_the_host_offloads_nothing(
    offloading: Callable[..., Backend], needed: int
) -> None:
    """Each call needs two thirds of the host memory."""
    backend = offloading(host_budget=needed * 3 // 2)
    steps = [*ALONE, 2, 2, 3, 1]
    assert same(outstanding(steps, backend), outstanding(steps, "aot_eager"))
    assert the_plan(backend).predicted.peak(Tier.HOST) == needed
    assert backend.engine is not None
    assert backend.engine.eviction.leaner == 4
    assert "ran a slower program than its plan" in " ".join(backend.report().notes)


def test_a_call_without_room_on_the_disk_offloads_nothing(
    rules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has room for one call by the time that several are outstanding."""
    take_free, give, grow = SpillFile._take_free, SpillFile.give, SpillFile._grow
    held: list[int] = []
    limit: list[int] = []

    def taken(file: SpillFile, nbytes: int) -> int | None:
        if limit and sum(held) + nbytes > limit[0]:
            return None
        offset = take_free(file, nbytes)
        held.append(nbytes if offset is not None else 0)
        return offset

    def given(file: SpillFile, offset: int, nbytes: int) -> None:
        held.append(-nbytes)
        give(file, offset, nbytes)

    def grown(file: SpillFile, nbytes: int) -> None:
        if limit:
            raise file.error("too little disk space", nbytes)
        held.append(nbytes)
        grow(file, nbytes)

    monkeypatch.setattr(SpillFile, "_take_free", taken)
    monkeypatch.setattr(SpillFile, "give", given)
    monkeypatch.setattr(SpillFile, "_grow", grown)
    backend = Backend(budget="1GiB", overrides=rules, spill_dir=tmp_path)
    steps = [*ALONE, 2, 2, 3, 1]

    def fill_up() -> None:
        limit.append(the_plan(backend).predicted.peak(Tier.DISK) * 3 // 2)

    assert same(outstanding(steps, backend, fill_up), outstanding(steps, "aot_eager"))
    assert backend.engine is not None
    assert backend.engine.eviction.leaner == 4


def test_more_calls_do_not_take_more_than_the_disk_budget(rules: Path, tmp_path: Path) -> None:
    options = {"budget": "1GiB", "overrides": rules, "spill_dir": tmp_path}
    backend = Backend(**options)  # type: ignore[arg-type]  # it takes these
    outstanding(ALONE, backend)
    most = the_plan(backend).predicted.peak(Tier.DISK) * 3 // 2
    backend = Backend(**options, disk_budget=most)  # type: ignore[arg-type]  # as above
    steps = [*ALONE, 2, 2, 3, 1]
    assert same(outstanding(steps, backend), outstanding(steps, "aot_eager"))
    assert backend.engine is not None
    assert backend.engine.eviction.leaner == 4
    driver = backend.engine.driver
    assert isinstance(driver, CpuDriver)
    assert driver._ready().file.nbytes <= most


def test_a_plan_for_more_calls_divides_the_host_memory(
    offloading: Callable[..., Backend], needed: int
) -> None:
    backend = offloading(host_budget=needed * 3)
    steps = [*ALONE, 2, 2, 2]
    assert same(outstanding(steps, backend), outstanding(steps, "aot_eager"))
    planned = the_plan(backend)
    assert planned.calls == 2
    assert planned.problem.host_budget_bytes == needed * 3 // 2
    assert backend.engine is not None
    assert not backend.engine.eviction.leaner


# ---- several graphs -----------------------------------------------------------------------------


@pytest.fixture(params=["host", "disk"])
def towers(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Towers]:
    """Makes two towers, of two graphs, that offload to the tier."""
    if request.param == "host":
        monkeypatch.setattr(
            engine, "open_driver", lambda _, folder, __: QueuedDriver(LateDevice(), folder)
        )

    def make(budget: str, outer_bytes: int | str, **options: Any) -> Towers:
        host = {"host_budget": outer_bytes, "disk_budget": 0}
        outer: dict[str, Any] = host if request.param == "host" else {"disk_budget": outer_bytes}
        return Towers(budget, spill_dir=tmp_path, **outer, **options)

    return make


def outer_bytes(graph: PlannedGraph) -> int:
    """What the plan of a graph needs of the outer tiers."""
    assert graph.planned is not None
    return sum(map(graph.planned.predicted.peak, (Tier.HOST, Tier.DISK)))


def trained(towers: Towers, order: Sequence[int], times: int) -> bool:
    """Whether steps have the gradients of plain PyTorch."""
    (plain,) = expected(towers, order)
    seen = []
    for _ in range(times):
        towers.step(order)
        seen.append(equal(gradients(towers), plain))
    return all(seen)


def test_graphs_that_were_planned_apart_share_the_outer_tiers(
    towers: Callable[..., Towers], rules: Path
) -> None:
    """Each alone needs two thirds of what there is."""
    apart = towers("1GiB", "9MiB", overrides=rules)
    apart.steps((0,), (1,), times=PROFILED_STEPS + 2)
    assert all(5 << 20 < outer_bytes(graph) < 7 << 20 for graph in graphs(apart.backend))
    assert trained(apart, (0, 1), times=3)
    assert apart.backend.engine is not None
    assert apart.backend.engine.eviction.leaner


def test_graphs_that_are_profiled_together_share_the_outer_tiers(
    towers: Callable[..., Towers],
) -> None:
    """The first program of each alone would take more than half of what there is."""
    policy = "search{effort=0.5}"
    together = towers("7.5MiB", "4MiB", policy=policy)
    assert trained(together, (0, 1), times=PROFILED_STEPS + 4)
    assert all(graph.planned is not None for graph in graphs(together.backend))


ALONE = [1] * (PROFILED_STEPS + 2)
"""Steps with one call each, after which the graph is planned."""


def the_plan(backend: Backend) -> Planned:
    planned = graphs(backend)[0].planned
    assert planned is not None
    return planned


def outstanding(
    calls: Sequence[int], backend: Any, before_several: Callable[[], object] = bool
) -> list[list[Tensor]]:
    """What steps give in which so many calls are outstanding at once.

    `before_several` is called before those of several calls.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Small()
    call, seen = torch.compile(module, backend=backend), []
    for number in calls:
        if number > 1:
            before_several()
        module.zero_grad()
        losses = [mean_square(call(batch(each))) for each in range(number)]
        loss = torch.stack(losses).sum()
        del losses
        loss.backward()
        seen.append(snapshot(module, loss))
    return seen


def test_calls_of_one_graph_that_are_profiled_together_share_the_outer_tiers(
    towers: Callable[..., Towers],
) -> None:
    """The first program of a call alone would take more than half of what there is."""
    together = towers("12MiB", "8MiB", policy="search{effort=0.5}")
    assert trained(together, (0, 0), times=PROFILED_STEPS + 4)
    assert graphs(together.backend)[0].planned is not None


# ---- what ends with a step ----------------------------------------------------------------------


def test_planned_steps_run_no_code_of_ours_in_callbacks(rules: Path, tmp_path: Path) -> None:
    """Python would drop what a signal handler raises in a finalizer or for a weak reference."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Small()
    backend = Backend(budget="1GiB", overrides=rules, spill_dir=tmp_path)
    call, x = torch.compile(module, backend=backend), batch(0)
    for _ in ALONE:
        mean_square(call(x)).backward()
    assert the_plan(backend).plan.moves
    ran: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            ran.add((frame.f_code.co_filename, frame.f_code.co_name))

    sys.setprofile(note)
    try:
        mean_square(call(x)).backward()
    finally:
        sys.setprofile(None)
    assert (store.__file__, "drop") in ran
    assert (store.__file__, "_orphan") not in ran
    assert (weakref.__file__, "__call__") not in ran
    assert not [file for file, name in ran if name == "__del__" and "outcore" in file]
