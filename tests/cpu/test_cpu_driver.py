"""CpuDriver: all bytes come back, faults surface at the wait, nothing is left behind."""

import contextlib
import ctypes
import errno
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
from itertools import count, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from outcore import Backend
from outcore.errors import SpillError, StepError, VerifyError
from outcore.execute.arena import Arena
from outcore.execute.cpu import COPY_IN_OVERHEAD_BYTES, CpuDriver
from outcore.execute.disk import MEMORY_ALIGNMENT_BYTES, SpillFile, region_nbytes
from outcore.execute.driver import CopySpan, Region
from outcore.ir.hardware import Tier
from outcore.ir.program import Copy, Stream
from outcore.measure import metered, resident_bytes
from tests.cpu.ending import ends_in_a_fork, workers, workers_end
from tests.cpu.storages import random_storage, region_of, regions_of, same
from tests.cpu.training import PROFILED_STEPS

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    driver = CpuDriver(tmp_path_factory.mktemp("shared"))
    yield driver
    driver.close()


def open_files(directory: Path) -> list[Path]:
    files = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this listing
            files.append(descriptor.readlink())
    return [file for file in files if directory in file.parents]


# ---- every byte comes back -----------------------------------------------------------------------


@given(
    dtype=st.sampled_from(DTYPES),
    shape=SHAPES,
    padding=st.integers(0, 3),
    residue=st.integers(0, MEMORY_ALIGNMENT_BYTES // 16 - 1).map(lambda n: 16 * n),
    twice=st.booleans(),
)
def test_a_storage_comes_back_with_all_its_bytes(shared, dtype, shape, padding, residue, twice):
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(1, extent) + padding)
    strides = strides[-len(shape) :] if shape else []
    last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    elements = 0 if 0 in shape else last + 1 + padding
    nbytes = elements * dtype.itemsize
    tensor = random_storage(nbytes, residue).view(dtype).as_strided(shape, strides)
    assert tensor.untyped_storage().nbytes() == nbytes
    lane = shared.open_lane(regions_of(tensor))
    out = lane.copy_out(tensor, 0)
    back, handle = lane.copy_in(0, out)
    lane.wait(handle)
    assert same(tensor, back)
    assert nbytes == 0 or (back.data_ptr() - tensor.data_ptr()) % MEMORY_ALIGNMENT_BYTES == 0
    if twice:  # as in a second backward call
        again, handle = lane.copy_in(0)
        lane.wait(handle)
        assert same(tensor, again)
        assert nbytes == 0 or again.data_ptr() != back.data_ptr()
    lane.close()


def test_an_empty_storage_comes_back_wherever_it_lies(driver):
    for _ in range(20):  # the address of an empty storage is arbitrary
        tensor = torch.empty(30, 6, 0)
        lane = driver.open_lane(regions_of(tensor))
        back, handle = lane.copy_in(0, lane.copy_out(tensor, 0))
        lane.wait(handle)
        assert same(tensor, back)
        lane.close()


def test_many_copies_in_flight(driver):
    tensors = [torch.randn(n) for n in (1, 100_003, 5, 4_000_000, 77_777, 1024)]
    lane = driver.open_lane(regions_of(*tensors))
    outs = [lane.copy_out(t, k) for k, t in enumerate(tensors)]
    backs = [lane.copy_in(k, outs[k]) for k in reversed(range(len(tensors)))]
    for (back, handle), tensor in zip(backs, reversed(tensors), strict=True):
        lane.wait(handle)
        assert same(tensor, back)
    lane.close()


def test_the_tensor_copied_in_costs_a_stated_overhead(driver):
    lane = driver.open_lane(regions_of(torch.ones(1000)))
    lane.copy_out(torch.ones(1000), 0)
    _, reading = metered(lambda: lane.copy_in(0))
    assert 4000 <= reading.peak_bytes() <= 4000 + COPY_IN_OVERHEAD_BYTES
    lane.close()


def test_memory_is_free_once_waited_for_and_deleted(driver):
    tensor = torch.ones(1 << 20)
    alive = weakref.ref(tensor)
    lane = driver.open_lane(regions_of(tensor))
    handle = lane.copy_out(tensor, 0)
    lane.wait(handle)
    del tensor
    assert alive() is None
    back, handle = lane.copy_in(0)
    alive = weakref.ref(back)
    lane.wait(handle)
    del back
    assert alive() is None
    lane.close()


