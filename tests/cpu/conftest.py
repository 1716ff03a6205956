"""What all CPU tests share: a fresh dynamo, few objects to visit, and one thread each.

Small kernels on two threads wait for each other longer than they compute; and where tests run in
several processes, these use the other cores.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from outcore import capture
from outcore.execute import driver as interface
from outcore.execute.arena import Arena, own_arena
from outcore.execute.cpu import CpuDriver
from outcore.ir.trace import Trace
from outcore.networks import NetworkSpec

ARENA = own_arena()
"""Before any module of tests is imported, so that it sees what those make."""

TESTS_BETWEEN = 50
"""After so many all objects are visited."""

_tests = count(1)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _imports_are_over() -> None:
    """Much of torch is imported where something is first compiled."""
    compiled = torch.compile(torch.sin, backend="aot_eager")
    compiled(torch.ones(2, requires_grad=True)).sum().backward()


@pytest.fixture(autouse=True, scope="session")
def _imports_made_no_tensors() -> None:
    """Those would lie in the arena in all tests, and count against their budgets."""
    gc.collect()
    if isinstance(ARENA, Arena):
        assert ARENA.figures().live_bytes == 0, "a module of tests makes tensors when imported"


@pytest.fixture(autouse=True, scope="session")
def _links_are_measured_in_a_hurry() -> Iterator[None]:
    """Each test measures them anew; what they are decides nothing that is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "_MOST_REPEATS", 1)
        patch.setattr(interface, "_FEWEST_REPEATS", 1)
        yield


@pytest.fixture(autouse=True, scope="session")
def _networks_are_traced_once() -> Iterator[None]:
    """Commands trace a few small ones again and again; how that is done has tests of its own."""
    traced: dict[tuple[Any, ...], tuple[NetworkSpec, Trace]] = {}  # a spec that lives keeps its id
    trace_network = capture.trace_network

    def once(spec: NetworkSpec, samples: int, **sizes: int) -> Trace:
        key = (id(spec), samples, *sorted(sizes.items()))
        if key not in traced:
            traced[key] = spec, trace_network(spec, samples, **sizes)
        return traced[key][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "trace_network", once)
        yield


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """Compile as if for the first time, with what others left out of sight.

    Without that most time goes to visiting the objects of imported modules, half a million:
    `resident_bytes` looks among all that the collector knows of, several times for each plan. What
    a test makes is made later, and seen.
    """
    torch._dynamo.reset()
    if not next(_tests) % TESTS_BETWEEN:  # what was in use then may be garbage by now
        gc.unfreeze()
    gc.collect()
    gc.freeze()
    yield
    torch._dynamo.reset()


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[CpuDriver]:
    """A CPU driver that leaves no file behind."""
    driver = CpuDriver(tmp_path)
    yield driver
    driver.close()
    assert list(tmp_path.iterdir()) == []
