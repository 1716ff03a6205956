"""Commands that predict a step take a function of the user's script instead of a known network."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

SCRIPT = """
import torch
from torch import nn

print("imported")


def step():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)))
    return model, torch.empty(4096, 256), lambda found: found.square().mean()


def parts():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.last(x)

    return Parts(), torch.empty(4, 8)
"""
WEIGHTS = 8 * 4 * (256 * 256 + 256)
TARGET = ("train.py:step", "--hardware", "v100-pcie3")
TIGHT = ("--budget", "40MiB")
COMMANDS = ("compare", "explain", "floor", "plan make", "report", "sweep")


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)


def answer(run):
    assert run.exit_code == 0, run.output
    return json.loads(run.stdout)


def test_the_floor_is_the_smallest_budget_that_estimate_names(outcore):
    (found,) = answer(outcore("floor", *TARGET, "--json"))
    told = answer(outcore("estimate", *TARGET, *TIGHT, "--json"))
    assert found["target"] == "train.py:step"
    assert found["training_budget_bytes"] == told["smallest_budget_bytes"]
    assert found["in_core_peak_bytes"] == told["in_core_peak_bytes"]
    assert found["outside_bytes"] == WEIGHTS


def test_a_sweep_runs_from_a_budget_that_works_in_training_to_one_that_keeps_everything(outcore):
    (lowest,) = answer(outcore("floor", *TARGET, "--json"))
    options = ("--steps", "2", "--policies", "search{effort=0.01}", "--no-bound", "--json")
    first, last = answer(outcore("sweep", *TARGET, *options))
    assert first["budget_bytes"] == lowest["training_budget_bytes"]
    assert first["feasible"]
    assert last["relative_to_in_core"] == pytest.approx(1)
    assert last["counts"] == {"keep": last["counts"]["keep"], "offload": 0, "recompute": 0}


def test_what_is_compared_is_what_estimate_foretells(outcore):
    (row,) = answer(outcore("compare", *TARGET, *TIGHT, "--policies", "pooch", "--json"))
    told = answer(outcore("estimate", *TARGET, *TIGHT, "--policy", "pooch", "--json"))
    assert row["seconds"] == pytest.approx(told["planned"]["seconds"])
    assert row["peak_bytes"] == told["planned"]["peak_bytes"]
    assert row["items_per_second"] == pytest.approx(1 / row["seconds"]), "steps per second"


def test_compare_shows_steps_for_people_and_the_target_for_spreadsheets(outcore):
    options = (*TARGET, *TIGHT, "--policies", "swap-all", "--no-bound")
    shown = outcore("compare", *options).stdout
    assert "steps/s" in shown
    assert "items/s" not in shown
    (row,) = csv.DictReader(outcore("compare", *options, "--csv").stdout.splitlines())
    assert row["target"] == "train.py:step"


def test_the_plan_that_is_explained_moves_what_estimate_foretells(outcore):
    found = answer(outcore("explain", *TARGET, *TIGHT, "--policy", "swap-all", "--json"))
    told = answer(outcore("estimate", *TARGET, *TIGHT, "--policy", "swap-all", "--json"))
    assert found["seconds"] == pytest.approx(told["planned"]["seconds"])
    assert found["moved"] == told["planned"]["counts"]["offload"]


def test_more_states_of_the_optimizer_need_more(outcore):
    one, two = (
        answer(outcore("floor", *TARGET, "--states", states, "--json"))[0]["floor_bytes"]
        for states in ("1", "2")
    )
    assert two - one == WEIGHTS


def test_a_plan_of_a_script_is_made_and_checked(outcore):
    options = (*TARGET, *TIGHT, "--policy", "pooch")
    made = outcore("plan", "make", *options, "-o", "plan.json")
    assert made.exit_code == 0, made.output
    checked = outcore("plan", "check", "plan.json", *TARGET)
    assert checked.exit_code == 0, checked.output
    assert "the plan verifies and fits" in checked.stdout
    other = outcore("plan", "check", "plan.json", *TARGET, "--states", "12")
    assert other.exit_code == 1, "more is held outside than was planned for"
    assert "--states" in outcore("plan", "check", "plan.json", "--states", "2").stderr


@pytest.mark.parametrize("command", ["explain", "plan make", "report"])
def test_a_budget_below_the_floor_names_one_that_works(outcore, command):
    (lowest,) = answer(outcore("floor", *TARGET, "--json"))
    run = outcore(*command.split(), *TARGET, "--budget", "10MiB", "--policy", "search")
    assert run.exit_code == 2, run.output
    assert f"({lowest['training_budget_bytes']} bytes)" in run.stderr


def test_a_budget_below_that_of_a_plan_names_one_that_works(outcore):
    made = outcore("plan", "make", *TARGET, *TIGHT, "--policy", "pooch", "-o", "plan.json")
    assert made.exit_code == 0, made.output
    check = ("plan", "check", "plan.json", *TARGET, "--budget")
    refused = outcore(*check, "12MiB")
    assert refused.exit_code == 1, refused.output
    (advised,) = re.findall(r'try "([0-9.]+MiB)"', refused.stderr)
    assert outcore(*check, advised).exit_code == 0


def test_percentages_are_of_the_in_core_peak(outcore):
    (found,) = answer(outcore("floor", *TARGET, "--json"))
    options = ("--from", "50%", "--to", "75%", "--steps", "2", "--policies", "chen-sqrt")
    rows = answer(outcore("sweep", *TARGET, *options, "--no-bound", "--json"))
    peak = found["in_core_peak_bytes"]
    assert [row["budget_bytes"] for row in rows] == [peak // 2, peak * 3 // 4]


def test_brackets_in_a_path_are_no_markup(outcore, tmp_path):
    folder = tmp_path / "odd [" / "x]"
    folder.mkdir(parents=True)
    odd = (tmp_path / "train.py").rename(folder / "train.py")
    for command in ("floor", "explain", "compare"):
        assert f"{odd}:step" in outcore(command, f"{odd}:step", *TARGET[1:]).stdout


@pytest.mark.parametrize("command", ["compare", "floor"])
def test_how_training_would_differ_is_told(outcore, command):
    run = outcore(command, "train.py:parts", "--hardware", "v100-pcie3", "--json")
    assert run.exit_code == 0, run.output
    assert "train.py:parts: torch.compile splits the step (graph break)" in run.stderr
    assert json.loads(run.stdout)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("train.py:step", "--network", "alexnet"), "leave one of the two out"),
        (("train.py:step", "--batch", "3"), "leave one of the two out"),
        (("--states", "2"), "it is for a script"),
        (("--real",), "it is for a script"),
    ],
)
def test_one_step_at_a_time(outcore, monkeypatch, command, options, said):
    for work in ("capture.trace_network", "cli.targeted.traced_step"):
        monkeypatch.setattr(f"outcore.{work}", None)
    run = outcore(*command.split(), *options)
    assert run.exit_code == 2
    assert said in run.stderr
