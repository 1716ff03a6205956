"""Inputs of changing sizes on a GPU: smaller ones run the plan of larger ones."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.nn.attention import sdpa_kernel

from benchmarks.kit.modes import same_graph
from outcore import Backend
from outcore.execute.queued import QueuedDriver
from outcore.ir.hardware import Tier
from outcore.ir.profile import Source
from outcore.runtime.by_size import BySize
from tests.cpu.test_patterns import CASES, alike, watch
from tests.cpu.training import Deep, mean_square, same, snapshot
from tests.gpu.test_attention import KERNELS, WIDTH, Block
from tests.gpu.test_layout import nearly_full
from tests.gpu.training import PROFILED_STEPS, ROOMY_BYTES, part

LAYERS, COLUMNS = 8, 1 << 18
"""Each layer saves a map of 16 MiB."""
LARGE_STEPS = PROFILED_STEPS + 2
SHARES = [8] * LARGE_STEPS + [6, 7, 6, 5, 7, 5, 6, 7, 5, 8, 7, 8]
"""Sizes of the inputs, in eighths of `COLUMNS`."""


def trained(backend, shares=SHARES, layers=LAYERS, columns=COLUMNS):
    """The results of a step for each size, and the peaks of allocated memory."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Deep(layers).cuda()
    call = torch.compile(module, backend=backend)
    seen, peaks = [], []
    for seed, share in enumerate(shares):
        seeded = torch.Generator().manual_seed(seed)
        maps = torch.randn(16, columns * share // 8, generator=seeded).cuda()
        torch.cuda.reset_peak_memory_stats()
        module.zero_grad()
        loss = mean_square(call(maps))
        loss.backward()
        seen.append(snapshot(module, loss))
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    return seen, peaks


@pytest.fixture
def budget():
    roomy = Backend(budget=ROOMY_BYTES)
    trained(roomy, SHARES[: PROFILED_STEPS + 1])
    return part(roomy, 0.7)


@pytest.mark.parametrize("policy", ["swap-all", "search"])
def test_smaller_ones_run_the_plan_of_larger_ones(policy, budget):
    expected, _ = trained(same_graph)
    gc.collect()
    backend = Backend(budget=budget, policy=policy, strict=True)
    found, peaks = trained(backend)
    assert same(found, expected)
    plans = [status.planned for status in backend.engine.registry.known()]
    assert plans[0].plan.moves
    assert [plan.problem.profile.source for plan in plans].count(Source.ESTIMATED) == 3
    report = backend.report()
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= budget
    assert max(peaks[LARGE_STEPS:]) <= budget


@pytest.mark.parametrize("policy", ["swap-all", "search"])
def test_where_no_size_returns(policy, budget):
    """The largest one is planned from its first step, for the others."""
    shares = [56, 64, 52, 48, 60, 44, 62, 58, 46, 54]
    expected, _ = trained(same_graph, shares, columns=COLUMNS // 8)
    gc.collect()
    backend = Backend(budget=budget, policy=policy, strict=True)
    found, peaks = trained(backend, shares, columns=COLUMNS // 8)
    assert same(found, expected)
    known = backend.engine.registry.known()
    assert [status.planned is not None for status in known] == [i == 1 for i in range(10)]
    assert known[1].planned.plan.moves
    assert all(status.lent is not None for status in known[3:])
    report = backend.report()
    assert report.state == "planned"
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= budget
    assert max(peaks) <= budget


def test_host_memory_is_registered_once(budget, monkeypatch):
    """Smaller sizes use what was registered for the largest one: registering takes long."""
    asked = []
    reserve = QueuedDriver.reserve

    def noted(self, nbytes):
        asked.append(nbytes.get(Tier.HOST))
        reserve(self, nbytes)

    monkeypatch.setattr(QueuedDriver, "reserve", noted)
    trained(Backend(budget=budget, policy="swap-all", strict=True))
    assert len(asked) == 4
    assert asked[0]
    assert len(set(asked)) == 1


def test_on_a_nearly_full_device():
    """The layout is for one size; the others get room for the allocator instead."""
    shares = [*SHARES[:LARGE_STEPS], 6, 6, 6, 8]
    expected, _ = trained(same_graph, shares, layers=20, columns=4 * COLUMNS)
    with nearly_full():
        backend = Backend(strict=True)
        found, _ = trained(backend, shares, layers=20, columns=4 * COLUMNS)
    assert same(found, expected)
    plans = [status.planned for status in backend.engine.registry.known()]
    assert all(plans)
    assert plans[0].plan.moves
    measured = backend.report().measured_peak_bytes
    assert measured is not None
    assert measured <= backend.engine.settings.budget_bytes


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_over_any_length_is_traced_once(kernel, monkeypatch):
    """Some of its kernels return lengths to the host: numbers, in the copies."""
    made = []
    told = watch(monkeypatch)
    new = BySize._new

    def noted(self, *args):
        runner = new(self, *args)
        made.append(runner is not None)
        return runner

    monkeypatch.setattr(BySize, "_new", noted)
    backend = Backend(budget=ROOMY_BYTES, strict=True)
    found: list[Any] = []
    expected: list[Any] = []
    for seen, way in ((expected, same_graph), (found, backend)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Block(0.0).cuda().to(KERNELS[kernel])
        call = torch.compile(module, backend=way)
        for n in (48, 40, 56, 40, 64, 32, 72):
            module.zero_grad()
            with sdpa_kernel(kernel):
                loss = mean_square(call(torch.ones(8, n, WIDTH).cuda().to(KERNELS[kernel])))
                loss.backward()
            seen.append(snapshot(module, loss))
    assert same(found, expected)
    assert made == [True] * 5
    assert len(told.traces) == 2


@pytest.mark.parametrize("case", ["attention", "one sequence", "two lengths"])
def test_what_patterns_tell_is_what_would_be_captured(case, monkeypatch):
    told, (make, inputs) = watch(monkeypatch), CASES[case]
    torch.manual_seed(0)
    on_device = [[x.cuda() for x in given] for given in inputs()]
    alike(make().cuda(), on_device)
    assert told.traces
