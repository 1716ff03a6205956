"""Calls that stay outstanding: one whose result is kept, retained graphs, late backward calls."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from outcore import Backend
from tests.cpu.training import away, back, same

HABITS = ["retained", "kept", "late"]
STEPS = 72


def layers() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())))


def gradients(module: nn.Module, call: Any, habit: str, steps: int) -> Iterator[list[Tensor]]:
    """The gradients of each backward call."""
    before: Tensor | None = None
    kept = call(torch.ones(256, 64)) if habit == "kept" else None
    for step in range(steps):
        x = torch.randn(1024, 64, generator=torch.Generator().manual_seed(step))
        loss = call(x).square().mean()
        if habit != "late":
            loss.backward(retain_graph=habit == "retained")
        elif before is not None:
            before.backward()
        before = loss
        yield [p.grad.clone() for p in module.parameters() if p.grad is not None]
        module.zero_grad()
    del kept


@pytest.mark.parametrize("habit", HABITS)
def test_it_is_planned_although_a_call_is_always_outstanding(habit: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = layers()
    plain, backend = copy.deepcopy(module), Backend(budget="7MiB")
    call = torch.compile(module, backend=backend, dynamic=False)
    traced = torch.compile(plain, backend="aot_eager", dynamic=False)
    expected = [away(each) for each in gradients(plain, traced, habit, STEPS)]
    found = gradients(module, call, habit, STEPS)
    assert all(same([each], [back(expected[step])]) for step, each in enumerate(found))
    report = backend.report()
    assert report.state in ("planned", "in-core"), "which is a plan that keeps everything"
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= report.budget_bytes


def test_a_metered_step_that_is_left_behind_keeps_no_engine() -> None:
    """Only its own thread could end it, and that is busy with something else."""
    torch._dynamo.reset()
    begun, over = threading.Event(), threading.Event()
    made: list[Any] = []

    def begin() -> None:
        module, backend = layers(), Backend(budget="1GiB")
        call = torch.compile(module, backend=backend, dynamic=False)
        call(torch.randn(8, 64))
        assert backend.engine is not None
        assert backend.engine.metering.running is not None
        made.extend((module, backend, call))
        del module, backend, call
        begun.set()
        over.wait()

    thread = threading.Thread(target=begin)
    thread.start()
    try:
        assert begun.wait(60)
        driver = ref(made[1].engine.driver)
        made.clear()
        torch._dynamo.reset()
        gc.collect()
        assert driver() is None
    finally:
        over.set()
        thread.join()


def test_it_is_planned_again_although_a_result_is_kept() -> None:
    """The kept call does not count as one that a new plan has to wait for."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, held = layers(), []
    backend = Backend(budget="5MiB")
    call = torch.compile(module, backend=backend, dynamic=False)
    for step, _ in enumerate(gradients(module, call, "kept", STEPS)):
        if step == STEPS - 10:
            assert backend.report().state in ("in-core", "planned")
            held.append(torch.zeros(1 << 18))
    assert backend.engine is not None
    assert sum(graph.status.growth.replans for graph in backend.engine.graphs) == 1
