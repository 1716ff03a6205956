"""Without a usable disk, outcore trains as far as recomputation alone allows."""

from __future__ import annotations

import errno
import os
import resource
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from outcore import Backend, Report
from outcore.errors import InfeasibleError, SpillError
from outcore.ir.plan import Offload
from outcore.runtime.settings.options import NO_DISK_BYTES, make_options, settings_for
from tests.cpu.training import (
    PROFILED_STEPS,
    Small,
    batch,
    inside,
    mean_square,
    same,
    small_planned,
    small_reference,
    tight_budget,
)

STEPS = PROFILED_STEPS + 2


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the creation of files fail, as on a read-only disk."""

    def refuse(**_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.mkstemp", refuse)


@pytest.fixture(scope="module")
def tight() -> int:
    """A budget that is too small to keep everything."""
    return tight_budget(Small(), [batch(0)], mean_square, 0.5)


def trained(**options: Any) -> Report:
    """Train `Small`; check that it gives the same bits as without outcore and offloads nothing."""
    found, backend = small_planned(STEPS, **options)
    assert same(found, small_reference(STEPS))
    assert backend.engine is not None
    planned = backend.engine.graphs[0].planned
    assert planned is not None
    assert not [c for _, c in planned.plan.choices if isinstance(c, Offload)]
    assert not backend.engine.driver.disk_bytes_written()
    return backend.report()


@pytest.mark.usefixtures("read_only")
def test_a_disk_that_cannot_be_written_is_told_and_left_out(tight: int) -> None:
    with pytest.warns(UserWarning, match="offloads nothing: spill directory .*Read-only"):
        report = trained(budget=tight)
    assert report.state == "planned"
    assert [note for note in report.notes if "nothing is offloaded: spill directory" in note]
    inside(report)


def test_a_full_disk_is_told_and_left_out(tight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outcore.execute.disk.SpillFile.free_bytes", lambda _: 0)
    with pytest.warns(UserWarning, match="offloads nothing: .*too little disk space"):
        inside(trained(budget=tight))


@pytest.mark.usefixtures("read_only")
def test_what_cannot_do_without_a_disk_names_it() -> None:
    torch._dynamo.reset()
    call = torch.compile(Small(), backend=Backend(budget="64KiB"))
    warned = pytest.warns(UserWarning, match="offloads nothing")
    with warned, pytest.raises(InfeasibleError) as caught:
        call(batch(0))
    assert "the disk cannot be used: spill directory" in "".join(caught.value.__notes__)


@pytest.mark.usefixtures("read_only")
def test_strict_refuses_to_do_without_a_disk_that_was_not_declined(tight: int) -> None:
    torch._dynamo.reset()
    call = torch.compile(Small(), backend=Backend(budget=tight, strict=True))
    with pytest.raises(SpillError, match="Read-only") as caught:
        call(batch(0))
    assert "disk_budget=0" in "".join(caught.value.__notes__)


@pytest.mark.usefixtures("read_only")
@pytest.mark.parametrize("nothing", [0, "0B", "0GiB"])
def test_a_disk_can_be_declined(tight: int, nothing: int | str) -> None:
    with warnings.catch_warnings(action="error", category=UserWarning):
        inside(trained(budget=tight, strict=True, disk_budget=nothing))


def test_it_can_be_declined_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTCORE_DISK_BUDGET", "0")
    assert not settings_for(make_options({"budget": "1GiB"}), torch.device("cpu")).disk_budget_bytes


def test_a_limit_on_files_bounds_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (3 << 20, resource.RLIM_INFINITY))
    settled = partial(settings_for, device=torch.device("cpu"))
    assert settled(make_options({"budget": "1GiB"})).disk_budget_bytes == 3 << 20
    asked = make_options({"budget": "1GiB", "disk_budget": "4MiB"})
    assert settled(asked).disk_budget_bytes == 4 << 20


def test_a_folder_of_the_system_s_that_is_gone_is_told_by_who_needs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("outcore.runtime.settings.options.spill_folder", lambda: tmp_path / "gone")
    settings = settings_for(make_options({"budget": "1GiB"}), torch.device("cpu"))
    assert settings.disk_budget_bytes == NO_DISK_BYTES
    with pytest.warns(UserWarning, match="offloads nothing: .*No such file"):
        trained(budget="1GiB")
