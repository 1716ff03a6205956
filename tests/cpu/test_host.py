"""Host memory: how much is available, and how budgets are derived from it."""

from __future__ import annotations

import os
import shutil
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outcore import cgroups
from outcore.allocators import Card, Held
from outcore.allocators.best_fit import BestFit
from outcore.allocators.expandable import ExpandableSegments
from outcore.cores import usable_cores
from outcore.errors import BudgetError, OptionValueError
from outcore.execute import torch_allocator
from outcore.execute.segments import VARIABLES
from outcore.measure import resident_bytes
from outcore.runtime.limits import host
from outcore.runtime.limits.card import laid
from outcore.runtime.settings.options import Keywords, Options, make_options, settings_for
from tests.cpu.training import PROFILED_STEPS, small_planned

GIB = 1 << 30
CPU = torch.device("cpu")


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with 8 GiB available, and a control group without limits."""
    monkeypatch.setattr(cgroups, "folders", lambda _: [tmp_path])
    monkeypatch.setattr(host, "MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {8 << 20} kB\n")
    (tmp_path / "memory.max").write_text("max\n")
    return tmp_path


def test_what_the_machine_has(system: Path) -> None:
    assert host.available_bytes() == 8 * GIB


def test_what_the_control_group_leaves(system: Path) -> None:
    (system / "memory.max").write_text(f"{4 * GIB}\n")
    (system / "memory.current").write_text(f"{3 * GIB}\n")
    (system / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\n")
    assert host.available_bytes() == 2 * GIB
    (system / "memory.current").write_text(f"{6 * GIB}\n")
    assert host.available_bytes() == 0


def test_what_a_control_group_of_version_1_leaves(system: Path) -> None:
    (system / "memory.max").unlink()
    (system / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (system / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    (system / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {GIB}\n")
    assert host.memory_limit_bytes() == 4 * GIB
    assert host.available_bytes() == 2 * GIB


@pytest.mark.parametrize(
    ("line", "folder"), [("0::/job/step", "job"), ("7:cpu,memory:/job/step", "memory/job")]
)
def test_the_control_groups_of_the_process(
    line: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path / "cgroup")
    read = Path.read_text
    lines = f"9:cpuset:/\n{line}\n"
    monkeypatch.setattr(
        Path, "read_text", lambda path: lines if str(path) == "/proc/self/cgroup" else read(path)
    )
    step, job, *_, top = cgroups.folders("memory")
    assert (step, job) == (tmp_path / "cgroup" / folder / "step", tmp_path / "cgroup" / folder)
    assert top == tmp_path / "cgroup" / folder.removesuffix("job")


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, 64),
        ({"cpu.cfs_quota_us": "300000", "cpu.cfs_period_us": "100000"}, 3),
        ({}, 64),
    ],
)
def test_the_cores_that_a_container_leaves(
    files: dict[str, str], cores: int, system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    for name, text in files.items():
        (system / name).write_text(f"{text}\n")
    assert usable_cores() == cores


def test_a_system_that_tells_nothing(system: Path) -> None:
    (system / "meminfo").write_text("nothing\n")
    assert host.available_bytes() == host.memory_limit_bytes()


def test_the_host_budget(system: Path) -> None:
    def budget(**options: object) -> int:
        return settings_for(make_options({"budget": "1GiB", **options}), CPU).host_budget_bytes

    assert budget() == 6 * GIB
    assert budget(host_budget="3GiB") == 3 * GIB
    with pytest.raises(BudgetError, match="host_budget"):
        budget(host_budget="-1GiB")


def test_auto_is_what_is_free(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = make_options({"budget": "auto", "host_budget": "auto", "disk_budget": "auto"})
    held = torch.ones(1 << 20)
    settings = settings_for(options, CPU)
    assert settings.budget_bytes == 6 * GIB + resident_bytes(CPU)
    assert resident_bytes(CPU) >= held.nbytes
    assert settings.host_budget_bytes == 6 * GIB
    assert settings.disk_budget_bytes == pytest.approx(
        shutil.disk_usage(settings.spill_dir).free * 0.9, rel=0.1
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert settings_for(options, CPU).budget_bytes == 3 * GIB + resident_bytes(CPU)


def test_a_home_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "spills").mkdir()
    assert settings_for(make_options({"budget": 1, "spill_dir": "~/spills"}), CPU).spill_dir == (
        tmp_path / "spills"
    )
    with pytest.raises(OptionValueError, match="spill_dir='~nobody-at-all/x'"):
        settings_for(make_options({"budget": 1, "spill_dir": "~nobody-at-all/x"}), CPU)


def segment(kind: str, address: int, *blocks: tuple[int, int, str], **said: Any) -> Any:
    """A segment of PyTorch's allocator, of 100 bytes, on stream 7."""
    listed = [{"address": a, "size": n, "state": state} for a, n, state in blocks]
    usual = {"stream": 7, "segment_pool_id": (0, 0), "is_expandable": True, "total_size": 100}
    return usual | {"segment_type": kind, "address": address, "blocks": listed} | said


