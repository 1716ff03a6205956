"""The arena: tensors keep their bytes, resident memory follows them; torch works without it."""

import gc
import json
import mmap
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity

from outcore.execute import arena
from outcore.execute.arena import LEAST_BYTES, Arena, NoArena, own_arena
from outcore.gauges import Ledger
from outcore.measure import metered, resident_bytes

MIB = 1 << 20
BLOCK = 2 * MIB
CPU = torch.device("cpu")

needs_arena = pytest.mark.skipif(
    isinstance(own_arena(), NoArena), reason=f"no arena here: {own_arena()}"
)


def figures():
    mine = own_arena()
    assert isinstance(mine, Arena)
    return mine.figures()


def memory_of_the_process():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def buffer(nbytes, value=1):
    return torch.full((nbytes,), value, dtype=torch.uint8)


@needs_arena
def test_it_counts_what_lives():
    before = figures().live_bytes
    large, small = buffer(MIB + 1), buffer(LEAST_BYTES - 1)
    assert figures().live_bytes - before == MIB + 512  # rounded up to the alignment
    assert large.data_ptr() % 512 == small.data_ptr() % 64 == 0
    del large
    assert figures().live_bytes == before


@needs_arena
def test_what_it_does_not_serve_is_counted_apart():
    mine = own_arena()
    gc.collect()
    before = mine.outside_bytes([])
    held = [buffer(nbytes) for nbytes in (LEAST_BYTES - 1, 512, 511, 1, 0)]
    expected = LEAST_BYTES - 1 + 512
    assert mine.outside_bytes([]) - before == expected
    where = [each.data_ptr() for each in held]
    assert mine.outside_bytes([*where, *where, 0, 12345]) == before
    assert mine.outside_bytes(where[1:]) - before == LEAST_BYTES - 1
    del held
    assert mine.outside_bytes([]) == before


