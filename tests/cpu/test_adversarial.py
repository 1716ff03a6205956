"""Programs on a driver that copies as late as edges allow: a missing wait gives wrong numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from outcore import Backend
from outcore.execute import Executable, Instruments, build
from outcore.ir.program import Copy, Program, Stream
from outcore.runtime.budget.engine import Engine
from outcore.runtime.graphs.execution import PlannedExecution
from outcore.runtime.graphs.graph import PlannedGraph
from tests.cpu.adversarial import AdversarialDriver
from tests.cpu.training import PROFILED_STEPS, Small, batch, mean_square, same, snapshot

POISONED = Instruments(poisoned=True)


class Trained:
    """A planned `Small`, and a step of it under any program."""

    def __init__(self, policy: str) -> None:
        torch.manual_seed(0)
        self.module: nn.Module = Small()
        self.backend = Backend(budget="2MiB", policy=policy)
        self.call = torch.compile(self.module, backend=self.backend)
        for _ in range(PROFILED_STEPS):
            self.step()
        self.backend.report()
        assert self.backend.engine is not None
        self.engine: Engine = self.backend.engine
        self.graph: PlannedGraph = self.engine.graphs[0]

    def step(self) -> list[torch.Tensor]:
        self.module.zero_grad()
        torch.manual_seed(1)
        loss = mean_square(self.call(batch(0)))
        loss.backward()
        # Leave out the running statistics, which change with each step.
        return snapshot(self.module, loss)[: 1 + len(list(self.module.parameters()))]

    def follow(self, executable: Executable) -> None:
        """Make the next steps run `executable`: no trial, and no new plan."""
        planned = self.graph.planned
        assert planned is not None
        everything = 1 << 60
        self.graph.execution = PlannedExecution(planned, executable, foreseen_bytes=everything)
        self.graph.status.times.steps = 0

    @property
    def program(self) -> Program:
        assert self.graph.planned is not None
        return self.graph.planned.program

    def adversarial_step(self, program: Program) -> list[torch.Tensor]:
        engine = self.engine
        engine.driver = AdversarialDriver()
        trace, generator = self.graph.captured.trace, engine.driver.generator
        self.follow(build(trace, program, generator, POISONED))
        return self.step()


@pytest.mark.parametrize("policy", ["swap-all", "swap-all-naive", "recompute-all", "pooch"])
def test_late_copies_change_nothing(policy: str) -> None:
    trained = Trained(policy)
    expected = trained.step()
    assert same([trained.adversarial_step(trained.program)], [expected])


def test_every_wait_of_the_compute_stream_is_needed() -> None:
    trained = Trained("swap-all")
    expected = trained.step()
    program = trained.program
    edges = killed = 0
    for position, instruction in enumerate(program.body):
        for edge in instruction.after:
            is_wait = isinstance(program.body[edge].action, Copy)
            if instruction.stream is not Stream.COMPUTE or not is_wait:
                continue
            kept = tuple(e for e in instruction.after if e != edge)
            body = (*program.body[:position], replace(instruction, after=kept))
            mutant = replace(program, body=(*body, *program.body[position + 1 :]))
            edges += 1
            killed += not same([trained.adversarial_step(mutant)], [expected])
    assert edges > 20
    assert killed == edges
