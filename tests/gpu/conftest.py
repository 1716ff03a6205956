"""What the tests on a GPU share: the same kernels each time, and an empty device."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        yield
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