def test_auto_on_a_gpu_is_the_default_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: GIB)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    segments = [
        segment("small", 1 << 20, (1 << 20, 5, "active_allocated"), device=n) for n in (0, 1)
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda *, include_traces: segments)
    monkeypatch.setattr("outcore.runtime.settings.options.expand", lambda _: None)
    monkeypatch.setattr(torch_allocator, "_ask", None)  # torch reads the variables only once
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: SimpleNamespace(idx=1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=7))
    for given, fraction, spare in (("auto", 1.0, 4), (None, 1.0, 4), (None, 0.25, 2)):
        monkeypatch.setattr(
            torch.cuda, "get_per_process_memory_fraction", lambda _, part=fraction: part
        )
        settings = settings_for(make_options({"budget": given}), torch.device("cuda"))
        assert settings.budget_bytes == spare * GIB - spare * GIB // 32
        assert settings.rooms[0] == GIB // 4 - spare * GIB // 32, "a sixteenth, or 256 MiB"
        assert settings.card == Card(spare * GIB, ExpandableSegments(fraction=fraction < 1))
        assert settings.read_held() == Held(((0, 5),))
    properties = SimpleNamespace(total_memory=8 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    for named in ("2GiB", "3GiB"):  # too much: this process may use a quarter of 8 GiB
        settings = settings_for(make_options({"budget": named}), torch.device("cuda"))
        assert settings.rooms[0] == settings.budget_bytes - 2 * GIB + GIB // 4
    assert settings_for(make_options({"budget": "1GiB"}), torch.device("cuda")).rooms == (0,)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    settings = settings_for(make_options({"budget": "1GiB"}), torch.device("cuda"))
    assert settings.card == Card(2 * GIB, BestFit())
    assert settings.read_held() is None


def test_what_torchs_allocator_holds() -> None:
    used, free, leaving = "active_allocated", "inactive", "active_pending_free"
    segments = [
        segment("large", 5000, (5000, 30, free), (5030, 70, leaving)),
        segment("large", 1000, (1000, 100, used)),
        segment("small", 300, (300, 50, free), (350, 10, used)),
        segment("large", 90, (90, 100, used), stream=8),
        segment("large", 91, (91, 100, free), stream=8),
        segment("small", 92, (92, 1, used), segment_pool_id=(0, 3)),
        segment("small", 93, (93, 1, used), is_expandable=False, total_size=9),
    ]
    assert laid(segments, 7) == Held(((50, 10),), ((0, 100), (4030, 70)), 209, 102)


def test_of_a_stretch_of_another_stream_only_pages_in_use_are_kept() -> None:
    """cuBLAS keeps 32 MiB behind the free memory of a step; a full device gets the rest back."""
    used, free, page, behind = "active_allocated", "inactive", 20 << 20, 650 * (20 << 20)
    large = (0, behind, free), (behind, 32 << 20, used), (behind + (32 << 20), 8 << 20, free)
    small = (90, 5 << 20, free), (90 + (5 << 20), 1 << 20, used), (90 + (6 << 20), 2 << 20, free)
    segments = [
        segment("large", 0, *large, stream=8, total_size=behind + 2 * page),
        segment("small", 90, *small, stream=8, total_size=8 << 20),
    ]
    assert laid(segments, 7) == Held((), (), 2 * page + (2 << 20), 33 << 20)


def test_a_backend_takes_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTCORE_BUDGET", "auto")
    _, backend = small_planned(PROFILED_STEPS, disk_budget="auto")
    report = backend.report()
    assert report.state == "in-core"
    assert report.predicted_peak_bytes is not None
    assert report.budget_bytes > report.predicted_peak_bytes


def test_on_a_cpu_the_budget_must_be_given() -> None:
    with pytest.raises(BudgetError, match="budget='auto' for three quarters of what is free"):
        small_planned(1)


def test_what_editors_are_told_are_the_options() -> None:
    options = {each.name: each.type for each in fields(Options) if each.name != "budget"}
    assert Keywords.__annotations__.keys() == options.keys()
    assert {name: ref.__forward_arg__ for name, ref in Keywords.__annotations__.items()} == options