def test_a_deleted_tensor_lives_until_it_is_copied(driver):
    content = torch.randn(1 << 20)
    lane = driver.open_lane(regions_of(content))
    out = lane.copy_out(content.clone(), 0)
    torch.full((1 << 20,), 7.0)  # would reuse the memory if it were free
    back, handle = lane.copy_in(0, out)
    lane.wait(handle)
    assert same(content, back)
    lane.close()


def test_a_resident_limit_is_checked_at_every_copy(driver, monkeypatch):
    checks = []

    class Limit:
        def __init__(self, nbytes: int) -> None:
            self.nbytes = nbytes

        def check(self) -> None:
            checks.append(self.nbytes)

    monkeypatch.setattr("outcore.execute.cpu.ResidentLimit", Limit)
    tensor = torch.randn(1000)
    lane = driver.open_lane(regions_of(tensor))
    lane.copy_out(tensor, 0)
    driver.limit_resident(7)
    lane.copy_out(tensor, 0)
    lane.copy_in(0)
    driver.limit_resident(None)
    lane.copy_in(0)
    assert checks == [7, 7]
    lane.close()


# ---- faults --------------------------------------------------------------------------------------


def failing(monkeypatch, name: str, after_calls: int) -> None:
    real, calls = getattr(os, name), iter(range(1 << 30))

    def call(fd, views, offset):
        if next(calls) == after_calls:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, views, offset)

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_an_io_error_surfaces_at_the_wait(driver, tmp_path, monkeypatch, name):
    tensor = torch.randn(6 << 20)  # three chunks
    driver.reserve({Tier.DISK: 1})
    lane = driver.open_lane(regions_of(tensor))
    failing(monkeypatch, name, after_calls=1)
    out = lane.copy_out(tensor, 0)
    _, back = lane.copy_in(0, out)
    for handle in [out, back] if name == "pwritev" else [back]:
        for _ in range(2):  # every wait raises
            with pytest.raises(SpillError, match="Input/output error") as caught:
                lane.wait(handle)
            assert isinstance(caught.value.__cause__, OSError)
            assert caught.value.directory == str(tmp_path)
            assert "region 0 (24.0 MiB at file offset 0)" in str(caught.value)
    lane.close()
    lane = driver.open_lane(regions_of(tensor))  # the next step works
    copy, handle = lane.copy_in(0, lane.copy_out(tensor, 0))
    lane.wait(handle)
    assert same(tensor, copy)
    lane.close()


def failing_in(monkeypatch, name, copy):
    """Let the copy with this number (from 0) fail, of those that `SpillFile.<name>` makes."""
    real, calls = getattr(SpillFile, name), count()

    def call(*args):
        if next(calls) == copy:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        yield from real(*args)

    monkeypatch.setattr(SpillFile, name, call)


def test_a_wait_for_a_later_copy_in_tells_of_an_earlier_one(driver, monkeypatch):
    """Programs leave out waits that a later one implies."""
    first, second = torch.randn(100), torch.randn(100)
    lane = driver.open_lane(regions_of(first, second))
    away = [lane.copy_out(first, 0), lane.copy_out(second, 1)]
    failing_in(monkeypatch, "read", 0)
    handles = [lane.copy_in(region, *away)[1] for region in range(2)]
    with pytest.raises(SpillError, match=r"copy in of region 0 .*: Input/output error"):
        lane.wait(handles[1])
    lane.close()


def test_what_was_not_written_cannot_be_read(driver, monkeypatch):
    """Though nothing has waited for the copy out: an earlier step left other bytes there."""
    first, second = torch.randn(100), torch.randn(100)
    lane = driver.open_lane(regions_of(first, second))
    failing_in(monkeypatch, "write", 0)
    away = [lane.copy_out(first, 0), lane.copy_out(second, 1)]
    lane.wait(away[1])
    _, handle = lane.copy_in(0)
    with pytest.raises(SpillError, match=r"copy in of region 0 .*: Input/output error"):
        lane.wait(handle)
    lane.close()


