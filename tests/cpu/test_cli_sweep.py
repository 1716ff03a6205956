"""outcore sweep and outcore floor on networks that torch traces."""

import csv
import json
from importlib.util import find_spec

import pytest

NETWORK = ("--network", "two-heads", "--batch", "8", "--hardware", "titan-xp")
POLICIES = ("--policies", "keep-all;swap-all")
SWEEP = ("sweep", *NETWORK, *POLICIES, "--steps", "3")
FLOOR = ("floor", *NETWORK)


def test_a_sweep_for_programs(outcore):
    run = outcore(*SWEEP, "--json")
    assert run.exit_code == 0, run.output
    rows = json.loads(run.stdout)
    (least,) = json.loads(outcore(*FLOOR, "--json").stdout)
    first, last = least["floor_bytes"], least["in_core_peak_bytes"]
    assert [row["budget_bytes"] for row in rows[::2]] == [first, (first + last) // 2, last]
    assert {row["batch"] for row in rows} == {8}
    assert [row["policy"] for row in rows] == ["keep-all", "swap-all"] * 3
    kept = rows[::2]
    assert [row["feasible"] for row in kept] == [False, False, True]
    assert kept[2]["relative_to_in_core"] == 1
    bounds = [row["lower_bound_seconds"] for row in kept]
    assert bounds == sorted(bounds, reverse=True), "more memory never takes longer"
    assert all(
        row["lower_bound_seconds"] <= row["seconds"] * (1 + 1e-9) for row in rows if row["feasible"]
    )


def test_a_sweep_between_sizes_for_spreadsheets(outcore):
    run = outcore(*SWEEP, "--from", "200MiB", "--to", "250MiB", "--no-bound", "--csv")
    rows = list(csv.DictReader(run.stdout.splitlines()))
    assert [int(row["budget_bytes"]) >> 20 for row in rows] == [200, 200, 225, 225, 250, 250]
    assert {row["batch"] for row in rows} == {"8"}
    assert {row["lower_bound_seconds"] for row in rows} == {""}


def test_a_sweep_for_people(outcore):
    run = outcore(*SWEEP, "--to", "100%")
    assert "(all predicted)" in run.stdout
    assert "any plan" in run.stdout
    assert "100.0%" in run.stdout
    assert "1.000x" in run.stdout
    lines = [line for line in run.stdout.splitlines() if "iB " in line and "│" in line]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    assert [row[1] == "-" for row in cells] == [True, True, False], "keep-all fits the peak alone"
    assert cells[2][1].startswith("*")
    assert "any plan" not in outcore(*SWEEP, "--no-bound").stdout


def test_many_policies_are_several_tables(outcore, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    policies = "keep-all;swap-all;swap-all-naive;recompute-all"
    run = outcore("sweep", *NETWORK, "--policies", policies, "--steps", "2")
    assert run.exit_code == 0, run.output
    lines = run.stdout.splitlines()
    assert sum("budget" in line for line in lines) == 2, "three fit beside the others"
    assert max(len(line) for line in lines if "│" in line) <= 60
    assert run.stdout.count("1.000x") >= 3, "the bound in both, keep-all in the first"


def test_a_sweep_without_scipy(outcore, monkeypatch):
    monkeypatch.setattr("outcore.cli.predicted.find_spec", lambda name: None)
    run = outcore(*SWEEP)
    assert run.exit_code == 0, run.output
    assert "any plan" not in run.stdout
    assert "pip install scipy" in run.stderr


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="an extra")
def test_a_sweep_drawn(outcore, tmp_path):
    file = tmp_path / "sweep [b].svg"
    run = outcore(*SWEEP, "--plot", str(file), "--json")
    assert run.exit_code == 0, run.output
    assert len(json.loads(run.stdout)) == 6
    assert str(file) in run.stderr
    assert "<svg" in file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--hardware", "titan"), "did you mean 'titan-x'"),
        (("--network", "two-head"), "did you mean 'two-heads'"),
        (("--from", "little"), "--from"),
        (("--to", "100GiB", "--hardware", "titan-xp"), "the machine has 11.9 GiB"),
        (("--policies", "poch"), "did you mean 'pooch'"),
        (("--steps", "1"), "--steps"),
        (("--json", "--csv"), "choose one"),
        (("--plot", "sweep.jpg"), ".png, .pdf, .svg"),
        (("--plot", "none/such/sweep.png"), "there is no folder"),
    ],
)
def test_a_sweep_answers_mistakes_before_it_traces(outcore, monkeypatch, options, said):
    monkeypatch.setattr("outcore.capture.trace_network", None)
    run = outcore("sweep", *options)
    assert run.exit_code == 2
    assert said in run.stderr


def test_a_machine_too_small_for_any_plan_is_one_line(outcore):
    run = outcore("sweep", "--network", "vgg16", "--batch", "4096", "--hardware", "v100-pcie3")
    assert run.exit_code == 2
    assert "the smallest feasible budget is" in run.stderr


def test_the_floor_for_people(outcore):
    run = outcore(*FLOOR, "--batch", "16")
    assert run.exit_code == 0, run.output
    for said in ("batch 8", "batch 16", "(all predicted)", "set by", "op ", "of the in-core peak"):
        assert said in run.stdout
    assert "read by the op" in run.stdout
    assert "the machine has" not in run.stdout


def test_the_floor_for_programs(outcore):
    run = outcore(*FLOOR, "--batch", "16", "--json")
    small, large = json.loads(run.stdout)
    assert (small["batch"], large["batch"]) == (8, 16)
    assert small["floor_bytes"] < large["floor_bytes"]
    for found in (small, large):
        assert found["proved_floor_bytes"] <= found["floor_bytes"] < found["in_core_peak_bytes"]
        assert found["of_in_core_peak"] == found["floor_bytes"] / found["in_core_peak_bytes"]
        assert found["set_by"].startswith(f"op {found['op']} aten.")
        parts = sum(each["bytes"] for each in found["held"])
        rest = ("outside_bytes", "between_bytes", "workspace_bytes")
        assert parts + sum(found[name] for name in rest) == found["floor_bytes"]


def test_the_floor_is_where_a_plan_is_and_not_below(outcore):
    """`compare` finds a plan at the floor that `floor` prints, and none below the proved one."""
    (found,) = json.loads(outcore(*FLOOR, "--json").stdout)
    lowest = found["floor_bytes"]
    budgets = ("--budget", f"{lowest}B", "--budget", f"{found['proved_floor_bytes'] - 1}B")
    run = outcore(
        "compare", *NETWORK, *budgets, "--policies", "search{effort=0.01}", "--json", "--no-bound"
    )
    below, above = json.loads(run.stdout)
    assert above["feasible"]
    assert not below["feasible"]


def test_a_floor_above_what_the_machine_has(outcore):
    run = outcore("floor", "--network", "vgg16", "--batch", "4096", "--hardware", "v100-pcie3")
    assert run.exit_code == 0
    assert "the machine has 16.0 GiB" in run.stdout
