"""Device memory that runs out inside a step: told with numbers, planned tighter once, usable."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from outcore.execute import Executable
from outcore.ir.hardware import Tier
from tests.cpu.test_adversarial import Trained
from tests.cpu.training import same

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024.00 GiB.")


def failing(executable: Executable, call: str, error: RuntimeError) -> Executable:
    def fail(*_: Any) -> Any:
        raise type(error)(*error.args)

    if call == "forward":
        return replace(executable, forward=fail)
    return replace(executable, backward=fail)


@pytest.mark.parametrize("call", ["forward", "backward"])
@pytest.mark.parametrize(
    "error", [FULL, RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublas")]
)
def test_the_next_step_has_a_tighter_plan_once(call: str, error: RuntimeError) -> None:
    trained = Trained("pooch")
    expected = trained.step()
    before = trained.graph.planned
    assert before is not None
    assert trained.graph.executable is not None
    trained.graph.executable = failing(trained.graph.executable, call, error)

    with pytest.raises(type(error), match=str(error)[:20]) as caught:
        trained.step()
    assert "of a budget of 2.00 MiB" in caught.value.__notes__[-1]
    assert "the next step has a tighter one" in caught.value.__notes__[-1]
    after = trained.graph.planned
    assert after is not None
    free = after.problem.budget_bytes - after.predicted.peak(Tier.DEVICE)
    assert free >= 0
    more = after.problem.outside_bytes - before.problem.outside_bytes
    assert more == before.problem.budget_bytes // 10
    assert same([trained.step()], [expected])

    assert trained.graph.executable is not None
    trained.graph.executable = failing(trained.graph.executable, call, error)
    with pytest.raises(type(error)) as caught:
        trained.step()
    assert "lower the budget" in caught.value.__notes__[-1]
    assert trained.graph.planned is after
    assert len(trained.graph.engine.stores) == 0


@pytest.mark.parametrize("call", ["forward", "backward"])
def test_an_error_of_another_kind_changes_no_plan(call: str) -> None:
    trained = Trained("pooch")
    trained.step()
    before, executable = trained.graph.planned, trained.graph.executable
    assert executable is not None
    trained.graph.executable = failing(executable, call, RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ") as caught:
        trained.step()
    assert not hasattr(caught.value, "__notes__")
    assert trained.graph.planned is before
