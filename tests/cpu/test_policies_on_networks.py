"""Every policy on every small network: a plan that verifies and fits, or an error."""

from __future__ import annotations

import pytest

from outcore.bound import lower_bound
from outcore.capture import trace_network
from outcore.compare import Comparison
from outcore.errors import InfeasibleError
from outcore.ir.hardware import Tier
from outcore.ir.memory import fits
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.lower import lower
from outcore.networks import NETWORKS
from outcore.policies import POLICIES, floor, resolve
from outcore.presets import preset
from outcore.simulate import simulate
from outcore.spec import options

SMALL_BYTES = 1024
"""`min_bytes` of the policies: the small networks have small buffers."""

SAME = {"resnet50-v1", "resnet101", "resnet152", "resnet1920", "resnet2500", "gpt2-large"}
"""Networks whose small variant is that of another network."""


def spec_of(name: str) -> str:
    fields = {field.name for field in options(POLICIES[name])}
    given = [f"min_bytes={SMALL_BYTES}B"] * ("min_bytes" in fields)
    given += ["effort=0.05"] * ("effort" in fields)
    return f"{name}{{{','.join(given)}}}" if given else name


def plan_or_reason(name: str, problem: Problem) -> Plan | InfeasibleError:
    try:
        return resolve(spec_of(name)).plan(problem)
    except InfeasibleError as error:
        return error


@pytest.mark.parametrize("network", sorted(NETWORKS.keys() - SAME))
def test_a_plan_or_a_reason(network: str) -> None:
    trace = trace_network(NETWORKS[network].small, 2)
    comparison = Comparison(trace, preset("v100-pcie3"), 2)
    most = comparison.in_core.peak(Tier.DEVICE)
    least = floor(comparison.problem(most)).nbytes
    problem = comparison.problem((least + 3 * most) // 4)
    bound = lower_bound(problem)
    planned: list[str] = []
    for name in POLICIES:
        made = plan_or_reason(name, problem)
        if isinstance(made, InfeasibleError):
            assert made.floor_bytes > problem.limit_bytes(Tier(made.tier))
            assert made.policy.startswith(name)
            continue
        planned.append(name)
        program = lower(problem, made)  # verified
        assert fits(problem, program)
        assert simulate(problem, program).seconds >= bound * (1 - 1e-9)
    assert "search" in planned
