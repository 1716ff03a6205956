"""malloc: outcore sets it up once, respects the user's settings, and can give memory back."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from outcore.execute import malloc

needs_glibc = pytest.mark.skipif(malloc._glibc() is None, reason="the C library is not glibc")


@pytest.fixture
def fresh(monkeypatch):
    """Make malloc look as if neither the user nor outcore had set it up."""
    for name in tuple(os.environ):
        if malloc.set_up_by_user({name: os.environ[name]}) is not None:
            monkeypatch.delenv(name)
    malloc.own_malloc.cache_clear()
    yield monkeypatch
    malloc.own_malloc.cache_clear()


@needs_glibc
def test_malloc_is_set_up_once_and_says_how(fresh):
    report = malloc.own_malloc()
    assert report.owned
    assert dict(report.settings).keys() == {"M_MMAP_MAX", "M_TRIM_THRESHOLD", "M_TOP_PAD"}
    assert malloc.own_malloc() is report


@needs_glibc
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "1000000"),
        ("MALLOC_ARENA_MAX", "1"),
        ("GLIBC_TUNABLES", "glibc.malloc.top_pad=4096"),
        ("LD_PRELOAD", "/usr/lib/libjemalloc.so.2"),
    ],
)
def test_what_the_user_has_set_up_is_left_alone(fresh, name, value):
    fresh.setenv(name, value)
    report = malloc.own_malloc()
    assert not report.owned
    assert report.reason == f"{name} is set in the environment"
    assert report.settings == ()


def test_other_variables_set_nothing_up():
    tunables = "glibc.pthread.rseq=0:glibc.malloc.tcache_count=3"
    others = {"HOME": "/malloc", "MALLOC_CONF": "x", "GLIBC_TUNABLES": tunables}
    assert malloc.set_up_by_user(others) is None


def test_another_c_library_is_left_alone(fresh):
    fresh.setattr(malloc, "_glibc", lambda: None)
    assert not malloc.own_malloc().owned
    assert not malloc.trim()


def run(program: str, **environment: str) -> list:
    """Run `program` with a malloc that nobody has set up, and return the JSON that it prints."""
    untouched = {k: v for k, v in os.environ.items() if malloc.set_up_by_user({k: v}) is None}
    untouched.pop("GLIBC_TUNABLES", None)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
        env={**untouched, **environment},
    )
    figures: list = json.loads(done.stdout)
    return figures


# Runs in a separate process, where nothing else allocates or has set up malloc.
MEASURE = """
    import json, resource, torch
    from outcore.execute import malloc

    assert malloc.own_malloc().owned

    def use():
        return torch.ones(64 << 20, dtype=torch.uint8)

    for _ in range(30):  # until small allocations have settled
        use()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        use()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    malloc.trim()
    base = malloc.resident_bytes()
    limit = malloc.ResidentLimit(base + (100 << 20))
    held = [torch.ones(32 << 20, dtype=torch.uint8) for _ in range(2)]
    limit.check()
    early = limit.trims
    over = 0
    for _ in range(4):  # each is more than may stay
        used = use()
        held.append(torch.ones(100))  # so that what is freed is not the end of the heap
        del used
        limit.check()
        over = max(over, malloc.resident_bytes() - base)
    intact = all(bool((t == 1).all()) for t in held)
    limit.close()
    limit.close()
    print(json.dumps([faults, early, limit.trims, over, intact]))
"""


@needs_glibc
def test_memory_stays_until_a_limit_is_passed():
    faults, early, trims, over, intact = run(MEASURE)
    assert faults < 1000  # of the 160,000 pages used
    assert early == 0
    assert 1 <= trims <= 4
    assert over < 104 << 20
    assert intact


def test_trimming_never_fails():
    assert isinstance(malloc.trim(), bool)
