"""For `search`, links count as slower than measured: in plans, programs and predictions."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from outcore import Backend
from outcore.execute.cpu import CpuDriver
from outcore.ir.hardware import Hardware, Link, Tier
from outcore.runtime.planning.solving import CAUTION
from outcore.simulate import simulate
from tests.cpu.training import PROFILED_STEPS, Small, batch, mean_square, tight_budget, train
from tests.pure.building import small_hardware


@pytest.mark.parametrize(
    ("policy", "slower"),
    [("search{effort=0.1}", CAUTION), ("search{seconds=1}", CAUTION), ("pooch", 0.0)],
)
def test_what_a_policy_plans_for(
    policy: str, slower: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[Hardware] = []
    measure = CpuDriver.hardware

    def noted(driver: CpuDriver, budgets: Mapping[Tier, int]) -> Hardware:
        known.append(measure(driver, budgets))
        return known[-1]

    module = Small()
    budget = tight_budget(module, [batch(0)], mean_square)
    torch._dynamo.reset()
    monkeypatch.setattr(CpuDriver, "hardware", noted)
    backend = Backend(budget=budget, policy=policy, link_limit="50MiB/s")
    call = torch.compile(module, backend=backend)
    train(module, call, [batch(0)], mean_square, PROFILED_STEPS + 1)
    assert backend.engine is not None
    planned = backend.engine.graphs[0].planned
    assert planned is not None
    assert planned.plan.moves
    (measured,) = known
    assert planned.problem.hardware == measured.with_slower_links(slower)
    assert planned.predicted == simulate(planned.problem, planned.program)


def test_slower_links() -> None:
    hardware: Hardware = small_hardware()
    slower = hardware.with_slower_links(0.25)
    for (source, target, link), (*way, other) in zip(hardware.links, slower.links, strict=True):
        assert way == [source, target]
        assert other == Link(0.75 * link.bytes_per_second, link.latency_seconds)
    assert hardware.with_slower_links(0.0) == hardware
