"""Helpers that train one model twice on a GPU: by outcore, and by torch with the same graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpu.machine import has_compiler
from benchmarks.kit.modes import same_graph
from outcore import Backend
from outcore.ir.hardware import Tier
from outcore.ir.margin import MARGIN_DIVISOR
from outcore.policies import floor
from tests.cpu.training import PROFILED_STEPS as CPU_PROFILED_STEPS
from tests.cpu.training import Small, mean_square, train

PROFILED_STEPS = CPU_PROFILED_STEPS + 1
"""One more step is metered than on a CPU."""
POLICIES = ("swap-all", "swap-all-naive", "recompute-all", "swap-opt", "pooch", "pooch{early=true}")
ROOMY_BYTES = 4 << 30

needs_compiler = pytest.mark.skipif(
    not (has_compiler() or hasattr(torch, "_simulated_gpu")),
    reason="Triton's kernels take a C compiler (gcc, clang or $CC)",
)
"""A simulated GPU needs no compiler: torch's ops replace the kernels."""


@dataclass(frozen=True)
class Way:
    """How to train the small model: the layout of images and weights, and the precision."""

    layout: torch.memory_format = torch.contiguous_format
    autocast: torch.dtype | None = None

    def images(self) -> Tensor:
        seeded = torch.Generator().manual_seed(0)
        return torch.randn(32, 3, 64, 64, generator=seeded).cuda().to(memory_format=self.layout)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        module: nn.Module = Small().cuda()
        module.to(memory_format=self.layout)  # type: ignore[call-overload]  # torch's types lack it
        return module

    def precision(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.autocast is None else torch.autocast("cuda", self.autocast)

    def train(self, backend: Any, steps: int) -> tuple[list[list[Tensor]], nn.Module, Any]:
        """Results of all steps, the model, and the compiled call."""
        torch._dynamo.reset()
        module = self.model()
        compiled = torch.compile(module, backend=backend)

        def call(*args: Any) -> Any:
            with self.precision():
                return compiled(*args)

        return train(module, call, [self.images()], mean_square, steps), module, call

    def reference(self, steps: int) -> list[list[Tensor]]:
        """Results of all steps if torch runs the same graph."""
        return self.train(same_graph, steps)[0]

    def plain(self, steps: int) -> list[list[Tensor]]:
        """Results of all steps by plain PyTorch."""
        return self.train("eager", steps)[0]

    def tight(self, share: float = 0.3) -> int:
        """A budget at `share` of the way from the floor to the in-core peak."""
        backend = Backend(budget=ROOMY_BYTES)
        kept = self.train(backend, PROFILED_STEPS)
        budget = tight_of(backend, share)
        del kept  # a graph lives as long as what torch compiled
        return budget


def tight_of(backend: Backend, share: float = 0.3) -> int:
    """A budget at `share` of the way from the floor to the in-core peak of a graph.

    `backend`: it has planned one graph under `ROOMY_BYTES`.
    """
    assert backend.engine is not None
    plan = backend.engine.graphs[0].planned
    assert plan is not None
    least, most = floor(plan.problem).nbytes, plan.in_core.peak(Tier.DEVICE)
    margin = ROOMY_BYTES // MARGIN_DIVISOR
    return int((least + share * (most - least) - margin) * (1 + 2 / MARGIN_DIVISOR))


PLAIN = Way()


def images() -> Tensor:
    return PLAIN.images()


def small() -> nn.Module:
    return PLAIN.model()


def reference(steps: int) -> list[list[Tensor]]:
    return PLAIN.reference(steps)


def tight() -> int:
    return PLAIN.tight()


def planned(steps: int, **options: Any) -> tuple[list[list[Tensor]], Backend, nn.Module, Any]:
    backend = Backend(**options)
    seen, module, call = PLAIN.train(backend, steps)
    return seen, backend, module, call


def part(roomy: Backend, share: float) -> int:
    """A budget of `share` of the step's in-core memory, plus what libraries hold now.

    Libraries hold 70 MB on an H100, as much as the tests' steps need. `roomy` has trained the step
    in-core, with a budget of `ROOMY_BYTES`.
    """
    peak = roomy.report().in_core_peak_bytes
    assert peak is not None
    torch._dynamo.reset()
    gc.collect()
    held = torch.cuda.memory_allocated()
    return held + int((peak - ROOMY_BYTES // MARGIN_DIVISOR - held) * share)


def peak_bytes(call: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """The result of `call`, and its peak device memory beyond what was held before."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made = call()
    torch.cuda.synchronize()
    return made, torch.cuda.max_memory_allocated() - before
