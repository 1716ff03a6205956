"""The command line with torch installed: lists, doctor, demo and compare."""

import csv
import json
import os
import runpy
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

from outcore.cli.commands.doctor import host_links
from outcore.cli.subject import MOST_SAMPLES
from outcore.cli.training import InCore, Iteration, Task, digest, train
from outcore.execute.queued import QueuedDriver
from outcore.networks import NETWORKS
from outcore.policies import POLICIES
from tests.cpu.queues import LateDevice

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_resnet.py"


def test_policies_and_networks_are_listed(outcore):
    policies = outcore("policies").stdout
    assert all(name in policies for name in POLICIES)
    assert "min_bytes=64KiB" in policies
    networks = outcore("networks").stdout
    assert all(name in networks for name in NETWORKS)
    assert "25,557,032" in networks


def test_doctor_finds_what_it_looks_for(outcore, tmp_path):
    found = outcore("doctor", "--spill-dir", str(tmp_path))
    assert found.exit_code == 0, found.output
    for name in (
        "outcore",
        "torch",
        "cpu",
        "cuda",
        "memory",
        "malloc",
        "direct I/O",
        "link to disk",
    ):
        assert f"\n{name}" in f"\n{found.stdout}"
    assert "iB/s" in found.stdout
    assert not list(tmp_path.iterdir())


def test_brackets_in_a_folder_are_no_markup(outcore, tmp_path):
    folder = tmp_path / "odd [" / "x]"
    folder.mkdir(parents=True)
    found = outcore("doctor", "--spill-dir", str(folder))
    assert found.exit_code == 0, found.output
    assert str(folder) in found.stdout


def test_doctor_without_a_spill_directory_ends_with_the_error(outcore, tmp_path):
    found = outcore("doctor", "--spill-dir", str(tmp_path / "none"))
    assert found.exit_code == 2
    assert "memory" in found.stdout
    assert found.stderr.startswith("error: spill directory")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "10G"], "option budget='10G': cannot read '10G' as a size"),
        (["--budget", "120%"], "option budget='120%'"),
        (["--policy", "poch"], "did you mean 'pooch'?"),
        (
            ["--network", "resnet5"],
            "option network='resnet5': there is no network of this name: did you mean 'resnet50'?",
        ),
        (["--link-limit", "3"], "option link_limit='3': cannot read '3' as a rate"),
        (["--device", "cuda"], "option device='cuda': torch finds no GPU here"),
        (["--spill-dir", "/none/such"], "spill directory '/none/such': it does not exist"),
    ],
)
def test_a_wrong_option_is_one_line_before_anything_is_trained(outcore, arguments, message):
    ended = outcore("demo", *arguments)
    assert ended.exit_code == 2
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert "iteration" not in ended.stdout


def test_debug_lets_the_error_through(outcore):
    ended = outcore("--debug", "demo", "--budget", "10G")
    assert ended.exit_code == 1
    assert type(ended.exception).__name__ == "BudgetError"


def test_what_nobody_foresaw_is_two_lines_and_a_code_of_its_own(outcore, monkeypatch):
    def fail():
        raise ZeroDivisionError("first line\nsecond")

    monkeypatch.setattr("outcore.presets.presets", fail)
    ended = outcore("hardware")
    assert ended.exit_code == 70
    said, advice = ended.stderr.splitlines()
    assert said == "error: ZeroDivisionError: first line"
    assert advice == ("a bug in outcore: please report it with the output of `outcore --debug ...`")
    assert type(outcore("--debug", "hardware").exception) is ZeroDivisionError


def test_closed_streams_are_no_error():
    command = f'{sys.executable} -c "from outcore.cli import main; main()" hardware >&- 2>&-'
    assert subprocess.run(command, shell=True, check=False).returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device")
def test_debug_shows_the_traceback_of_a_full_disk():
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", "from outcore.cli import main; main()"]
        options = ["--debug", "hardware"]
        run = subprocess.run([*command, *options], stdout=full, stderr=subprocess.PIPE, check=False)
    assert run.returncode == 1
    assert "Traceback" in run.stderr.decode()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device")
