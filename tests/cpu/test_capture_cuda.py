"""Capturing CUDA graphs without a GPU: what they have that CPU graphs do not."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from outcore import aten
from outcore.capture import capture
from outcore.errors import CaptureError
from outcore.ir.trace import Effect
from outcore.ir.verify import verify_trace

ATEN = torch.ops.aten


def flash(
    q: Tensor, k: Tensor, v: Tensor, tangents: Tensor, dropout: float = 0.1
) -> tuple[Tensor, ...]:
    forward, back = (
        ATEN._scaled_dot_product_flash_attention,
        ATEN._scaled_dot_product_flash_attention_backward,
    )
    y, sums, *lengths, seed, offset, _ = forward(q, k, v, dropout, True)
    return y, *back(tangents, q, k, v, y, sums, *lengths, dropout, True, seed, offset)


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, tangents: Tensor, dropout: float = 0.1
) -> tuple[Tensor, ...]:
    forward, back = (
        ATEN._scaled_dot_product_cudnn_attention,
        ATEN._scaled_dot_product_cudnn_attention_backward,
    )
    y, sums, *lengths, seed, offset, _ = forward(q, k, v, None, True, dropout, True)
    return y, *back(tangents, q, k, v, y, sums, seed, offset, None, *lengths, dropout, True)


def memory_efficient(
    q: Tensor, k: Tensor, v: Tensor, tangents: Tensor, dropout: float = 0.1
) -> tuple[Tensor, ...]:
    forward, back = (
        ATEN._scaled_dot_product_efficient_attention,
        ATEN._scaled_dot_product_efficient_attention_backward,
    )
    y, *saved = forward(q, k, v, None, True, dropout, True)
    wanted = [True, True, True, False]
    return y, *back(tangents, q, k, v, None, y, *saved, dropout, wanted, True)[:3]


@pytest.mark.parametrize("dropout", [0.1, 0.0])
@pytest.mark.parametrize("step", [flash, cudnn, memory_efficient])
def test_attention_on_a_gpu_is_captured(step: Callable[..., Any], dropout: float) -> None:
    """CUDA attention kernels return lengths as well as tensors. Tracing them needs no GPU."""
    with FakeTensorMode():
        given = [torch.empty(2, 4, 128, 64, device="cuda", dtype=torch.half) for _ in range(4)]
        joint = make_fx(lambda *tensors: step(*tensors, dropout=dropout))(*given)
    captured = capture(joint, 1)
    verify_trace(captured.trace)
    assert (Effect.RANDOM in captured.trace.ops[0].effects) is bool(dropout)
    assert captured.device.type == "cuda"
    assert [op.target.split(".")[1].endswith("backward") for op in captured.trace.ops] == [
        False,
        True,
    ]


def test_a_number_that_an_op_returns_and_another_reads() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
        y, *_ = flash(q, k, v, tangents)
        return y, y * 2

    with FakeTensorMode():
        given = [torch.empty(2, 4, 128, 64, device="cuda", dtype=torch.half) for _ in range(4)]
        joint = make_fx(step)(*given)
    graph = joint.graph
    attention = next(n for n in graph.nodes if "flash_attention" in n.name)
    with graph.inserting_after(attention):
        length = graph.call_function(operator.getitem, (attention, 4))
        length.meta["val"] = 128
    double = next(n for n in graph.nodes if n.target is ATEN.mul.Tensor)
    double.args = (double.args[0], length)
    with pytest.raises(CaptureError, match="a number that another op returns to the host"):
        capture(joint, 1)


def test_scalars_on_the_host_beside_a_gpu() -> None:
    """Ops on any device read them, but write nothing over them: they are in host memory."""

    def step(x: Tensor, scale: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
        half = scale * 0.5
        return x * half, tangents * half

    with FakeTensorMode():
        joint = make_fx(step)(
            torch.empty(8, device="cuda"), torch.empty(()), torch.empty(8, device="cuda")
        )
    captured = capture(joint, 1)
    assert captured.device.type == "cuda"
    assert [donation.op for donation in captured.trace.donations] == [1, 2]  # not of a scalar


def convolved(*, transposed: bool, **flags: bool) -> list[bool]:
    """Whether a convolution and its gradient are each unrepeatable under these cuDNN flags."""

    def step(x: Tensor, weight: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
        how = ([1, 1], [0, 0], [1, 1], transposed, [0, 0], 1)
        y = ATEN.convolution(x, weight, None, *how)
        back = ATEN.convolution_backward(tangents, x, weight, None, *how, [True, True, False])
        return y, *back[:2]

    shapes = (2, 4, 8, 8), (4, 4, 1, 1), (2, 4, 8, 8)
    with FakeTensorMode():
        joint = make_fx(step)(*(torch.empty(shape, device="cuda") for shape in shapes))
    with torch.backends.cudnn.flags(enabled=True, **flags):
        trace = capture(joint, 1).trace
    return [Effect.UNREPEATABLE in op.effects for op in trace.ops]


@pytest.mark.parametrize("deterministic", [False, True])
def test_convolutions_that_cudnn_tries_out_run_once(deterministic: bool) -> None:
    found = convolved(transposed=False, benchmark=True, deterministic=deterministic)
    assert found == [True, True]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_convolutions_that_may_add_by_atomics_run_once(
    deterministic: bool, transposed: bool
) -> None:
    found = convolved(transposed=transposed, benchmark=False, deterministic=deterministic)
    assert found == [transposed and not deterministic, not deterministic]


def test_what_varies_on_a_gpu_runs_once_there() -> None:
    """Sums of integers are exact, and CPU kernels always sum in the same order."""

    def step(x: Tensor, whole: Tensor, at: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
        y = ATEN.scatter.src(ATEN.cumsum(x, 0), 0, at, x)
        return y, ATEN.cumsum(whole, 0), ATEN.reflection_pad1d_backward(tangents, y, [1, 1])

    def once(device: str) -> list[bool]:
        with FakeTensorMode():
            whole = torch.empty(4, 8, dtype=torch.int64, device=device)
            joint = make_fx(step)(
                torch.empty(4, 8, device=device), whole, whole, torch.empty(4, 10, device=device)
            )
        trace = capture(joint, 2).trace
        return [Effect.UNREPEATABLE in op.effects for op in trace.ops]

    assert once("cuda") == [True, True, False, True]
    assert once("cpu") == [False, False, False, False]
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)  # some kernels are not
        assert once("cuda") == [True, True, False, True]
        torch.use_deterministic_algorithms(True)
        assert once("cuda") == [False, False, False, False]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_keeps_any_of_several_values_runs_once(device: str) -> None:
    """Where an index occurs twice, threads decide which value stays, also on a CPU."""

    def step(x: Tensor, at: Tensor, rows: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
        wide = ATEN.max_unpool2d(x, at, [8, 8])
        return ATEN.index_copy(wide, 0, rows, wide), ATEN.relu(tangents)

    with FakeTensorMode():
        small = torch.empty(2, 3, 4, 4, device=device)
        rows = torch.empty(2, dtype=torch.int64, device=device)
        joint = make_fx(step)(small, small.long(), rows, torch.empty(2, 3, 8, 8, device=device))
    trace = capture(joint, 1).trace
    once = {op.target for op in trace.ops if Effect.UNREPEATABLE in op.effects}
    assert once == {"aten.max_unpool2d.default", "aten.index_copy.default"}


def test_names_of_ops_that_vary_are_names_of_ops() -> None:
    newer = {"aten._upsample_lanczos2d_aa_backward.default"}  # than torch 2.11
    for name in (aten.VARYING | aten.VARYING_ON_CUDA) - newer:
        aten.resolve(name)
    assert aten.EXACT_ON_INTEGERS <= aten.VARYING_ON_CUDA
    assert not aten.VARYING & aten.VARYING_ON_CUDA