class Attention(nn.Module):
    """Its backward op reads four tensors at once, which all were offloaded."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        heads = [layer(x).view(64, 32, 4, 16).transpose(1, 2) for layer in self.layers]
        return nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2) + x


@pytest.mark.parametrize("name", ["write", "read"])
def test_no_copy_of_a_step_fails_unnoticed(monkeypatch, name):
    torch.manual_seed(0)
    module = nn.Sequential(*(Attention() for _ in range(3)))
    x = torch.randn(64, 32, 64)
    budget = resident_bytes(torch.device("cpu")) + (7 << 20)
    backend = Backend(budget=budget, policy="swap-all", drift="off")
    call = torch.compile(module, backend=backend)

    def step():
        module.zero_grad()
        call(x).square().mean().backward()

    for _ in range(PROFILED_STEPS):
        step()
    (graph,) = backend.engine.graphs
    stream = Stream.OUT if name == "write" else Stream.IN
    body = graph.planned.program.body
    copies = sum(isinstance(i.action, Copy) and i.stream is stream for i in body)
    assert copies >= 8
    for copy in range(copies):
        with monkeypatch.context() as patched:
            failing_in(patched, name, copy)
            with pytest.raises(SpillError, match="Input/output error"):
                step()
    backend.close()


def test_a_full_disk_is_told_before_anything_is_copied(driver, monkeypatch):
    def full(fd, offset, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SpillError, match="No space left") as caught:
        driver.reserve({Tier.DISK: 1 << 20})
    assert caught.value.needed_bytes == 1 << 20
    with pytest.raises(SpillError, match="No space left"):
        driver.open_lane(regions_of(torch.ones(10)))
    monkeypatch.undo()
    driver.reserve({Tier.DISK: 1 << 20})


def test_no_room_for_a_second_step_leaves_the_first_one_alone(driver, monkeypatch):
    tensor = torch.randn(1000)
    first = driver.open_lane(regions_of(tensor))
    monkeypatch.setattr("outcore.execute.disk.SpillFile.free_bytes", lambda self: 0)
    with pytest.raises(SpillError, match="too little disk space"):
        driver.open_lane(regions_of(tensor))
    back, handle = first.copy_in(0, first.copy_out(tensor, 0))
    first.wait(handle)
    assert same(tensor, back)
    first.close()
    driver.open_lane(regions_of(tensor)).close()


def test_a_missing_directory_is_told_when_it_is_needed(tmp_path):
    driver = CpuDriver(tmp_path / "absent")
    driver.open_lane({}).close()
    for _ in range(2):
        with pytest.raises(SpillError, match="No such file or directory"):
            driver.reserve({Tier.DISK: 1})
    driver.close()


def test_what_was_not_copied_out_cannot_be_copied_in(driver):
    lane = driver.open_lane(regions_of(torch.ones(3)))
    with pytest.raises(VerifyError, match="written before read"):
        lane.copy_in(0)
    lane.close()


def test_a_storage_smaller_than_its_region_is_refused(driver):
    lane = driver.open_lane(regions_of(torch.ones(30)))
    with pytest.raises(VerifyError, match="8 bytes for a region of 120"):
        lane.copy_out(torch.ones(2), 0)
    lane.close()


# ---- lanes ---------------------------------------------------------------------------------------


def test_a_lane_is_used_again_and_the_file_does_not_grow(driver):
    tensor = torch.randn(50_000)
    for _ in range(5):
        lane = driver.open_lane(regions_of(tensor))
        lane.wait(lane.copy_out(tensor, 0))
        lane.close()
    assert lane.file.nbytes == region_nbytes(200_000)


def test_room_is_reserved_for_one_lane_and_grows_for_a_second(driver):
    tensor = torch.randn(50_000)
    room = region_nbytes(200_000)
    driver.reserve({Tier.DISK: 200_000})
    first = driver.open_lane(regions_of(tensor))
    assert first.file.nbytes == room
    second = driver.open_lane(regions_of(-tensor))
    assert first.file.nbytes == 2 * room
    for lane, content in ((first, tensor), (second, -tensor)):
        lane.copy_out(content, 0)
    for lane, content in ((first, tensor), (second, -tensor)):
        driver.drain()
        back, handle = lane.copy_in(0)
        lane.wait(handle)
        assert same(content, back)
    first.close()
    second.close()
    lane = driver.open_lane({0: Region(0, 2 * room, torch.uint8, (2 * room,), (1,))})
    assert lane.file.nbytes == 2 * room
    lane.close()


def test_a_lane_is_closed_from_any_thread_and_more_than_once(driver):
    tensor = torch.randn(50_000)
    lane = driver.open_lane(regions_of(tensor))
    lane.copy_out(tensor, 0)
    threads = [threading.Thread(target=lane.close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    other = driver.open_lane(regions_of(tensor))
    lane.close()  # does not affect the lane that now has the room
    back, handle = other.copy_in(0, other.copy_out(tensor, 0))
    other.wait(handle)
    assert same(tensor, back)
    assert lane.file.nbytes == region_nbytes(200_000)
    other.close()


def test_a_finalizer_may_close_a_lane_on_the_worker_itself(driver):
    tensor = torch.randn(1000)
    lane = driver.open_lane(regions_of(tensor))
    driver.record(lambda span: lane.close())
    lane.wait(lane.copy_out(tensor, 0))
    driver.record(None)
    driver.open_lane(regions_of(tensor)).close()
    driver.drain()
    assert lane.file.nbytes == region_nbytes(4000)


def test_copies_of_a_closed_lane_are_dropped(tmp_path):
    driver = CpuDriver(tmp_path, link_bytes_per_second=float(1 << 14))
    tensors = [torch.randn(1 << 20) for _ in range(3)]
    lane = driver.open_lane(regions_of(*tensors))
    handles = [lane.copy_out(t, k) for k, t in enumerate(tensors)]
    time.sleep(0.1)  # the first has begun
    lane.close()
    driver.drain()  # waiting for the copies would exceed the time limit of tests
    with pytest.raises(SpillError, match="dropped when its lane was closed"):
        lane.wait(handles[-1])
    driver.close()


# ---- order ---------------------------------------------------------------------------------------


def test_a_copy_waits_for_what_it_comes_after(tmp_path):
    driver = CpuDriver(tmp_path, link_bytes_per_second=float(32 << 20))
    old, new = torch.randn(1 << 20), torch.randn(1 << 20)
    place = region_of(old)
    lane = driver.open_lane({0: place, 1: place})  # one place, used twice
    first = lane.copy_out(old, 0)
    back, came = lane.copy_in(0, first)
    second = lane.copy_out(new, 1, came)
    back_again, came_again = lane.copy_in(1, came, second)
    lane.wait(came_again)
    assert same(old, back)
    assert same(new, back_again)
    lane.close()
    driver.close()


def test_copies_are_recorded_in_order_and_not_otherwise(driver):
    spans: list[CopySpan] = []
    tensors = [torch.randn(n) for n in (1000, 200_000, 3)]
    lane = driver.open_lane(regions_of(*tensors))
    lane.wait(lane.copy_out(tensors[0], 0))
    driver.record(spans.append)
    outs = [lane.copy_out(t, k) for k, t in enumerate(tensors)]
    _, handle = lane.copy_in(1, outs[2])
    lane.wait(handle)
    driver.record(None)
    lane.wait(lane.copy_out(tensors[0], 0))
    assert [span[:2] for span in spans] == [("out", 0), ("out", 1), ("out", 2), ("in", 1)]
    assert [span.nbytes for span in spans] == [4000, 800_000, 12, 800_000]
    assert all(a.stop_seconds <= b.start_seconds for a, b in pairwise(spans))
    assert all(span.start_seconds < span.stop_seconds for span in spans)
    lane.close()


# ---- the end -------------------------------------------------------------------------------------


def test_closing_leaves_nothing_behind(tmp_path):
    before = workers()
    driver = CpuDriver(tmp_path)
    lane = driver.open_lane(regions_of(torch.ones(10)))
    lane.copy_out(torch.ones(10), 0)
    assert len(workers() - before) == 2
    assert len(open_files(tmp_path)) == 1
    driver.close()
    driver.close()
    assert workers_end(before)
    assert open_files(tmp_path) == []
    lane.close()
    driver.drain()
    with pytest.raises(SpillError, match="the driver is closed"):
        lane.copy_out(torch.ones(10), 0)
    with pytest.raises(SpillError, match="the driver is closed"):
        driver.open_lane(regions_of(torch.ones(10)))


def test_a_step_is_told_that_its_driver_was_closed(tmp_path):
    driver = CpuDriver(tmp_path, link_bytes_per_second=float(1 << 14))
    lane = driver.open_lane(regions_of(torch.ones(1 << 20)))
    handle = lane.copy_out(torch.ones(1 << 20), 0)
    driver.close()
    with pytest.raises(StepError, match="outcore was closed while the step ran"):
        lane.wait(handle)


def test_a_driver_that_nobody_holds_is_closed(tmp_path):
    gc.collect()  # drivers of earlier tests
    before = workers()
    driver = CpuDriver(tmp_path)
    driver.reserve({Tier.DISK: 1})
    alive = weakref.ref(driver)
    del driver
    gc.collect()
    assert alive() is None
    assert workers_end(before)
    assert open_files(tmp_path) == []


def test_a_copy_that_failed_does_not_hold_the_driver(tmp_path, monkeypatch):
    driver = CpuDriver(tmp_path)
    lane = driver.open_lane(regions_of(torch.ones(10)))
    failing(monkeypatch, "pwritev", after_calls=0)
    with pytest.raises(SpillError):
        lane.wait(lane.copy_out(torch.ones(10), 0))
    alive = weakref.ref(driver)
    del driver, lane
    gc.collect()
    assert alive() is None
    assert open_files(tmp_path) == []


def test_a_finalizer_may_close_the_driver_on_a_worker(tmp_path):
    others = workers()
    driver = CpuDriver(tmp_path)
    lane = driver.open_lane(regions_of(torch.ones(10)))
    threads = workers() - others
    driver.record(lambda span: driver.close())
    lane.wait(lane.copy_out(torch.ones(10), 0))
    for thread in threads:
        thread.join()
    assert open_files(tmp_path) == []


def test_a_driver_without_copies_has_no_file_and_no_threads(tmp_path):
    before = workers()
    driver = CpuDriver(tmp_path)
    lane = driver.open_lane({})
    driver.reserve({Tier.DISK: 0})
    driver.drain()
    lane.close()
    assert workers_end(before)
    assert open_files(tmp_path) == []
    driver.close()
    with pytest.raises(SpillError, match="the driver is closed"):
        driver.reserve({Tier.DISK: 1})


def test_a_program_ends_with_copies_under_way(tmp_path):
    program = f"""
        import torch
        from outcore.execute.cpu import CpuDriver
        from outcore.execute.driver import Region
        driver = CpuDriver({str(tmp_path)!r}, 1e5)
        n = 40_000_000  # which would take longer than the program is given
        lane = driver.open_lane({{0: Region(0, n, torch.uint8, (n,), (1,))}})
        handle = lane.copy_out(torch.ones(n, dtype=torch.uint8), 0)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_a_dropped_step_gives_its_memory_back_at_once(driver):
    tensors = [torch.ones(1 << 20) for _ in range(4)]
    regions = regions_of(*tensors)
    lane = driver.open_lane(regions)
    for tensor, region in zip(tensors, regions, strict=True):
        lane.copy_out(tensor, region)
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
    del tensor, tensors
    lane.close()
    assert all(storage.expired() for storage in storages)


