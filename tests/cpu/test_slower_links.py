"""`search` plans for slower links than were measured; predictions use the measured rates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outcore import Backend
from outcore.ir.hardware import Link
from outcore.ir.problem import Problem
from outcore.ir.store import digest
from outcore.out_of_process import plan_out_of_process
from outcore.policies import Policy, resolve
from outcore.runtime import caution
from outcore.runtime.caution import CAUTION, plan_cautiously
from outcore.simulate import simulate
from tests.cpu.training import PROFILED_STEPS, Small, batch, mean_square, tight_budget, train
from tests.pure.building import dense_problem, small_hardware


@pytest.mark.parametrize(("policy", "slower"), [("search{effort=0.1}", CAUTION), ("pooch", 0.0)])
def test_the_problem_that_a_policy_gets(
    policy: str, slower: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Problem] = []

    def noted(policy: Policy, problem: Problem) -> Any:
        asked.append(problem)
        return plan_out_of_process(policy, problem)

    monkeypatch.setattr(caution, "plan_out_of_process", noted)
    budget = tight_budget(Small(), [batch(0)], mean_square)
    torch._dynamo.reset()
    module, backend = Small(), Backend(budget=budget, policy=policy, link_limit="50MiB/s")
    train(
        module, torch.compile(module, backend=backend), [batch(0)], mean_square, PROFILED_STEPS + 1
    )
    assert backend.engine is not None
    planned = backend.engine.graphs[0].planned
    assert planned is not None
    measured = planned.problem.hardware
    assert {p.hardware for p in asked} == {measured.with_slower_links(slower)}
    assert planned.predicted == simulate(planned.problem, planned.program)


def test_slower_links() -> None:
    hardware = small_hardware()
    slower = hardware.with_slower_links(0.25)
    for (source, target, link), (*way, other) in zip(hardware.links, slower.links, strict=True):
        assert way == [source, target]
        assert other == Link(0.75 * link.bytes_per_second, link.latency_seconds)
    assert hardware.with_slower_links(0.0) == hardware


def test_a_plan_that_fits_only_slower_links_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = dense_problem()
    asked: list[Problem] = []

    def noted(policy: Policy, problem: Problem) -> Any:
        asked.append(problem)
        return plan_out_of_process(policy, problem)

    monkeypatch.setattr(caution, "plan_out_of_process", noted)
    search = resolve("search{effort=0.01}")
    plan = plan_cautiously(search, problem)
    assert plan.problem_digest == digest(problem)
    monkeypatch.setattr(caution, "fits", lambda *_: False)
    assert plan_cautiously(search, problem) == search.plan(problem)
    assert [each == problem for each in asked] == [False, False, True]
