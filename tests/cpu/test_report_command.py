"""outcore report: for a script's step and for a plan file; mistakes are refused before any work."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from outcore.errors import OptionValueError
from outcore.ir.margin import MARGIN_DIVISOR
from outcore.report.place import check_apart, check_file

SCRIPT = """
import torch
from torch import nn

print("imported")


def step():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)))
    return model, torch.empty(4096, 256), lambda found: found.square().mean()
"""
ALEXNET = ("--network", "alexnet", "--batch", "300", "--hardware", "titan-xp", "--no-bound")
FULL = Path("/dev/full")
TIGHT = ("--budget", "2.6GiB", "--policy", "swap-all")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return "train.py:step"


# ---- a script's step ----------------------------------------------------------------------------


def test_a_script_has_the_report_that_estimate_foretells(outcore, script, tmp_path) -> None:
    options = ("--hardware", "v100-pcie3", "--budget", "40MiB", "--policy", "pooch", "--json")
    run = outcore("report", script, *options, "--no-bound", "--html", "page.html")
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    told = json.loads(outcore("estimate", script, *options).stdout)
    assert found["predicted_seconds"] == pytest.approx(told["planned"]["seconds"])
    assert found["predicted_peak_bytes"] == told["planned"]["peak_bytes"]
    margin = found["budget_bytes"] // MARGIN_DIVISOR
    assert found["in_core_peak_bytes"] == told["in_core_peak_bytes"] + margin
    assert found["title"] == "train.py:step, on v100-pcie3"
    assert "train.py:step" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_brackets_in_a_path_are_no_markup(outcore, script, tmp_path) -> None:
    folder = tmp_path / "odd [" / "x]"
    folder.mkdir(parents=True)
    odd = (tmp_path / "train.py").rename(folder / "train.py")
    options = ("--hardware", "v100-pcie3", "--budget", "40MiB", "--policy", "swap-all")
    for command in ("report", "estimate"):
        run = outcore(command, f"{odd}:step", *options)
        assert run.exit_code == 0, run.output
        assert f"{odd}:step" in run.stdout


def test_a_script_has_a_sweep_too(outcore, script, tmp_path) -> None:
    options = ("--hardware", "v100-pcie3", "--budget", "40MiB", "--policy", "pooch", "--no-bound")
    run = outcore("report", script, *options, "--sweep", "--steps", "3", "--html", "page.html")
    assert run.exit_code == 0, run.output
    assert "What other" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_more_states_of_the_optimizer_take_more(outcore, script) -> None:
    options = ("--hardware", "v100-pcie3", "--policy", "keep-all", "--no-bound", "--json")
    one, two = (
        json.loads(outcore("report", script, *options, "--states", states).stdout)
        for states in ("1", "2")
    )
    weights = 8 * 4 * (256 * 256 + 256)
    assert two["resident_bytes"] - one["resident_bytes"] == weights


def test_a_script_that_is_not_there_is_one_error(outcore) -> None:
    run = outcore("report", "none.py:step", "--hardware", "v100-pcie3")
    assert run.exit_code == 2
    assert "none.py" in run.stderr


# ---- a plan file --------------------------------------------------------------------------------


@pytest.fixture
def plan_file(outcore, tmp_path: Path) -> str:
    file = str(tmp_path / "plan.json")
    made = outcore("plan", "make", *ALEXNET[:-1], *TIGHT, "-o", file)
    assert made.exit_code == 0, made.output
    return file


def test_a_plan_file_has_the_report_of_its_policy(outcore, plan_file) -> None:
    by_file = outcore("report", *ALEXNET, "--plan", plan_file, "--json")
    assert by_file.exit_code == 0, by_file.output
    by_policy = json.loads(outcore("report", *ALEXNET, *TIGHT, "--json").stdout)
    found = json.loads(by_file.stdout)
    assert found["planning_seconds"] is None, "nothing was planned"
    assert found["policy"] == "swap-all"
    untimed = {"planning_seconds": None}
    assert found | untimed == by_policy | untimed


def test_a_plan_for_another_step_is_refused(outcore, plan_file) -> None:
    run = outcore("report", *ALEXNET, "--batch", "200", "--plan", plan_file)
    assert run.exit_code == 2
    assert "this plan was made for trace" in run.stderr


# ---- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--html", "."), "that is a folder"),
        (("--chrome-trace", "."), "--chrome-trace='.': that is a folder"),
        (("--memory-snapshot", "."), "that is a folder"),
        (("--plot", "."), "--plot='.': that is a folder"),
        (("--memory-snapshot", "none/such/file"), "there is no folder 'none/such'"),
        (("--html", "a.svg", "--plot", "./a.svg"), "--html writes to that file too"),
        (("--plan", "plan.json", "--policy", "pooch"), "leave one of the two out"),
        (("--plan", "plan.json", "--sweep"), "use --policy instead"),
        (("--plan", "none.json"), "none.json"),
        (("train.py:step", "--network", "alexnet"), "leave one of the two out"),
        (("train.py:step", "--batch", "3"), "leave one of the two out"),
        (("--states", "2"), "it is for a script"),
        (("--real",), "it is for a script"),
    ],
)
def test_mistakes_are_one_error_before_any_work(
    outcore, monkeypatch, tmp_path, options, said
) -> None:
    monkeypatch.chdir(tmp_path)
    for work in ("capture.trace_network", "cli.targeted.traced_step"):
        monkeypatch.setattr(f"outcore.{work}", None)
    run = outcore("report", *options)
    assert run.exit_code == 2
    assert said in run.stderr
    assert run.stderr.count("error:") == 1
    assert "Traceback" not in run.output
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_permission(tmp_path, monkeypatch) -> None:
    kept = tmp_path / "page.html"
    check_file("--html", kept)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write
    with pytest.raises(OptionValueError, match="no permission"):
        check_file("--html", kept)
    kept.write_text("mine")
    check_file("--html", kept)
    check_apart([("--html", kept), ("--plot", tmp_path / "other.png")])


@pytest.mark.skipif(not FULL.exists(), reason="no such device")
@pytest.mark.parametrize(
    "command", [("report", "--no-bound", "--chrome-trace"), ("plan", "make", "-o")]
)
def test_a_disk_that_is_full_is_one_error(outcore, command) -> None:
    *words, option = command
    run = outcore(*words, *ALEXNET[:-1], option, str(FULL))
    assert run.exit_code == 2, run.output
    assert "it cannot be written: No space left on device" in run.stderr
    assert "Traceback" not in run.output
    assert FULL.is_char_device()