def test_a_forked_process_is_told(driver):
    driver.reserve({Tier.DISK: 1})
    regions = regions_of(torch.ones(10))
    read, write = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns about forking with threads, which is what this tests.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            driver.open_lane(regions)
        except StepError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    assert b"was forked from" in os.read(read, 1000)
    os.close(read)


def test_a_forked_process_waits_for_no_copies(driver):
    """As one that trains with everything kept, and drains before it plans again."""
    driver.reserve({Tier.DISK: 1})
    assert ends_in_a_fork(driver.drain)
    assert ends_in_a_fork(driver.close)


def test_a_forked_process_is_told_that_a_lane_of_its_parent_copies_nothing(driver):
    """As one whose backward would read what the parent's forward offloaded."""
    tensor = torch.ones(10)
    lane = driver.open_lane(regions_of(tensor))
    copy = lane.copy_out(tensor, 0)
    lane.wait(copy)

    def told() -> None:
        with pytest.raises(StepError, match="was forked from"):
            lane.wait(copy)
        with pytest.raises(StepError, match="was forked from"):
            lane.copy_in(0)

    assert ends_in_a_fork(told)
    lane.close()


# ---- the bound on the process's memory -----------------------------------------------------------


class Limits:
    """A stand-in for the library of the arena that only records limits."""

    def __init__(self):
        self.said = []

    def outcore_arena_limit(self, nbytes):
        none = nbytes.value == ctypes.c_size_t(-1).value
        self.said.append(None if none else nbytes.value)

    def outcore_arena_trim(self):
        pass


@pytest.fixture
def limits():
    return Limits()


def bounding(folder, limits):
    driver = CpuDriver(folder)
    driver.arena = Arena(limits)
    return driver


def test_a_driver_lifts_the_bound_that_it_set(tmp_path, limits):
    driver = bounding(tmp_path, limits)
    driver.bound_memory(int, 1000)
    driver.bound_memory(int, 2000)
    assert limits.said[-1] >= 2000
    driver.bound_memory(int, None)
    assert limits.said[-1] is None
    assert None not in limits.said[:1]


def test_a_driver_does_not_lift_the_bound_of_another(tmp_path, limits):
    first, second = bounding(tmp_path, limits), bounding(tmp_path, limits)
    first.bound_memory(int, 1000)
    second.bound_memory(int, 2000)
    first.bound_memory(int, None)
    del first
    assert limits.said[-1] >= 2000
    second.bound_memory(int, None)
    assert limits.said[-1] is None


def test_a_driver_that_is_collected_bounds_nothing(tmp_path, limits):
    driver = bounding(tmp_path, limits)
    driver.bound_memory(int, 1000)
    del driver
    gc.collect()
    assert limits.said[-1] is None
