"""Tests of the simulated GPU: it finds the faults it is for (`make test-simulated-gpu`)."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

if not hasattr(torch, "_simulated_gpu"):
    pytest.skip("needs the simulated GPU", allow_module_level=True)

NBYTES = 1 << 24


def sent(stream: torch.cuda.Stream) -> Tensor:
    """Zeros on the device that a slow copy on `stream` overwrites with ones; nobody has waited."""
    host = torch.ones(NBYTES, dtype=torch.uint8).pin_memory()
    target = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    assert not bool(target.any() | target.all())  # gets slow first-time work done
    with torch.cuda.stream(stream):
        torch.cuda._sleep(4_000_000_000)
        target.copy_(host, non_blocking=True)
    return target


def test_a_copy_that_nobody_waits_for_comes_too_late() -> None:
    assert not bool(sent(torch.cuda.Stream()).any())


def test_a_copy_that_is_waited_for_is_there() -> None:
    stream = torch.cuda.Stream()
    target = sent(stream)
    torch.cuda.current_stream().wait_stream(stream)
    assert bool(target.all())


def test_the_host_goes_on_while_the_device_computes() -> None:
    torch.cuda._sleep(4_000_000_000)
    before = torch.cuda.current_stream().record_event()
    value = torch.ones(4, device="cuda") * 3
    assert not before.query()
    assert value.tolist() == [3.0] * 4
    assert before.query()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_waiting_can_be_an_error() -> None:
    value = torch.ones(4, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            value.nonzero()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_card_is_only_so_large() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    held = torch.empty(total // 2, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total // 2 + NBYTES, dtype=torch.uint8, device="cuda")
    del held
    torch.cuda.empty_cache()


def test_random_numbers_follow_the_generator_of_the_device() -> None:
    def drawn() -> Tensor:
        torch.cuda.manual_seed(7)
        ones = torch.ones(1000, device="cuda")
        return F.dropout(ones) + torch.rand(1000, device="cuda")

    first, other = drawn(), torch.rand(1000, device="cuda")
    assert torch.equal(drawn(), first)
    assert torch.equal(torch.rand(1000, device="cuda"), other)
    assert not torch.equal(torch.rand(1000, device="cuda"), other)


def test_results_are_those_of_the_cpu() -> None:
    given = torch.randn(4, 3, 16, 16)
    weight = torch.randn(8, 3, 3, 3)
    result = F.conv2d(given.cuda(), weight.cuda(), padding=1)
    assert torch.equal(result.cpu(), F.conv2d(given, weight, padding=1))
    least = torch.empty(0, device="cuda")
    torch.minimum(given.cuda(), given.cuda().flip(0), out=least)
    assert torch.equal(least.cpu(), torch.minimum(given, given.flip(0)))


@pytest.mark.parametrize(
    ("kernel", "dtype", "apart"),
    [
        (SDPBackend.EFFICIENT_ATTENTION, torch.float32, 1e-5),
        (SDPBackend.FLASH_ATTENTION, torch.bfloat16, 0.02),
        (SDPBackend.CUDNN_ATTENTION, torch.bfloat16, 0.02),
    ],
    ids=["efficient", "flash", "cudnn"],
)
def test_fused_attention_is_attention(kernel: SDPBackend, dtype: torch.dtype, apart: float) -> None:
    given = torch.randn(3, 2, 2, 48, 16, dtype=dtype)

    def result(device: str) -> Tensor:
        leaf = given.detach().to(device).requires_grad_()
        query, key, value = leaf
        with sdpa_kernel(kernel) if device == "cuda" else nullcontext():
            attention = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return torch.autograd.grad(attention.float().square().sum(), leaf)[0].cpu()

    torch.testing.assert_close(result("cuda"), result("cpu"), atol=apart, rtol=apart)


def test_a_kernel_that_nobody_plays_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="not supported"):
        torch._fused_dropout(torch.ones(4, device="cuda"), 0.5)


TRAINS_WITHOUT_VIRTUAL_MEMORY = """
import torch, outcore, warnings
module = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).cuda()
x = torch.ones(4096, 512, device="cuda")
warnings.simplefilter("ignore")
outcore.wrap(module, "80MiB", strict=True, policy="swap-all")
for _ in range(8):
    module(x).square().mean().backward()
report = outcore.handle(module).report()
assert report.state == "planned", report
assert report.measured_peak_bytes <= report.budget_bytes, report
settings = outcore.execute.torch_allocator.settings()
print(settings[1], torch.cuda.memory_stats()["segment.all.current"] > 0)
"""


def test_a_gpu_without_virtual_memory_trains() -> None:
    """torch's allocator goes on with ordinary segments after the driver refused one."""
    command = [sys.executable, "-c", TRAINS_WITHOUT_VIRTUAL_MEMORY]
    env = os.environ | {"SIMULATED_GPU_MAPS": "0"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "expandable_segments:False True\n", done.stderr
