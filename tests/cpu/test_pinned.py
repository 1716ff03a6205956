"""Pinned host memory for a GPU, with a stand-in for CUDA's runtime."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from outcore.errors import CaptureError, HostMemoryError, OptionValueError
from outcore.execute import open_driver, torch_allocator
from outcore.execute import pinned as pinned_module
from outcore.execute.pinned import (
    near,
    parse_processors,
    pinned,
    processors_near,
    shrink,
    touch,
)

GPU = torch.device("cuda", 0)


class Runtime:
    """Stands in for CUDA's runtime: registers everything, or refuses with `error`."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.error_of_unregister = 0
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's
        assert flags == 0
        assert address % mmap.PAGESIZE == 0
        self.calls.append(("register", nbytes))
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's
        # The memory must still be mapped: reading unmapped memory would end the process.
        ctypes.string_at(address, 1)
        self.calls.append(("unregister", 0))
        return self.error_of_unregister


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: runtime.calls.append(("wait", 0)))
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return runtime


def test_each_page_is_asked_for_before_it_is_registered() -> None:
    for nbytes in (1, mmap.PAGESIZE, 37 * mmap.PAGESIZE + 5):
        array = np.ones(nbytes, np.uint8)
        touch(array)
        assert [i for i, each in enumerate(array) if not each] == [*range(0, nbytes, mmap.PAGESIZE)]


def test_memory_is_registered_while_anybody_refers_to_it(runtime: Runtime) -> None:
    memory = pinned(10_000, GPU)
    assert memory.shape == (10_000,)
    part = memory[100:200]
    part.fill_(7)
    del memory
    gc.collect()
    assert runtime.calls == [("register", 10_000)]
    assert bool((part == 7).all())
    del part
    gc.collect()
    assert runtime.calls[1:] == [("wait", 0), ("unregister", 0)]


