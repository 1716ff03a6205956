"""Gradients of cross-entropy by CUDA's kernels, a block of rows at a time (docs/decisions/0033)."""

from __future__ import annotations

import pytest
import torch

from outcore import aten
from outcore.capture.rewrites import cross_entropy
from outcore.capture.rewrites.cross_entropy import GRADIENT
from tests.cpu.donating import bits
from tests.cpu.scores import by_torch, cases, given
from tests.gpu.training import peak_bytes

OVER = aten.in_place(aten.CROSS_ENTROPY)
MIB = 1 << 20


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_bits_are_torch_s(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "LEAST_BLOCK_BYTES", 0)
    for args, kind in cases(dtype, "cuda"):
        expected = by_torch(*args)
        assert torch.equal(bits(GRADIENT(*args)), bits(expected)), kind
        over = args[1].clone()
        OVER(args[0], over, *args[2:], out=over)
        assert torch.equal(bits(over), bits(expected)), kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_takes_a_block(dtype: torch.dtype) -> None:
    args = given((4096, 8192), dtype, "cuda")
    expected, output = by_torch(*args), args[1]
    over, taken = peak_bytes(lambda: OVER(*args, out=output))
    assert torch.equal(over, expected)
    assert taken < output.nbytes // 16 + 2 * MIB