@needs_arena
def test_what_autograd_alone_holds_is_resident():
    """Nothing of it is an object of Python."""
    gc.collect()
    leaf = torch.zeros(LEAST_BYTES // 8, requires_grad=True)
    mine = own_arena()
    ledger = Ledger(0, figures().start, figures().stop, mine.outside_bytes, mine.peak_bytes)
    resident = partial(resident_bytes, CPU, ledger=ledger)
    before, result = resident(), leaf
    for _ in range(9):
        result = result.tanh()
    assert resident() - before == 9 * leaf.nbytes
    del result
    assert resident() == before


@pytest.fixture
def no_limit():
    yield
    own_arena().limit(None)


@needs_arena
@given(
    st.lists(
        st.tuples(st.integers(LEAST_BYTES, 5 * MIB), st.integers(0, 9)), min_size=1, max_size=60
    ),
    st.none() | st.integers(0, 24),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_tensor_keeps_its_bytes(no_limit, requests, limit):
    before = figures().live_bytes
    own_arena().limit(None if limit is None else before + limit * MIB)
    held: dict[int, torch.Tensor] = {}
    for value, (nbytes, place) in enumerate(requests):
        held.pop(place, None)
        held[place] = buffer(nbytes, value)
        for tensor in held.values():
            assert bool((tensor == tensor[0]).all())
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in held.values())
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    del tensor
    held.clear()
    assert figures().live_bytes == before


@needs_arena
@pytest.mark.parametrize("shift", [0, 96 << 10])
def test_memory_moves_to_where_it_is_needed(shift):
    gc.collect()  # now: freeing what earlier tests left would make room later
    own_arena().trim()
    before = figures()
    shifted = [buffer(shift)] if shift else []  # blocks and buffers begin elsewhere
    held = [buffer(8 * BLOCK, value) for value in range(8)]
    most = figures().resident_bytes
    kept = held[1::2]
    held.clear()  # frees every second one: no hole is larger than eight blocks
    larger = [buffer(12 * BLOCK, 100 + value) for value in range(2)]
    after = figures()
    assert after.moved_bytes - before.moved_bytes >= 24 * BLOCK
    assert after.resident_bytes <= most + BLOCK
    assert all(bool((t == 2 * i + 1).all()) for i, t in enumerate(kept))
    assert all(bool((t == 100 + i).all()) for i, t in enumerate(larger))
    del shifted


@needs_arena
def test_trimming_gives_memory_back_and_leaves_tensors_alone():
    kept = buffer(BLOCK, 7)
    used = buffer(64 * MIB)
    del used
    before = figures()
    own_arena().trim()
    after = figures()
    assert before.resident_bytes - after.resident_bytes >= 60 * MIB
    assert after.live_bytes == before.live_bytes
    assert bool((kept == 7).all())


@needs_arena
def test_above_the_limit_blocks_give_up_what_they_do_not_use(no_limit):
    own_arena().trim()
    pieces = [buffer(BLOCK // 2, value % 200) for value in range(128)]
    del pieces[::2]  # half of each block is used
    mine, process = figures().resident_bytes, memory_of_the_process()
    own_arena().limit(mine - 40 * MIB)
    large = buffer(2 * BLOCK)  # no hole is this large, so a new block is needed
    assert figures().resident_bytes <= mine - 40 * MIB
    assert memory_of_the_process() <= process - 30 * MIB
    filled = [buffer(BLOCK // 2, 201 + i % 50) for i in range(64)]
    assert all(bool((t == 2 * i % 200 + 1).all()) for i, t in enumerate(pieces))
    assert all(bool((t == 201 + i % 50).all()) for i, t in enumerate(filled))
    assert bool((large == 1).all())
    assert figures().resident_bytes >= figures().live_bytes


@needs_arena
def test_a_limit_that_cannot_be_kept_loses_nothing(no_limit):
    held = [buffer(BLOCK) for _ in range(4)]
    own_arena().limit(0)
    figures_before = figures()
    held += [buffer(BLOCK, 2) for _ in range(32)]
    assert figures().live_bytes - figures_before.live_bytes == 32 * BLOCK
    assert all(bool((t == t[0]).all()) for t in held)


@needs_arena
def test_the_meter_sees_it():
    _, reading = metered(lambda: buffer(16 * MIB) is None)
    assert 16 * MIB <= reading.peak_bytes() < 17 * MIB


@needs_arena
def test_the_profiler_sees_the_end_of_what_is_older():
    """PyTorch's own reporter knows only tensors that were allocated while it watched."""
    older = [buffer(MIB + 1)]
    _, reading = metered(older.clear)
    assert sum(reading.changes) == -MIB - 1


def profiled(work):
    """The sum of the changes of memory that a profiler of the user sees."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    memory = (e for e in found.profiler.kineto_results.events() if e.name() == "[memory]")
    return sum(e.nbytes() for e in memory)


def changes(work):
    _, reading = metered(work)
    return sum(reading.changes)


@needs_arena
@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("before", [changes, profiled])
@pytest.mark.parametrize("after", [changes, profiled])
def test_the_end_of_what_is_older_is_seen_after_a_profiler_of_another_thread(ends, before, after):
    """Also if that thread has ended, or allocates nothing any more.

    Only between two profilers of the user, the thread must have allocated something.
    """
    buffer(MIB)  # the arena notices that profilers of this thread have ended
    with ThreadPoolExecutor(1) as pool:
        pool.submit(before, lambda: buffer(MIB) is None).result()
        if before is after is profiled:
            pool.submit(buffer, MIB).result()
        if ends:
            pool.shutdown()
        older = [buffer(MIB + 1)]
        assert after(older.clear) == -MIB - 1


@needs_arena
def test_the_profiler_counts_nothing_of_threads_that_it_does_not_follow():
    def dropped():
        taken = []
        buffer(MIB)
        thread = threading.Thread(target=lambda: taken.append(buffer(4 * MIB)))
        thread.start()
        thread.join()
        taken.clear()
        return buffer(MIB) is None

    for _ in range(2):
        _, reading = metered(dropped)
        assert MIB <= reading.peak_bytes() < 2 * MIB
        assert sum(reading.changes) == 0


@needs_arena
def test_storages_grow_and_are_copied():
    tensor = torch.arange(100_000)
    tensor.untyped_storage().resize_(8 * 200_000)
    assert torch.equal(tensor, torch.arange(100_000))
    assert torch.equal(tensor.clone(), tensor)


@needs_arena
def test_threads_share_it():
    before = figures().live_bytes
    wrong = []

    def work(number):
        for step in range(100):
            mine = buffer(LEAST_BYTES * (1 + (step * 7 + number) % 40), number)
            if not bool((mine == number).all()):
                wrong.append((number, step))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert figures().live_bytes == before


PROGRAM = """
    import json, os, torch

    early = torch.ones(1 << 20)  # served by torch's own allocator
    from outcore.execute.arena import own_arena, NoArena

    mine = own_arena()
    assert own_arena() is mine
    total = float(early.sum())
    del early
    late = torch.ones(1 << 20)
    child = os.fork()
    if not child:
        mine = [torch.empty(1 << 20) for _ in range(9)]  # no threads: they did not come along
        os._exit(int(late[-1].item() != 1))
    _, status = os.waitpid(child, 0)
    print(json.dumps([getattr(mine, "reason", ""), total, float(late.sum()), status]))
"""


def run(folder, **environment):
    """Run PROGRAM in a new process with cache folder `folder`; why it has no arena, or ''."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PROGRAM)],
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
        env={**os.environ, "XDG_CACHE_HOME": str(folder), **environment},
    )
    reason, *rest = json.loads(done.stdout)
    assert rest == [1 << 20, 1 << 20, 0]
    return reason


@needs_arena
def test_it_is_compiled_once_and_may_come_late(tmp_path):
    assert run(tmp_path) == ""
    (made,) = (tmp_path / "outcore").iterdir()
    written = made.stat().st_mtime_ns
    assert run(tmp_path) == ""
    assert made.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"OUTCORE_ARENA": "off"}, "OUTCORE_ARENA turns it off"),
        ({"CXX": "no-such-compiler", "PATH": ""}, "there is no C++ compiler"),
        ({"CXX": "false"}, "the C++ compiler failed"),
    ],
)
def test_without_it_everything_works(tmp_path, variables, reason):
    assert run(tmp_path, **variables).startswith(reason)


