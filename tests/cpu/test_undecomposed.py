"""Ops that torch's tracing decomposes: they run whole, as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_impls import op_implementations_dict
from torch.nn.functional import hardshrink, interpolate, softshrink

import outcore
from outcore import Backend
from outcore.capture import as_kernels
from tests.cpu.training import mean_square, same, tight_budget, train

ATEN = torch.ops.aten
STEPS = 7

WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "upsample_nearest2d": lambda x: interpolate(x, scale_factor=2),
    "_upsample_nearest_exact2d": lambda x: interpolate(x, size=21, mode="nearest-exact"),
    "upsample_bilinear2d": lambda x: interpolate(x, scale_factor=1.5, mode="bilinear"),
    "upsample_bicubic2d": lambda x: interpolate(x, size=9, mode="bicubic", align_corners=True),
    "_upsample_bilinear2d_aa": lambda x: interpolate(x, size=5, mode="bilinear", antialias=True),
    "upsample_nearest1d": lambda x: interpolate(x.flatten(1, 2), scale_factor=2),
    "upsample_linear1d": lambda x: interpolate(x.flatten(1, 2), scale_factor=2, mode="linear"),
    "upsample_nearest3d": lambda x: interpolate(x[:, None], scale_factor=2),
    "upsample_trilinear3d": lambda x: interpolate(x[:, None], scale_factor=2, mode="trilinear"),
    "softshrink": lambda x: softshrink(x, 0.1),
    "hardshrink": lambda x: hardshrink(x, 0.1),
}


class Resampling(nn.Module):
    """A convolution, one op, and a linear layer."""

    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way
        self.before = nn.Conv2d(3, 8, 3, padding=1)
        self.after = nn.Linear(1, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.before(x))
        return torch.tanh(self.after(self.way(x).flatten()[:, None]))


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Resampling(WAYS[name])


@pytest.mark.parametrize("name", WAYS)
def test_steps_are_those_of_plain_torch(name: str) -> None:
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    module, plain = made(name), made(name)
    budget = tight_budget(made(name), [x], mean_square)
    backend = Backend(budget=budget, policy="swap-all{min_bytes=1KiB}")
    seen = train(module, torch.compile(module, backend=backend), [x], mean_square, STEPS)
    assert same(seen, train(plain, plain, [x], mean_square, STEPS))
    report = backend.report()
    assert report.state == "planned"
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= budget


@pytest.mark.parametrize("name", WAYS)
def test_they_are_one_op_each(name: str) -> None:
    trace = outcore.trace(made(name), torch.randn(4, 3, 8, 8))
    resampled = [op for op in trace.ops if name in op.target]
    assert resampled[0].target == f"aten.{name}.default"
    assert len(resampled) == 2, "and its backward"
    assert not any("index" in op.target for op in trace.ops)


def test_torch_traces_as_before_afterwards() -> None:
    op, key = ATEN.upsample_bilinear2d.vec, torch.DispatchKey.Autograd
    before, described = dict(op.py_kernels), dict(op_implementations_dict)
    assert key in before
    with as_kernels():
        assert op.py_kernels[key] is not before[key]
        assert ATEN.upsample_bilinear2d_backward.default in op_implementations_dict
    assert op.py_kernels == before
    assert op_implementations_dict == described
