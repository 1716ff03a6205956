"""Building programs: variants are refused, and sums reuse the memory of dead arguments."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outcore
from outcore import Backend
from outcore.errors import VerifyError
from outcore.execute import build
from outcore.ir.plan import make_plan
from outcore.ir.profile import Cost
from outcore.ir.program import Run
from outcore.ir.trace import Ref
from outcore.lower import lower
from tests.cpu.training import mean_square, same, snapshot
from tests.pure.building import small_problem


def test_a_program_with_variants_of_ops_is_refused_before_it_runs() -> None:
    """PyTorch has no way to name another algorithm: the default would run, unnoticed."""
    problem = small_problem()
    profile = replace(problem.profile, alternatives=((3, (Cost(5e-4, 4096),)),))
    program = lower(replace(problem, profile=profile), make_plan({}, variants={3: 1}))
    with pytest.raises(VerifyError) as caught:
        build(problem.trace, program, torch.default_generator)
    error = caught.value
    assert (error.noun, error.where) == ("program", "instruction 7")
    assert error.detail == "variant 1 of op 3 aten.add.Tensor"


def test_functions_of_a_program_are_freed_with_the_last_reference() -> None:
    """They refer to the whole program: until Python collects garbage, that is megabytes."""
    trace, machine = outcore.trace(nn.Linear(2, 2), torch.ones(2, 2)), outcore.preset("v100-pcie3")
    profile = outcore.estimate(trace, machine.hardware, machine.efficiency)
    problem = outcore.Problem(trace, profile, machine.hardware, budget_bytes=1 << 30)
    built = build(trace, lower(problem, make_plan({})), torch.default_generator)
    functions = [weakref.ref(each) for each in (built.forward, built.backward)]
    gc.disable()
    try:
        del built
        assert [each() for each in functions] == [None, None]
    finally:
        gc.enable()


class Joined(nn.Module):
    """As in the decoder of a U-Net: the gradient of a joined tensor is a slice of a larger one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(self.layers[0](x))
        return torch.cat([self.layers[1](x), x], 1)


def test_a_sum_takes_the_memory_of_what_is_added_where_that_dies() -> None:
    """Its first argument is a slice of the joined gradient, which cannot hold the sum."""

    def train(backend: Any) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Joined()
        call = torch.compile(module, backend=backend, dynamic=False)
        for _ in range(6):
            module.zero_grad()
            loss = mean_square(call(torch.linspace(-1, 1, 8192 * 64).view(8192, 64)))
            loss.backward()
        return snapshot(module, loss.detach())

    backend = Backend(budget="1GiB")
    assert same([train(backend)], [train("aot_eager")])
    assert backend.engine is not None
    (graph,) = backend.engine.graphs
    assert graph.planned is not None
    trace = graph.captured.trace
    (sum_,) = (op for op in trace.ops if op.target == "aten.add.Tensor")
    given = [d.source for d in trace.donations if d.op == sum_.id]
    part, whole = (arg.value for arg in sum_.args[:2] if isinstance(arg, Ref))
    assert given == [whole]
    assert part != whole
    (run,) = (
        i.action
        for i in graph.planned.program.body
        if isinstance(i.action, Run) and i.action.op == sum_.id
    )
    assert len(run.donate) == 1