def test_memory_that_cannot_be_registered_will_do(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.error = 2
    asked: list[torch.device] = []
    monkeypatch.setattr("outcore.execute.pinned._forget_error", asked.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: runtime.calls.append(("empty", 0)))
    with pytest.warns(UserWarning, match=r"9\.77 KiB of host memory cannot be pinned"):
        memory = pinned(10_000, GPU)
    assert asked == [GPU, GPU]
    memory.fill_(1)
    del memory
    gc.collect()
    assert runtime.calls == [("register", 10_000), ("empty", 0), ("register", 10_000)]


def test_it_is_asked_once_more_where_torch_gave_the_device_memory_back(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.error = 2
    monkeypatch.setattr("outcore.execute.pinned._forget_error", lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(runtime, "error", 0))
    memory = pinned(10_000, GPU)  # without a warning
    del memory
    gc.collect()
    assert [call for call, _ in runtime.calls] == ["register", "register", "wait", "unregister"]


def test_memory_is_given_back_though_the_device_is_broken(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: torch.device) -> None:
        raise RuntimeError("an earlier kernel failed")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    memory = pinned(10_000, GPU)
    del memory
    gc.collect()
    assert [call for call, _ in runtime.calls] == ["register", "unregister"]


def test_a_forked_process_gives_back_nothing_that_lies_in_the_place_of_it(
    runtime: Runtime,
) -> None:
    """A forked process does not have the memory, and may map other memory at its address."""
    memory = pinned(1 << 20, GPU)
    process = os.fork()
    if not process:
        status = 1
        try:
            place = memory.data_ptr()
            fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
            system = ctypes.CDLL(None).mmap
            system.restype, system.argtypes = ctypes.c_size_t, [ctypes.c_size_t] * 6
            if system(place, 1 << 20, mmap.PROT_READ | mmap.PROT_WRITE, fixed, -1, 0) == place:
                del memory
                ctypes.memset(place, 7, 1 << 20)
                status = 0
        finally:
            os._exit(status if len(runtime.calls) == 1 else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    del memory


def interrupted(*_: object) -> int:
    """As when the user interrupts a call of CUDA, which runs to its end first."""
    raise KeyboardInterrupt


def test_an_interrupt_while_it_is_registered_leaves_nothing_registered(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "cudaHostRegister", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pinned(10_000, GPU)
    gc.collect()
    assert [call for call, _ in runtime.calls] == ["wait", "unregister"]


def test_an_interrupt_while_it_shrinks_leaves_nothing_registered(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = pinned(40_000, GPU)
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "synchronize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            shrink(memory, 10_000, GPU)
    assert [call for call, _ in runtime.calls] == ["register", "unregister"]
    del memory  # unregistering once more is refused, and does no harm
    gc.collect()
    assert [call for call, _ in runtime.calls][2:] == ["wait", "unregister"]


def test_memory_shrinks_in_its_place(runtime: Runtime) -> None:
    whole = pinned(40_000, GPU).fill_(7)
    rest = whole[-1:]
    part = shrink(whole, 10_000, GPU)
    assert part.shape == (10_000,)
    assert part.data_ptr() == whole.data_ptr()
    assert bool((part == 7).all())
    assert not rest.item()  # the system took that page back, and gives a new one
    del whole, rest
    gc.collect()
    again = shrink(part, 5_000, GPU)
    del part, again
    gc.collect()
    once = [("wait", 0), ("unregister", 0)]
    first, second, third = ([("register", nbytes)] for nbytes in (40_000, 10_000, 5_000))
    assert runtime.calls == [*first, *once, *second, *once, *third, *once]


def test_memory_stays_registered_where_it_cannot_be_shrunk(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outcore.execute.pinned._forget_error", lambda _: None)
    whole = pinned(40_000, GPU).fill_(7)
    runtime.error_of_unregister = 1
    assert shrink(whole, 10_000, GPU) is whole
    assert bool((whole == 7).all())
    runtime.error_of_unregister = 0
    del whole
    gc.collect()
    assert [call for call, _ in runtime.calls] == ["register", *["wait", "unregister"] * 2]


def test_pages_that_the_system_does_not_take_back_stay(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pinned(40_000, GPU).fill_(7)

    def refuses(*_: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("outcore.execute.pinned._Map.madvise", refuses)
    assert shrink(whole, 10_000, GPU) is whole
    assert runtime.calls[-1] == ("register", 40_000)
    assert bool((whole == 7).all())


def test_memory_that_was_not_registered_is_not_when_it_shrinks(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.error = 2
    monkeypatch.setattr("outcore.execute.pinned._forget_error", lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with pytest.warns(UserWarning, match="cannot be pinned"):
        memory = pinned(10_000, GPU)
    runtime.calls.clear()
    assert shrink(memory, 100, GPU).shape == (100,)
    assert not runtime.calls


def test_more_than_there_is_is_refused(runtime: Runtime) -> None:
    with pytest.raises(HostMemoryError, match=r"needed.*host_budget"):
        pinned(1 << 60, GPU)
    assert not runtime.calls


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("5", {5}), ("", set())],
)
def test_lists_of_processors(text: str, numbers: set[int]) -> None:
    assert parse_processors(text) == numbers


def test_the_processors_beside_a_gpu(runtime: Runtime, tmp_path: Path) -> None:
    assert processors_near(GPU, tmp_path) == set()  # the system does not say
    device = tmp_path / "bus/pci/devices/0000:1b:00.0"
    node = tmp_path / "devices/system/node/node1"
    for folder in (device, node):
        folder.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    (node / "cpulist").write_text("4-5\n")
    assert processors_near(GPU, tmp_path) == {4, 5}
    (device / "numa_node").write_text("-1\n")
    assert processors_near(GPU, tmp_path) == set()
    assert not runtime.calls


@pytest.mark.parametrize(("allocator", "caching"), [("cudaMallocAsync", ""), ("native", "1")])
def test_a_gpu_whose_allocator_keeps_no_count_is_refused(
    allocator: str, caching: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: allocator)
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", caching)
    with pytest.raises(CaptureError, match="does not report GPU memory"):
        open_driver(GPU, tmp_path, None)


def test_torchs_own_allocator_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "0")
    assert torch_allocator.counts()


def test_the_link_of_a_gpu_cannot_be_slowed_down(tmp_path: Path) -> None:
    with pytest.raises(OptionValueError, match="cannot be slowed down"):
        open_driver(GPU, tmp_path, 1e9)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system binds no threads")
@pytest.mark.skipif(os.cpu_count() == 1, reason="there is one processor")
@pytest.mark.parametrize("here", [True, False])
def test_memory_is_touched_on_processors_of_this_process(
    here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher may have bound it to one of those near the GPU, or to others."""
    allowed = os.sched_getaffinity(0)
    one = min(allowed)
    found = allowed if here else allowed - {one}
    monkeypatch.setattr(pinned_module, "processors_near", lambda _: found)
    os.sched_setaffinity(0, {one})
    try:
        with near(GPU):
            assert os.sched_getaffinity(0) == {one}
        assert os.sched_getaffinity(0) == {one}
    finally:
        os.sched_setaffinity(0, allowed)
