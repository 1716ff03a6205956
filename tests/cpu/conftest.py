"""Fixtures for all CPU tests: a reset Dynamo, few objects to visit, and one thread per process.

Two threads that run small kernels wait for each other longer than they compute. If tests run in
several processes, these use the other cores.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from outcore import capture
from outcore.execute import link_tables
from outcore.execute.arena import Arena, own_arena
from outcore.execute.cpu import CpuDriver
from outcore.ir.trace import Trace
from outcore.networks import NetworkSpec
from outcore.runtime import state

ARENA = own_arena()
"""Installed before any test module is imported, so that it sees the tensors that those make."""

TESTS_BETWEEN = 50
"""After every so many tests, all objects are visited again."""

LARGEST_PROBE = 1 << 22
"""Bytes of the largest copy by which links are measured."""

_tests = count(1)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _imports_are_over() -> None:
    """Compile something: torch imports many of its modules at the first compilation."""
    compiled = torch.compile(torch.sin, backend="aot_eager")
    compiled(torch.ones(2, requires_grad=True)).sum().backward()


@pytest.fixture(autouse=True, scope="session")
def _imports_made_no_tensors() -> None:
    """Check that test modules made no tensors: they would count against every test's budget."""
    gc.collect()
    if isinstance(ARENA, Arena):
        assert ARENA.figures().live_bytes == 0, "a module of tests makes tensors when imported"


@pytest.fixture(autouse=True, scope="session")
def _links_are_measured_in_a_hurry() -> Iterator[None]:
    """Measure links with few small copies: each test does, and no result depends on it."""
    small = [nbytes for nbytes in link_tables._NBYTES if nbytes <= LARGEST_PROBE]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link_tables, "_NBYTES", small)
        patch.setattr(link_tables, "_MOST_REPEATS", 1)
        patch.setattr(link_tables, "_FEWEST_REPEATS", 1)
        yield


@pytest.fixture(autouse=True, scope="session")
def _guards_are_not_timed() -> Iterator[None]:
    """Save the 20 ms in which torch flushes caches after each compilation, to log a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *_: 0.0, raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def _networks_are_traced_once() -> Iterator[None]:
    """Trace each network once: commands trace the same small ones often. Other tests cover that."""
    traced: dict[
        tuple[Any, ...], tuple[NetworkSpec, Trace]
    ] = {}  # the spec is kept alive, so its id stays unique
    trace_network = capture.trace_network

    def once(spec: NetworkSpec, samples: int, **sizes: int) -> Trace:
        key = (id(spec), samples, *sorted(sizes.items()))
        if key not in traced:
            traced[key] = spec, trace_network(spec, samples, **sizes)
        return traced[key][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "trace_network", once)
        yield


@pytest.fixture(autouse=True, scope="session")
def _nothing_counts_as_frozen() -> Iterator[None]:
    """Leave the note about `gc.freeze` out of reports: `_fresh_dynamo` hides all that exists."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "frozen_objects", lambda: 0)
        yield


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """Reset Dynamo, and hide the objects that exist so far from the garbage collector.

    Without that, most time goes to visiting the half a million objects of imported modules:
    `resident_bytes` visits all that the collector knows, several times per plan. The objects of
    the test are made later, so they are visited.
    """
    torch._dynamo.reset()
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)  # a test that failed lends its tensors to no other
    if not next(_tests) % TESTS_BETWEEN:  # hidden objects may be garbage by now
        gc.unfreeze()
    for _ in range(3):  # what is finalized leaves more
        if not gc.collect():
            break
    gc.freeze()
    yield
    torch._dynamo.reset()


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[CpuDriver]:
    """A CPU driver, which must leave no file behind."""
    driver = CpuDriver(tmp_path)
    yield driver
    driver.close()
    assert list(tmp_path.iterdir()) == []
