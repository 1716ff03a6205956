"""Device memory that runs out in a step: an error with numbers, then one tighter plan."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from outcore import Backend
from outcore.execute import Executable
from outcore.ir.hardware import Tier
from tests.cpu.test_adversarial import Trained
from tests.cpu.training import (
    PROFILED_STEPS,
    Small,
    away,
    back,
    batch,
    mean_square,
    same,
    snapshot,
)

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024.00 GiB.")


def failing(executable: Executable, call: str, error: RuntimeError) -> Executable:
    def fail(*_: Any) -> Any:
        raise type(error)(*error.args)

    if call == "forward":
        return replace(executable, forward=fail)
    return replace(executable, backward=fail)


def fail(trained: Trained, call: str, error: RuntimeError) -> None:
    """Make `call` fail with `error` in the following steps."""
    assert trained.graph.execution is not None
    trained.follow(failing(trained.graph.execution.executable, call, error))


@pytest.mark.parametrize("call", ["forward", "backward"])
@pytest.mark.parametrize(
    "error", [FULL, RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublas")]
)
def test_the_next_step_has_a_tighter_plan_once(call: str, error: RuntimeError) -> None:
    trained = Trained("pooch")
    expected = away(trained.step())
    before = trained.graph.planned
    assert before is not None
    fail(trained, call, error)

    with pytest.raises(type(error), match=str(error)[:20]) as caught:
        trained.step()
    assert "of a budget of 2.00 MiB" in caught.value.__notes__[-1]
    assert "the next step has a tighter plan" in caught.value.__notes__[-1]
    del caught  # its frames hold the step's tensors
    after = trained.graph.planned
    assert after is not None
    free = after.problem.budget_bytes - after.predicted.peak(Tier.DEVICE)
    assert free >= 0
    more = after.problem.outside_bytes - before.problem.outside_bytes
    assert more == before.problem.budget_bytes // 10
    assert same([trained.step()], [back(expected)])

    fail(trained, call, error)
    with pytest.raises(type(error)) as caught:
        trained.step()
    assert "lower the budget" in caught.value.__notes__[-1]
    assert trained.graph.planned is after
    assert len(trained.engine.stores) == 0


def test_after_another_profile_there_is_a_tighter_plan_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plan from that profile is not tighter. Here the layout of a plan was of no use."""
    trained = Trained("pooch")
    trained.step()
    outside: list[int] = []
    for again in (False, True):
        if again:
            with monkeypatch.context() as patched:
                placing = trained.engine.placing
                patched.setattr(placing, "is_in_vain", lambda _: True)
                trained.step()
            assert trained.graph.planned is None
            while trained.graph.planned is None:
                trained.step()
        assert trained.graph.planned is not None
        outside.append(trained.graph.planned.problem.outside_bytes)
        fail(trained, "forward", FULL)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            trained.step()
        assert "the next step has a tighter plan" in caught.value.__notes__[-1]
        del caught  # its frames hold the step's tensors
    assert outside[1] < outside[0] + trained.graph.planned.problem.budget_bytes // 10


@pytest.mark.parametrize("call", ["forward", "backward"])
def test_while_it_is_profiled_the_next_step_takes_least(call: str) -> None:
    """The plan of the first step fits the budget, except for the workspace of its ops."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, backend = Small(), Backend(budget="1GiB")
    compiled = torch.compile(module, backend=backend)
    plain = copy.deepcopy(module)

    def step(call: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        loss = mean_square(call(batch(0)))
        loss.backward()
        return snapshot(module if call is compiled else plain, loss)

    seen, expected = [step(compiled)], [step(plain)]
    assert backend.engine is not None
    (graph,) = backend.engine.graphs
    first, notes = graph.profiling, []
    assert first is not None
    for _ in range(2):
        assert graph.profiling is not None
        graph.profiling.checked = failing(graph.profiling.checked, call, FULL)
        graph.profiling.timed = failing(graph.profiling.make_timed(), call, FULL)
        buffers = copy.deepcopy(list(module.buffers()))
        with pytest.raises(torch.OutOfMemoryError) as caught:
            step(compiled)
        notes.append(caught.value.__notes__[-1])
        with torch.no_grad():
            for buffer, before in zip(module.buffers(), buffers, strict=True):
                buffer.copy_(before)
        seen.append(step(compiled))
        expected.append(step(plain))
        assert graph.profiling is not None
        taken = [p.checked.program for p in (first, graph.profiling)]
        assert len(taken[1].body) > len(taken[0].body), "more is moved"
    assert "the next step is profiled by the plan with the least memory" in notes[0]
    assert "by the plan" not in notes[1]
    assert "within a budget of 1.00 GiB" in notes[1]
    for _ in range(PROFILED_STEPS):
        seen.append(step(compiled))
        expected.append(step(plain))
    assert same(seen, expected)
    assert backend.report().state == "in-core"


def test_a_graph_that_runs_in_core_for_good_is_told_nothing() -> None:
    trained = Trained("pooch")
    trained.step()
    trained.graph.retire("a test")
    trained.graph.fallback = failing(trained.graph.fallback, "backward", FULL)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trained.step()
    assert not hasattr(caught.value, "__notes__")
    assert trained.graph.executable is trained.graph.fallback


@pytest.mark.parametrize("call", ["forward", "backward"])
def test_an_error_of_another_kind_changes_no_plan(call: str) -> None:
    trained = Trained("pooch")
    trained.step()
    before = trained.graph.planned
    fail(trained, call, RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ") as caught:
        trained.step()
    assert not hasattr(caught.value, "__notes__")
    assert trained.graph.planned is before