@pytest.mark.parametrize("argument", ["hardware", "--version"])
def test_a_full_disk_behind_a_pipe_is_one_line(argument):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", "from outcore.cli import main; main()", argument]
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert run.returncode == 2
    assert run.stderr.decode().strip() == "error: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ("app.app = lambda: print('caf\\xe9')", "caf\\xe9"),
        ("sys.argv[1:] = ['run', 'prints.py']", "strict"),
    ],
)
def test_what_standard_output_cannot_encode_is_escaped(tmp_path, command, printed):
    """A script that is run prints as it does without outcore."""
    (tmp_path / "prints.py").write_text("import sys; print(sys.stdout.errors)", encoding="utf-8")
    code = "import sys; from outcore.cli import main; app = sys.modules[main.__module__]; "
    run = subprocess.run(
        [sys.executable, "-c", f"{code}{command}; main()"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        capture_output=True,
        check=True,
    )
    assert run.stdout.decode().strip() == printed


def test_too_many_samples_are_refused(outcore):
    ended = outcore("floor", "--network", "alexnet", "--batch", str(MOST_SAMPLES + 1))
    assert ended.exit_code == 2
    assert str(MOST_SAMPLES) in ended.stderr


def test_the_most_samples_of_the_largest_network_have_sizes(outcore):
    ended = outcore(
        "floor", "--network", "unet3d", "--batch", str(MOST_SAMPLES), "--budget", "100%"
    )
    assert ended.exit_code in (0, 2), ended.output
    assert "bug" not in ended.stderr


def test_too_few_iterations_are_refused(outcore):
    assert outcore("demo", "--iterations", "7").exit_code == 2


def test_the_demo_keeps_its_promises(outcore, tmp_path):
    figures = tmp_path / "figures.json"
    spill = tmp_path / "spill"
    spill.mkdir()
    files = ["--json", str(figures), "--spill-dir", str(spill)]
    ended = outcore("demo", "--small", "--budget", "75%", *files)
    assert ended.exit_code == 0, ended.output
    assert "gradients bitwise equal" in ended.stdout
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert (found["differing_iterations"], found["inside_budget"]) == (0, True)
    assert found["reference"] == "in-core"
    assert found["report"]["counts"]["offload"] + found["report"]["counts"]["recompute"] > 0
    assert found["budgeted"]["peak_bytes"] <= found["report"]["predicted_peak_bytes"]
    assert found["budgeted"]["seconds"] is not None
    assert [s["loss"] for s in found["budgeted"]["steps"]] == [
        s["loss"] for s in found["in_core"]["steps"]
    ]
    assert not list(spill.iterdir())


def test_a_budget_that_no_plan_meets_is_one_line(outcore):
    ended = outcore("demo", "--small", "--budget", "64KiB")
    assert ended.exit_code == 2
    assert ended.stderr.startswith("error: no plan fits a device budget of 64.0 KiB")


def test_a_network_without_photographs_trains_on_random_batches(outcore):
    ended = outcore("demo", "--small", "--network", "lstm", "--batch", "4", "--budget", "8MiB")
    assert ended.exit_code == 0, ended.output
    assert "gradients bitwise equal" in ended.stdout


def test_the_digest_is_of_every_bit_of_every_gradient():
    model = torch.nn.Linear(3, 2)
    without = digest(model)
    model(torch.ones(1, 3)).sum().backward()
    first = digest(model)
    model.bias.grad[1] = torch.nextafter(model.bias.grad[1], torch.tensor(2.0))
    assert len({without, first, digest(model)}) == 3


def test_training_again_gives_the_same_numbers():
    spec = NETWORKS["two-heads"].small
    task = Task(spec, {}, 2, lambda: (spec.batch(2, seed) for seed in range(9)), 4, seed=3)
    seen: list[Iteration] = []
    runs = [train(task, InCore(), seen.append) for _ in range(2)]
    once, again = ([(s.loss, s.gradients) for s in run.steps] for run in runs)
    assert once == again
    assert seen == [step for run in runs for step in run.steps]
    assert runs[0].peak_bytes > sum(4 * p.numel() for p in spec.build().parameters())
    assert [s.phase for s in runs[0].steps] == ["warm-up", "warm-up", "training", "metering"]


def test_the_example_trains(capsys):
    main = runpy.run_path(str(EXAMPLE))["main"]
    main("700MiB", batch=2, size=64, iterations=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in islice(lines, 2)] == ["iteration 1", "iteration 2"]
    assert any(line.startswith("policy") for line in lines)


COMPARE = ("compare", "--network", "two-heads", "--batch", "8", "--hardware", "titan-xp")


def test_compare_for_programs(outcore):
    budgets = ("--budget", "1GiB", "--budget", "8MiB")
    run = outcore(*COMPARE, *budgets, "--policies", "keep-all;swap-all", "--json")
    assert run.exit_code == 0, run.output
    rows = json.loads(run.stdout)
    assert [(row["policy"], row["feasible"]) for row in rows] == [
        ("keep-all", False),
        ("swap-all", False),
        ("keep-all", True),
        ("swap-all", True),
    ]
    assert set(rows[0]) >= {
        "policy",
        "feasible",
        "seconds",
        "items_per_second",
        "relative_to_in_core",
        "peak_bytes",
        "reserved_bytes",
        "counts",
        "planning_seconds",
        "lower_bound_seconds",
        "reason",
    }
    assert rows[0]["lower_bound_seconds"] is None, "no plan fits 8 MiB"
    assert "smallest feasible budget" in rows[0]["reason"]
    assert rows[2]["relative_to_in_core"] == 1
    assert rows[2]["lower_bound_seconds"] == pytest.approx(rows[2]["seconds"])
    assert rows[3]["lower_bound_seconds"] < rows[3]["seconds"]


def test_compare_for_spreadsheets(outcore):
    run = outcore(
        *COMPARE, "--budget", "100%", "--budget", "8MiB", "--policies", "keep-all", "--csv"
    )
    infeasible, kept = csv.DictReader(run.stdout.splitlines())
    assert (kept["batch"], kept["policy"], kept["feasible"]) == ("8", "keep-all", "True")
    assert int(kept["keep"]) > 0
    assert (kept["offload"], infeasible["keep"], infeasible["feasible"]) == ("0", "", "False")
    assert "counts" not in kept


def test_compare_for_people(outcore):
    run = outcore(*COMPARE, "--budget", "100%", "--budget", "8MiB", "--policies", "keep-all")
    assert "all predicted" in run.stdout
    assert "100.0%" in run.stdout
    assert "needs" in run.stdout
    assert "at least" in run.stdout


def test_compare_cuts_nothing_off_on_a_narrow_screen(outcore, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = "superneurons-cost-aware,keep-all"
    budgets = ("--budget", "150MiB", "--budget", "100MiB")
    run = outcore(*COMPARE, *budgets, "--policies", names, "--no-bound")
    lines = run.stdout.splitlines()
    assert max(map(len, lines)) == 80
    assert "…" not in run.stdout
    assert "planned" in run.stdout
    assert sum(line.rstrip().endswith("s") and "iB" in line for line in lines) == 4


def test_compare_on_this_machine(outcore):
    options = ("--hardware", "this-machine", "--budget", "40MiB", "--policies", "keep-all;swap-all")
    run = outcore("compare", "--network", "two-heads", "--batch", "8", *options, "--json")
    assert run.exit_code == 0, run.output
    kept, swapped = json.loads(run.stdout)
    assert kept["needed_bytes"] > 40 << 20
    assert (swapped["feasible"], swapped["needed_tier"]) == (False, "device")


def test_compare_without_bounds(outcore, monkeypatch):
    wanted = (*COMPARE, "--budget", "100%", "--policies", "keep-all")
    assert "at least" not in outcore(*wanted, "--no-bound").stdout
    monkeypatch.setattr("outcore.cli.predicted.find_spec", lambda name: None)
    run = outcore(*wanted)
    assert "at least" not in run.stdout
    assert "pip install scipy" in run.stderr
    assert "reserved" not in run.stdout


def test_compare_with_variants(outcore):
    """AlexNet at batch 300 in 5 GiB: policies that choose workspaces gain; all keep the bound."""
    wanted = ("--network", "alexnet", "--batch", "300", "--hardware", "titan-xp")
    policies = ("keep-all", "pooch", "superneurons-cost-aware")
    options = ("--budget", "5GiB", "--policies", ";".join(policies), "--json")
    plain, both = (
        {row["policy"]: row for row in json.loads(outcore("compare", *wanted, *more).stdout)}
        for more in (options, (*options, "--variants"))
    )
    seconds = {name: (plain[name]["seconds"], both[name]["seconds"]) for name in policies}
    for name in ("keep-all", "pooch"):
        assert seconds[name][0] == seconds[name][1]
    plainly, chosen = seconds["superneurons-cost-aware"]
    assert chosen < plainly
    assert both["superneurons-cost-aware"]["relative_to_in_core"] > 1
    assert all(row["lower_bound_seconds"] <= row["seconds"] for row in both.values())


def test_compare_with_an_allocator(outcore, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    options = ("--policies", "keep-all", "--allocator", "virtual-chunks{chunk_bytes=200MiB}")
    run = outcore(*COMPARE, "--budget", "100%", "--budget", "300MiB", *options)
    assert run.exit_code == 0, run.output
    assert "reserved" in run.stdout
    assert "memory by virtual-chunks" in run.stdout
    rows = json.loads(outcore(*COMPARE, "--budget", "300MiB", *options, "--json").stdout)
    (row,) = rows
    assert not row["feasible"]
    assert row["peak_bytes"] <= 300 << 20 < row["reserved_bytes"]
    assert row["reserved_bytes"] % (200 << 20) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--hardware", "titan"), "did you mean 'titan-x'"),
        (("--budget", "much"), "--budget"),
        (("--budget", "100GiB", "--hardware", "titan-xp"), "the machine has 11.9 GiB"),
        (("--policies", "poch"), "did you mean 'pooch'"),
        (("--allocator", "best"), "did you mean 'best-fit'"),
        (("--batch", "0"), "--batch"),
        (("--json", "--csv"), "choose one"),
    ],
)
def test_compare_answers_mistakes_before_it_traces(outcore, monkeypatch, options, said):
    monkeypatch.setattr("outcore.capture.trace_network", None)
    run = outcore("compare", *options)
    assert run.exit_code == 2
    assert said in run.stderr


def test_the_doctor_tells_what_compute_does_to_the_links_of_a_gpu():
    device = LateDevice()
    found = dict(host_links(QueuedDriver(device), 1 << 30))
    assert {"link to host", "link from host", "both directions"} < set(found)
    assert found["while computing"] == "100% of the rate away, 100% back (in the rates above)"
    device.shares_memory = True
    [(_, none)] = host_links(QueuedDriver(device), 1 << 30)
    assert none.startswith("none")
