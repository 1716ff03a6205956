"""Fixtures for all GPU tests: deterministic kernels, and a device without leftovers."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True, scope="session")
def _libraries_have_their_memory() -> None:
    """Make cuBLAS and cuBLASLt allocate their workspaces, so that no test's budget pays for them.

    cuBLAS allocates at each thread's first product, cuBLASLt at the first one with a bias. The
    checkpoint makes the backward thread run both kinds, too.
    """
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(64, 64, device="cuda", dtype=dtype, requires_grad=True)
        (x @ x).sum().backward()
        checkpoint(F.linear, x, x, x[0], use_reentrant=False).sum().backward()
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
