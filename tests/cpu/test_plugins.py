"""A policy of another package: on the command line, in comparisons and in training."""

from __future__ import annotations

import json
import re
import shlex
from importlib import import_module

import pytest
import torch

from outcore import Backend
from outcore.policies.keep_all import KeepAll
from tests.pure.packages import on_path, write_package
from tests.pure.test_plugins import PAGE, POLICY, on_the_page


@pytest.fixture
def installed(tmp_path):
    name, entry_points, source = on_the_page()
    write_package(tmp_path, name, entry_points, {"largest_first": source})
    with on_path(tmp_path):
        yield tmp_path


def commands():
    (shell,) = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [shlex.split(line)[1:] for line in shell.splitlines()]


def test_the_commands_of_the_page(outcore, installed):
    listing, comparing = commands()
    listed = outcore(*listing)
    assert listed.exit_code == 0, listed.output
    assert "(my-policies 1.0)" in listed.stdout
    assert "as few as will do" in listed.stdout
    found = outcore(*comparing, "--json", "--no-bound")
    assert found.exit_code == 0, found.output
    mine, theirs = json.loads(found.stdout)
    assert (mine["policy"], theirs["policy"]) == ("largest-first", "pooch")
    assert mine["feasible"]
    assert mine["counts"]["offload"] > 0


def test_all_policies_are_those_of_other_packages_too(outcore, tmp_path):
    write_package(tmp_path, "my-policies", {"mine": "my_module:Mine"}, {"my_module": POLICY})
    network = ("--network", "two-heads", "--batch", "8", "--hardware", "titan-xp")
    with on_path(tmp_path):
        found = outcore("compare", *network, "--policies", "all", "--json", "--no-bound")
    assert json.loads(found.stdout)[-1]["policy"] == "mine"


FAILING = POLICY.replace("return settle", "raise OSError('no'); return settle")


@pytest.mark.parametrize(
    ("source", "said"),
    [("import nowhere", "cannot be imported"), (FAILING, "its plan() raised OSError: no")],
    ids=["import", "plan"],
)
@pytest.mark.parametrize("command", ["compare", "sweep"])
def test_a_package_that_is_wrong_keeps_nothing_from_the_others(
    outcore, tmp_path, monkeypatch, command, source, said
):
    module = import_module("outcore.policies.plugins")  # as an attribute, it is a function
    monkeypatch.setattr(module, "POLICIES", {"keep-all": KeepAll})
    write_package(tmp_path, "my-policies", {"mine": "my_module:Mine"}, {"my_module": source})
    network = ("--network", "two-heads", "--batch", "8", "--hardware", "titan-xp")
    shape = () if command == "compare" else ("--steps", "2")
    with on_path(tmp_path):
        found = outcore(command, *network, *shape, "--policies", "all", "--no-bound")
        as_json = outcore(command, *network, *shape, "--policies", "all", "--no-bound", "--json")
        named = outcore(command, *network, *shape, "--policies", "mine", "--no-bound")
    assert found.exit_code == as_json.exit_code == named.exit_code == 2
    assert "keep-all" in found.stdout
    assert found.stderr.count(said) == 1
    rows = json.loads(as_json.stdout)
    assert any(row["policy"] == "keep-all" and row["feasible"] for row in rows)
    assert all(said in row["reason"] for row in rows if row["policy"] == "mine")
    assert said in named.stderr


def test_a_package_that_is_wrong_is_told_below_the_list(outcore, tmp_path):
    entry_points = {"mine": "my_module:Mine", "pooch": "my_module:Mine"}
    write_package(tmp_path, "my-policies", entry_points, {"my_module": "import nowhere"})
    with on_path(tmp_path):
        found = outcore("policies")
    assert found.exit_code == 2
    assert "swap-all-naive" in found.stdout
    mine, pooch = found.stderr.splitlines()
    assert mine.startswith("error: policy 'mine': my_module:Mine of my-policies 1.0 cannot be")
    assert "uses the built-in one" in pooch


def test_a_model_trains_under_it(installed, tmp_path):
    backend = Backend(budget="2MiB", policy="largest-first{min_bytes=1KiB}", strict=True)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(12)))
    compiled = torch.compile(model, backend=backend)
    for _ in range(6):
        compiled(torch.ones(512, 64)).sum().backward()
    report = backend.report()
    assert (report.policy, report.state) == ("largest-first{min_bytes=1KiB}", "planned")
    assert report.counts.offload > 0
