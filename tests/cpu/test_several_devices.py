"""Two processes that train one model: results, order, budgets, and effects on each other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import outcore
from outcore import aten
from outcore.errors import CaptureError
from outcore.ir.trace import Effect
from outcore.runtime.limits.host import local_processes, memory_limit_bytes
from outcore.runtime.settings.options import make_options, settings_for

ROOT = Path(__file__).parents[2]
SCENARIOS = (
    "wrap_then_ddp",
    "ddp_then_wrap",
    "accumulated",
    "in_buckets",
    "one_replans",
    "one_plans_longer",
    "wrap_then_shard",
    "shard_then_wrap",
    "talking",
)

pytestmark = [
    pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch was built without gloo"),
    pytest.mark.xdist_group("torchrun"),  # it is started once, for all scenarios
]

CPU = torch.device("cpu")


def torchrun(*names: str) -> subprocess.CompletedProcess[str]:
    launcher = "torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node=2 -m"
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}",
    }
    return subprocess.run(
        [sys.executable, "-m", *launcher.split(), "tests.cpu.ranks", *names],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.fixture(scope="module")
def finished() -> subprocess.CompletedProcess[str]:
    return torchrun(*SCENARIOS)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_ranks(scenario: str, finished: subprocess.CompletedProcess[str]) -> None:
    assert f"ok {scenario} " in finished.stdout, finished.stderr[-4000:]


def test_a_rank_without_a_plan_ends_the_job() -> None:
    failed = torchrun("no_plan")
    assert failed.returncode != 0
    assert "no plan fits a device budget of 64.0 KiB" in failed.stderr
    assert "outcore: this is rank 1 of 2." in failed.stderr


@pytest.fixture
def world() -> Iterator[distributed.ProcessGroup]:
    """Two ranks, of which the other one is fake: for graphs that are captured and not run."""
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    assert distributed.group.WORLD is not None
    yield distributed.group.WORLD
    distributed.destroy_process_group()


class TestCapture:
    def test_a_collective_is_one_op_its_wait_is_none(self, world: Any) -> None:
        weight = torch.ones(4, requires_grad=True)
        trace = outcore.trace(lambda: all_reduce(weight.sin(), "sum", world).cos())
        talks = [op for op in trace.ops if Effect.COLLECTIVE in op.effects]
        forward, backward = (op.target for op in talks)
        assert forward == backward == "_c10d_functional.all_reduce.default"
        assert not any(op.repeatable for op in talks)
        assert not any("wait" in op.target for op in trace.ops)

    def test_one_that_was_begun_outside(self, world: Any) -> None:
        weight = torch.ones(4, requires_grad=True)
        with pytest.raises(CaptureError, match="started outside of it"):
            outcore.trace(lambda x: wait_tensor(x) * weight, torch.ones(4))

    def test_what_runs_one_waits_for_it(self, world: Any) -> None:
        call = aten.callable_of(aten.resolve("_c10d_functional.all_reduce.default"))
        assert torch.equal(call(torch.ones(2), "sum", world.group_name), torch.ones(2))
        several = aten.resolve("_c10d_functional.all_reduce_coalesced.default")
        made = aten.callable_of(several)([torch.ones(2)], "sum", world.group_name)
        assert len(made) == 1
        plain = aten.resolve("aten.add.Tensor")
        assert aten.callable_of(plain) is plain


class TestBudgets:
    def test_a_fraction_is_of_this_process_s_part(self, monkeypatch: pytest.MonkeyPatch) -> None:
        options = make_options({"budget": "50%", "disk_budget": "10%", "host_budget": 0.5})
        alone = settings_for(options, CPU)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        shared = settings_for(options, CPU)
        assert alone.budget_bytes == memory_limit_bytes() // 2
        assert shared.budget_bytes == memory_limit_bytes() // 2 // 2
        assert shared.host_budget_bytes == memory_limit_bytes() // 2 // 2
        assert shared.disk_budget_bytes == pytest.approx(alone.disk_budget_bytes / 2, rel=1e-6)

    def test_bytes_are_what_they_say(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert settings_for(make_options({"budget": "1GiB"}), CPU).budget_bytes == 1 << 30

    def test_defaults_are_shared_out_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        options = make_options({"budget": "1GiB"})
        alone = settings_for(options, CPU)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        shared = settings_for(options, CPU)
        assert shared.disk_budget_bytes < alone.disk_budget_bytes / 2
        assert shared.host_budget_bytes < alone.host_budget_bytes / 2

    @pytest.mark.parametrize("text", ["", "0", "two"])
    def test_what_is_no_number_of_processes(self, text: str, monkeypatch: Any) -> None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
        assert local_processes() == 1
