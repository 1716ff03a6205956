"""What the tests on a GPU share: the same kernels each time, and an empty device."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _libraries_have_their_memory() -> None:
    """cuBLAS takes some for each thread's first product: no test's budget is to pay for that."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(64, 64, device="cuda", dtype=dtype, requires_grad=True)
        (x @ x).sum().backward()
    torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        yield
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
