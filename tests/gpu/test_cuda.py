"""Training on a GPU: equal gradients inside the budget, no waiting host, no leaked memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.kit.modes import same_graph
from outcore import Backend
from outcore.errors import OptionValueError
from outcore.execute import open_driver
from outcore.execute.driver import Region
from outcore.execute.queued import QueuedDriver
from outcore.ir.hardware import Tier
from outcore.measure.events import EventMeter
from tests.cpu.training import mean_square, same
from tests.gpu.training import (
    PLAIN,
    POLICIES,
    PROFILED_STEPS,
    ROOMY_BYTES,
    images,
    part,
    planned,
    reference,
    small,
    tight,
)

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise an error if torch makes the host wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def gpu_driver() -> QueuedDriver:
    driver = open_driver(torch.device("cuda", 0), Path(), None)
    assert isinstance(driver, QueuedDriver)
    return driver


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_bitwise_equal_inside_the_budget(policy: str) -> None:
    steps = PROFILED_STEPS + 4
    expected = reference(steps)
    budget = tight()
    torch.cuda.reset_peak_memory_stats()
    seen, backend, *_ = planned(steps, budget=budget, policy=policy)
    report = backend.report()
    assert report.state == "planned"
    assert same(seen, expected)
    assert report.counts is not None
    assert report.counts.offload + report.counts.recompute > 0
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= budget


def test_gradients_are_those_of_plain_pytorch() -> None:
    """Batch norm runs by cuDNN, as in plain PyTorch (docs/decisions/0015)."""
    steps = PROFILED_STEPS + 4
    expected = PLAIN.plain(steps)
    seen, backend, *_ = planned(steps, budget=tight(), policy="pooch")
    assert backend.report().state == "planned"
    assert backend.engine is not None
    targets = {op.target for op in backend.engine.graphs[0].captured.trace.ops}
    assert "aten._batch_norm_with_update_functional.default" in targets
    assert same(seen, expected)


def test_the_allocator_agrees_with_the_meter() -> None:
    _, backend, module, call = planned(PROFILED_STEPS + 4, budget=tight(), policy="swap-all")
    gc.collect()
    data = images()
    module.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    mean_square(call(data)).backward()
    report = backend.report()
    assert report.predicted_peak_bytes is not None
    assert torch.cuda.max_memory_allocated() <= report.predicted_peak_bytes


def test_a_profiler_of_the_user_is_in_nobodys_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """outcore itself uses none: it would stay attached to the driver (docs/decisions/0018)."""

    def refuse(_: EventMeter) -> bool:
        raise AssertionError("the meter of a CPU")

    monkeypatch.setattr(EventMeter, "start", refuse)
    with torch.autograd.profiler.profile(use_device="cuda"):
        _, backend, *_ = planned(PROFILED_STEPS + 4, budget=tight(), policy="swap-all")
    report = backend.report()
    assert report.state == "planned"
    assert report.measured_peak_bytes is not None


def test_what_fits_stays() -> None:
    _, backend, *_ = planned(PROFILED_STEPS + 2, budget="4GiB")
    report = backend.report()
    assert report.state == "in-core"
    assert report.offloaded_bytes == 0


def test_the_host_never_waits_in_a_planned_step() -> None:
    _, backend, module, call = planned(PROFILED_STEPS + 4, budget=tight(), policy="swap-all")
    data = images()
    module.zero_grad()
    torch.cuda.synchronize()
    engine = backend.engine
    assert engine is not None
    assert isinstance(engine.driver, QueuedDriver)
    torch.cuda._sleep(2_000_000_000)  # cycles; at least a second
    with no_waiting():
        mean_square(call(data)).backward()
    assert not engine.driver.device.into.query()  # the host is done, the device is not


def test_host_memory_is_what_the_plan_needs() -> None:
    _, backend, *_ = planned(PROFILED_STEPS + 4, budget=tight(), policy="swap-all")
    engine = backend.engine
    assert engine is not None
    driver = engine.driver
    assert isinstance(driver, QueuedDriver)
    plan = engine.graphs[0].planned
    assert plan is not None
    assert driver.slabs.taken_bytes == plan.predicted.peak(Tier.HOST)


def test_nothing_is_left_behind() -> None:
    _, _, module, call = planned(PROFILED_STEPS + 4, budget=tight(), policy="pooch")
    data = images()

    def held() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    module.zero_grad()
    before = held()
    for _ in range(30):
        mean_square(call(data)).backward()
        module.zero_grad()
    for _ in range(10):
        call(data)  # its result is dropped
    assert held() == before


def test_a_dropped_copy_does_not_touch_memory_that_is_used_again() -> None:
    driver, count = gpu_driver(), 1 << 20
    lane = driver.open_lane({0: Region(0, 4 * count, torch.float32, (count,), (1,))})
    lane.wait(lane.copy_out(torch.ones(count, device="cuda"), 0))
    with torch.cuda.stream(driver.device.into):
        torch.cuda._sleep(500_000_000)  # delays the copy back
    tensor, handle = lane.copy_in(0)
    address = tensor.data_ptr()
    del tensor, handle
    lane.close()
    again = torch.full((count,), 3.0, device="cuda")
    assert again.data_ptr() == address
    torch.cuda.synchronize()
    assert bool((again == 3).all())


def test_mixed_precision_with_a_scaler() -> None:
    def run(backend: Any) -> list[Tensor]:
        torch._dynamo.reset()
        module = small()
        call = torch.compile(module, backend=backend)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cuda")
        data = images()
        for step in range(PROFILED_STEPS + 3):
            torch.manual_seed(step)
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = mean_square(call(data))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [p.detach().clone() for p in module.parameters()]

    expected = run(same_graph)
    roomy = Backend(budget=ROOMY_BYTES)
    run(roomy)
    backend = Backend(budget=part(roomy, 0.8), policy="swap-all")
    assert same([run(backend)], [expected])
    assert backend.report().offloaded_bytes


def test_both_links_are_measured() -> None:
    hardware = gpu_driver().hardware({Tier.DEVICE: 1 << 30, Tier.HOST: 1 << 30})
    for ends in ((Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE)):
        assert hardware.link(*ends).bytes_per_second > 1e9


def test_registered_memory_is_copied_without_waiting() -> None:
    driver, count = gpu_driver(), 1 << 20
    value = torch.arange(count, device="cuda", dtype=torch.float32)
    lane = driver.open_lane({0: Region(0, value.nbytes, torch.float32, (count,), (1,))})
    torch.cuda.synchronize()
    with torch.cuda.stream(driver.device.out):
        torch.cuda._sleep(500_000_000)
    with no_waiting():
        lane.wait(lane.copy_out(value, 0))
        tensor, back = lane.copy_in(0)
        lane.wait(back)
    assert not driver.device.out.query()
    assert torch.equal(tensor, value)
    lane.close()


def test_a_slower_link_is_for_the_cpu() -> None:
    module = small()
    call = torch.compile(module, backend=Backend(budget="1GiB", link_limit="1GiB/s"))
    with pytest.raises(OptionValueError, match="link_limit"):
        call(images())
