"""Failures on a GPU: messages have figures, memory is freed, and the model stays usable."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outcore import Backend, StepError
from outcore.execute import pinned
from outcore.execute.lane import QueuedLane
from outcore.execute.queued import QueuedDriver
from outcore.ir.hardware import Tier
from tests.cpu.training import mean_square, same, snapshot
from tests.gpu.training import PROFILED_STEPS, images, planned, reference, small, tight

STEPS = PROFILED_STEPS + 3


class Bulge(nn.Module):
    """A layer that holds more memory while it runs than it keeps for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(nn.functional.gelu(self.layer(x))) + x


def held() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def one_step(module: nn.Module, call: Any, data: Tensor) -> list[Tensor]:
    module.zero_grad()
    torch.manual_seed(0)
    loss = mean_square(call(data))
    loss.backward()
    return snapshot(module, loss)[: 1 + len(list(module.parameters()))]


@contextmanager
def nothing_free() -> Iterator[None]:
    """Limit this process to the device memory that it has reserved, and fill all of that."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    filling = []
    try:
        for nbytes in (64 << 20, 2 << 20, 1 << 16, 512):
            with contextlib.suppress(torch.OutOfMemoryError):
                while True:
                    filling.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
        yield
    finally:
        filling.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


def needed_of_the_host() -> int:
    """Host memory that the small model's plan needs if there is enough."""
    _, backend, *_ = planned(PROFILED_STEPS, budget=tight(), policy="swap-all")
    assert backend.engine is not None
    plan = backend.engine.graphs[0].planned
    assert plan is not None
    return plan.predicted.peak(Tier.HOST)


def test_out_of_memory_inside_a_step() -> None:
    _, backend, module, call = planned(STEPS, budget=tight(), policy="swap-all")
    data = images()
    expected = one_step(module, call, data)[0]
    module.zero_grad()
    before = held()
    with nothing_free():
        with (
            pytest.warns(
                UserWarning, match="no plan has room for that"
            ),  # for the memory that fills the device
            pytest.raises(torch.OutOfMemoryError) as caught,
        ):
            one_step(module, call, data)
        note = caught.value.__notes__[-1]
        del caught  # its traceback holds the step's tensors
    assert "of a budget of" in note
    module.zero_grad()
    assert held() <= before
    assert torch.equal(one_step(module, call, data)[0], expected)
    assert backend.report().state == "planned"


def test_profiled_steps_are_within_the_budget_too() -> None:
    """The optimizer state, created after the first step, counts from the second step on."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = nn.Sequential(*(Bulge() for _ in range(8))).cuda()
    data = torch.randn(4096, 512, device="cuda")
    before = held()
    budget = before + (60 << 20)
    backend = Backend(budget=budget)
    call = torch.compile(module, backend=backend)
    adam = torch.optim.AdamW(module.parameters(), fused=True)
    peaks = []
    for _ in range(STEPS):
        adam.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        call(data).square().mean().backward()
        peaks.append(torch.cuda.max_memory_allocated())
        adam.step()
    assert backend.report().state == "planned"
    assert max(peaks) <= budget, [peak - before for peak in peaks]


def test_the_state_of_an_optimizer_that_comes_late_has_room() -> None:
    """The state is created after the eighth call, when there is a plan already."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = nn.Sequential(*(Bulge() for _ in range(8))).cuda()
    data = torch.randn(4096, 512, device="cuda")
    budget = held() + (84 << 20)
    backend = Backend(budget=budget, policy="pooch")
    call = torch.compile(module, backend=backend)
    adam = torch.optim.AdamW(module.parameters(), fused=True)
    peaks = []
    for number in range(1, 25):
        torch.cuda.reset_peak_memory_stats()
        call(data).square().mean().backward()
        peaks.append(torch.cuda.max_memory_allocated())
        if not number % 8:
            adam.step()
            adam.zero_grad()
    assert any("planned again because" in note for note in backend.report().notes)
    assert max(peaks) <= budget, [peak - budget for peak in peaks]


def test_host_memory_is_of_the_size_that_the_plan_needs() -> None:
    """The profiled steps needed more, as they offload all they can; the in-core plan needs none."""
    _, backend, *_ = planned(STEPS, budget="4GiB")
    assert backend.report().state == "in-core"
    assert backend.engine is not None
    driver = backend.engine.driver
    assert isinstance(driver, QueuedDriver)
    assert driver.slabs.taken_bytes == 0


def test_host_memory_that_cannot_be_locked_is_slower_and_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = torch.cuda.cudart()

    class Refusing:
        def cudaHostRegister(self, *_: object) -> int:  # noqa: N802 - CUDA's name
            return 2

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - as above; for memory of earlier tests
            return int(runtime.cudaHostUnregister(address))

    expected, budget = reference(STEPS), tight()
    monkeypatch.setattr(pinned, "_runtime", Refusing)
    with pytest.warns(UserWarning, match="cannot be pinned"):
        seen, backend, *_ = planned(STEPS, budget=budget, policy="swap-all")
    assert same(seen, expected)
    assert backend.report().offloaded_bytes


@pytest.mark.parametrize("spilling", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize("call_name", ["copy_out", "copy_in", "wait"])
def test_an_interrupt_in_the_middle_of_a_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call_name: str, *, spilling: bool
) -> None:
    host = needed_of_the_host() * 3 // 4 if spilling else None
    options = {"policy": "swap-all", "host_budget": host, "spill_dir": tmp_path}
    _, _, module, call = planned(STEPS, budget=tight(), **options)
    data = images()
    expected = one_step(module, call, data)
    module.zero_grad()
    before = held()
    method, calls = getattr(QueuedLane, call_name), count(1)

    def interrupted(*args: Any) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return method(*args)

    with monkeypatch.context() as patch:
        patch.setattr(QueuedLane, call_name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            one_step(module, call, data)
    module.zero_grad()
    assert held() <= before
    assert same([one_step(module, call, data)], [expected])


@pytest.mark.skipif(hasattr(torch, "_simulated_gpu"), reason="it captures no graphs")
def test_a_step_that_a_graph_captures_is_refused() -> None:
    _, _, module, call = planned(STEPS, budget=tight())
    data, graph = images(), torch.cuda.CUDAGraph()
    before = one_step(module, call, data)
    with torch.cuda.graph(graph):
        data + 1  # torch warns of a graph of nothing
        with pytest.raises(StepError, match="CUDA graph cannot capture"):
            call(data)
    assert same([one_step(module, call, data)], [before])


def test_a_host_with_too_little_sends_the_rest_to_the_disk(tmp_path: Path) -> None:
    expected, host = reference(STEPS), needed_of_the_host() * 3 // 4
    seen, backend, *_ = planned(
        STEPS, budget=tight(), policy="swap-all", host_budget=host, spill_dir=tmp_path
    )
    assert same(seen, expected)
    assert backend.engine is not None
    plan = backend.engine.graphs[0].planned
    assert plan is not None
    assert plan.predicted.peak(Tier.DISK) > 0
    assert not list(tmp_path.iterdir())


def test_a_model_that_raises_leaves_nothing_behind() -> None:
    class Raising(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.broken = small(), False

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            torch._dynamo.graph_break()
            if self.broken:
                raise ValueError("a fault of the user's")
            return y * 2

    module = Raising()
    call = torch.compile(module, backend=Backend(budget="2GiB"))
    data = images()
    for _ in range(STEPS):
        mean_square(call(data)).backward()
    module.zero_grad()
    before = held()
    module.broken = True
    with pytest.raises(ValueError, match="fault of the user"):
        call(data)
    assert held() <= before
    module.broken = False
    mean_square(call(data)).backward()