def test_a_cache_that_others_can_write_to_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "outcore").mkdir()
    (tmp_path / "outcore").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(PermissionError, match="other users may write"):
        arena._cache_folder()


@needs_arena
def test_what_only_autograd_holds_is_counted(driver):
    weight = torch.ones(MIB // 4, requires_grad=True)
    before = resident_bytes(CPU, [weight], driver.ledger())
    loss = weight.exp().tanh().sum()  # saves two tensors that Python cannot see
    assert 0 <= resident_bytes(CPU, [weight], driver.ledger()) - before - 2 * MIB < 64
    del loss
    assert resident_bytes(CPU, [weight], driver.ledger()) == before


@needs_arena
def test_a_move_that_fails_leaves_no_tensor_without_memory():
    """Memory that a failed move unmapped is mapped again, or is never handed out."""
    program = """
        import resource, torch
        from outcore.execute.arena import own_arena

        def buffers(nbytes, count):
            return [torch.full((nbytes,), i, dtype=torch.uint8) for i in range(count)]

        print(own_arena().figures())
        held = buffers(2 << 20, 16)[::2]
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))  # less than is mapped
        try:
            late = buffers(4 << 20, 2)
            assert all(bool((t == i).all()) for i, t in enumerate(late))
        except RuntimeError as error:
            assert "memory" in str(error)
        assert all(bool((t == 2 * i).all()) for i, t in enumerate(held))
    """
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        capture_output=True,
        check=True,
        timeout=250,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@needs_arena
def test_what_cannot_be_is_refused_at_once():
    with pytest.raises(RuntimeError, match="allocate"):
        torch.empty(64 << 40, dtype=torch.uint8)


class Wrapper(torch.Tensor):
    """A tensor subclass without storage, like DTensor."""

    @staticmethod
    def __new__(cls) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, (10,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise NotImplementedError(str(function))


def test_tensors_without_memory_are_no_obstacle(driver):
    before = resident_bytes(CPU, [], driver.ledger())
    kept, wrapper, lazy = torch.ones(100), Wrapper(), torch.nn.LazyLinear(4)
    assert resident_bytes(CPU, [wrapper, kept], driver.ledger()) == before
    assert resident_bytes(CPU) >= kept.nbytes
    assert lazy.has_uninitialized_params()
