"""Fused ops on a GPU: Inductor's Triton kernels give the same bits under any plan."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import pytest
import torch
from torch import Tensor

from outcore import Backend, aten
from outcore.capture.fusion import fuse as fusion
from outcore.capture.nodes.registered_ops import NamedOps
from tests.cpu.training import Normed, mean_square, snapshot, tight_budget
from tests.gpu.training import PROFILED_STEPS, needs_compiler

STEPS = PROFILED_STEPS + 2
pytestmark = needs_compiler


@pytest.fixture(autouse=True, scope="module")
def _played() -> Iterator[None]:
    """Replace fused kernels by torch's ops on a simulated GPU, for which nothing compiles them."""
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.get_device_name() == "simulated GPU":
            patch.setattr(fusion, "by_inductor", lambda module, _: module)
            patch.setattr(fusion, "_kernels", {})
            patch.setattr(fusion, "_ops", NamedOps(aten.FUSED))
        yield


def images() -> Tensor:
    return torch.randn(16, 3, 64, 64, generator=torch.Generator().manual_seed(1)).cuda()


def model() -> Normed:
    torch.manual_seed(0)
    return Normed().cuda()


def trained(backend: Backend) -> list[str]:
    """Digests of the loss, gradients and buffers of each step."""
    torch._dynamo.reset()
    module, x = model(), images()
    call = torch.compile(module, backend=backend)
    seen = []
    for _ in range(STEPS):
        module.zero_grad()
        loss = mean_square(call(x))
        loss.backward()
        found = snapshot(module, loss)
        seen.append(sha256(b"".join(t.cpu().numpy().tobytes() for t in found)).hexdigest())
    return seen


@pytest.mark.parametrize("policy", ["search", "swap-all", "recompute-all"])
def test_the_same_bits_under_any_plan(policy: str) -> None:
    in_core = Backend(budget="2GiB", fuse=True)
    expected = trained(in_core)
    assert in_core.report().notes == ()
    budget = tight_budget(model(), [images()], mean_square, 0.5, PROFILED_STEPS, fuse=True)
    backend = Backend(budget=budget, policy=policy, fuse=True, strict=True)
    assert trained(backend) == expected
    report = backend.report()
    assert report.state == "planned"
    assert report.measured_peak_bytes
    assert report.predicted_peak_bytes
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= report.budget_bytes
    assert backend.engine is not None
    ops = backend.engine.graphs[0].captured.trace.ops
    assert len([op for op in ops if op.target.startswith(aten.FUSED)]) >= 8
