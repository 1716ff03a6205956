"""outcore plan: plan files of modeled steps are made, shown, compared and checked."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from outcore.planfile import load_plans, make_file, save_plans, schema_text

STEP = ("--network", "two-heads", "--batch", "8", "--hardware", "titan-xp")
TIGHT = ("--budget", "120MiB", "--policy", "swap-all")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@pytest.fixture
def plan(outcore, folder) -> str:
    """A plan file, made once for all tests."""
    path = folder / "plan.json"
    if not path.exists():
        run = outcore("plan", "make", *STEP, *TIGHT, "-o", str(path))
        assert run.exit_code == 0, run.output
    return str(path)


@pytest.fixture
def other(outcore, folder) -> str:
    """A plan file made with rules and another policy."""
    path, rules = folder / "other.json", folder / "rules.json"
    if not path.exists():
        rules.write_text('[{"match": "*gelu*", "action": "recompute"}]')
        options = ("--policy", "pooch", "--overrides", str(rules), "--reasons", "2")
        run = outcore("plan", "make", *STEP, *TIGHT, *options, "--output", str(path))
        assert run.exit_code == 0, run.output
    return str(path)


@pytest.mark.parametrize("output", [(), ("-o", "-")])
def test_made_again_it_is_the_same_to_the_byte(outcore, plan, output):
    again = outcore("plan", "make", *STEP, *TIGHT, *output)
    assert again.exit_code == 0, again.output
    assert again.stdout == Path(plan).read_text(encoding="ascii")


def test_a_file_is_what_the_schema_says(outcore, plan, other):
    schema = outcore("plan", "schema")
    assert schema.stdout == schema_text()
    for path in (plan, other):
        jsonschema.validate(json.loads(Path(path).read_text()), json.loads(schema.stdout))


def test_a_file_has_what_a_reviewer_asks_for(plan):
    (saved,) = load_plans(plan).plans
    assert saved.policy == "swap-all"
    assert saved.budgets.device == 120 << 20
    assert saved.machine.name == "titan-xp"
    assert saved.predicted.device_bytes <= 120 << 20 < saved.predicted.in_core_bytes
    assert saved.predicted.seconds > saved.predicted.in_core_seconds
    assert all(storage.reason for storage in saved.storages)
    assert any("two_heads.py" in storage.source for storage in saved.storages)


def test_rules_hold_in_what_is_made(other):
    file = load_plans(other)
    (saved,) = file.plans
    assert [(rule.match, rule.action) for rule in file.overrides] == [("*gelu*", "recompute")]
    gelus = [storage for storage in saved.storages if "gelu" in storage.name]
    assert gelus
    assert {storage.action for storage in gelus} == {"recompute"}
    assert sum(bool(storage.reason) for storage in saved.storages) == 2


def test_show(outcore, plan):
    run = outcore("plan", "show", plan, "--top", "3")
    assert run.exit_code == 0, run.output
    for said in ("swap-all", "titan-xp", "120 MiB on the device", "(all predicted)", "3 of "):
        assert said in run.stdout
    assert "two_heads.py" in run.stdout


def test_explain(outcore, plan):
    run = outcore("plan", "explain", plan, "--top", "2")
    assert run.exit_code == 0, run.output
    assert "2 of " in run.stdout
    assert "recomputed" in run.stdout
    assert "would not fit" in run.stdout or "the step takes" in run.stdout


def test_a_file_and_itself_do_not_differ(outcore, plan):
    run = outcore("plan", "diff", plan, plan)
    assert (run.exit_code, run.stdout) == (0, "Nothing differs.\n")
    assert json.loads(outcore("plan", "diff", plan, plan, "--json").stdout)["differs"] is False


def test_what_differs_is_told_and_the_exit_code_says_so(outcore, plan, other):
    run = outcore("plan", "diff", plan, other)
    assert run.exit_code == 1
    for said in ("swap-all", "pooch", "moves differ", "recompute", "predicted.seconds", "gelu"):
        assert said in run.stdout
    found = outcore("plan", "diff", plan, other, "--json", "--actions")
    assert found.exit_code == 1
    changes = json.loads(found.stdout)["plans"][0]["changes"]
    assert changes
    assert all({"action", "how"} & set(change["differs"]) for change in changes)


def test_check_of_the_file_alone(outcore, plan, tmp_path):
    run = outcore("plan", "check", plan)
    assert (run.exit_code, "a plan, unchanged since it was saved" in run.stdout) == (0, True)
    edited = tmp_path / "edited.json"
    edited.write_text(Path(plan).read_text().replace('"offload"', '"recompute"', 1))
    run = outcore("plan", "check", str(edited))
    assert run.exit_code == 2
    assert "not a readable plan file" in run.stderr
    renamed = tmp_path / "renamed.json"
    renamed.write_text(Path(plan).read_text().replace('"swap-all"', '"swap-some"', 1))
    run = outcore("plan", "check", str(renamed))
    assert run.exit_code == 1
    said = f"not valid: the plan file {renamed} was changed after it was saved"
    assert run.stderr.startswith(said)


@pytest.mark.parametrize("option", ["--batch=4", "--hardware=titan-x", "--budget=1GiB", "--strict"])
def test_check_of_the_file_alone_takes_no_option_of_a_step(outcore, plan, option):
    run = outcore("plan", "check", plan, option)
    assert run.exit_code == 2
    assert "name one with --network" in run.stderr


def test_check_against_a_step(outcore, plan):
    run = outcore("plan", "check", plan, *STEP, "--strict")
    assert run.exit_code == 0, run.output
    assert "verifies and fits" in run.stdout
    assert "of 120 MiB" in run.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--batch", "4"), "made for trace"),
        (("--hardware", "titan-x", "--strict"), "made for hardware"),
        (("--budget", "64MiB"), "no plan fits a device budget of 64.0 MiB"),
    ],
)
def test_check_against_another_step(outcore, plan, options, said):
    run = outcore("plan", "check", plan, *STEP, *options)
    assert run.exit_code == 1, run.output
    assert run.stderr.strip().splitlines()[-1].startswith("not valid: ")
    assert said in run.stderr


def test_other_hardware_will_do_unless_strict(outcore, plan):
    run = outcore("plan", "check", plan, *STEP, "--hardware", "titan-x")
    assert run.exit_code == 0, run.output


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("show", "none.json"), "none.json: No such file"),
        (("diff", "none.json", "none.json"), "No such file"),
        (("check", "none.json"), "No such file"),
        (("check", "none.json", "--strict"), "name one with --network"),
        (("make", "--policy", "poch"), "did you mean 'pooch'"),
        (("make", "--network", "resnet5"), "did you mean 'resnet50'"),
        (("make", "--budget", "much"), "--budget"),
        (("make", "--overrides", "none.json"), "not a readable overrides file: none.json"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_traced(outcore, monkeypatch, command, said):
    monkeypatch.setattr("outcore.capture.trace_network", None)
    run = outcore("plan", *command)
    assert run.exit_code == 2
    assert said in run.stderr


def test_a_rule_that_matches_nothing_is_a_mistake(outcore, tmp_path):
    rules = tmp_path / "rules.json"
    rules.write_text('[{"match": "decoder.*", "action": "keep"}]')
    run = outcore("plan", "make", *STEP, "--overrides", str(rules))
    assert run.exit_code == 2
    assert "it matches no storage" in run.stderr


def test_several_plans_for_one_trace_are_all_checked(outcore, plan, other, tmp_path):
    files = [load_plans(path) for path in (plan, other)]
    both = tmp_path / "both.json"
    save_plans(make_file([p for f in files for p in f.plans], files[0].versions), both)
    run = outcore("plan", "check", str(both), *STEP)
    assert run.exit_code == 0, run.output
    assert "2 plans for it verify and fit: " in run.stdout
    kept = outcore("plan", "make", *STEP, "--policy", "keep-all", "-o", str(tmp_path / "kept.json"))
    assert kept.exit_code == 0, kept.output
    plans = (files[0], load_plans(tmp_path / "kept.json"))
    save_plans(make_file([p for f in plans for p in f.plans], files[0].versions), both)
    run = outcore("plan", "check", str(both), *STEP)
    assert run.exit_code == 1
    assert run.stderr.startswith("not valid: ")
    assert outcore("plan", "diff", str(both), str(both)).exit_code == 0
