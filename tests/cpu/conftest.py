"""What all CPU tests share: a fresh dynamo, few objects to visit, and one thread each.

Small kernels on two threads wait for each other longer than they compute; and where tests run in
several processes, these use the other cores.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outcore.execute.cpu import CpuDriver


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _imports_out_of_sight() -> Iterator[None]:
    """Without it most time goes to visiting half a million objects of imported modules.

    `resident_bytes` looks among all that the collector knows of, several times for each plan. What
    a test makes is made later, and seen.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[CpuDriver]:
    """A CPU driver that leaves no file behind."""
    driver = CpuDriver(tmp_path)
    yield driver
    driver.close()
    assert list(tmp_path.iterdir()) == []
