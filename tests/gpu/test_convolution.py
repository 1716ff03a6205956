"""Gradients of convolutions, computed one after the other by cuDNN (docs/decisions/0030)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outcore.capture.compiler.compat import layout_if_input_unread
from outcore.capture.rewrites.convolution import BACKWARD, INPUT_GRADIENT
from tests.gpu.training import peak_bytes

SIDES, MAPS, KERNEL = (8, 64, 96, 96), 16, 3
SETTINGS = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
MIB = 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_gradient_of_the_input_alone(dtype: torch.dtype, layout: torch.memory_format) -> None:
    def given(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype).to(memory_format=layout)

    torch.manual_seed(0)
    x, weight = given(*SIDES), given(MAPS, SIDES[1], KERNEL, KERNEL)
    tangents = given(SIDES[0], MAPS, *SIDES[2:])
    laid_out = layout_if_input_unread(x, weight, [MAPS], *SETTINGS)
    assert laid_out is layout
    mask = [True, False, False]

    def together() -> Tensor:
        made: Tensor = BACKWARD(tangents, x, weight, [MAPS], *SETTINGS, mask)[0]
        return made

    def alone() -> Tensor:
        made: Tensor = INPUT_GRADIENT(tangents, x.shape, x.stride(), weight, [MAPS], *SETTINGS)
        return made

    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        for call in (together, alone):
            call()  # allocations that happen only once
        expected, with_memory = peak_bytes(together)
        found, without = peak_bytes(alone)
        whole = BACKWARD(tangents, x, weight, [MAPS], *SETTINGS, [True, True, True])[0]
    assert torch.equal(found, expected)
    assert torch.equal(found, whole)
    assert found.stride() == whole.stride()
    assert without <= with_memory + MIB
