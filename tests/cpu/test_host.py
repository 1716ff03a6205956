"""What the host has left, and the part of it that outcore may take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outcore.errors import BudgetError
from outcore.runtime import host
from outcore.runtime.options import make_options, settle

GIB = 1 << 30


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with 8 GiB available, and a control group without limits."""
    monkeypatch.setattr(host, "_cgroups", lambda: [tmp_path])
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


def test_a_system_that_tells_nothing(system: Path) -> None:
    (system / "meminfo").write_text("nothing\n")
    assert host.available_bytes() == host.memory_limit_bytes()


def test_the_host_budget(system: Path) -> None:
    def budget(**options: object) -> int:
        return settle(
            make_options({"budget": "1GiB", **options}), torch.device("cpu")
        ).host_budget_bytes

    assert budget() == 6 * GIB
    assert budget(host_budget="3GiB") == 3 * GIB
    with pytest.raises(BudgetError, match="host_budget"):
        budget(host_budget="-1GiB")
