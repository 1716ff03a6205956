"""The command line: help, what it imports, the table of `outcore demo`, progress and width."""

import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console
from typer.main import get_command

from outcore.cli import app
from outcore.cli.comparison import RunComparison, table, to_dict
from outcore.cli.progress import progress
from outcore.cli.screen import WIDE, screen
from outcore.cli.training import METERING, STEADY, Iteration, TrainingRun
from outcore.report import Counts, Report

COMMANDS = (
    "compare",
    "demo",
    "doctor",
    "estimate",
    "explain",
    "floor",
    "hardware",
    "networks",
    "plan",
    "plan check",
    "plan diff",
    "plan explain",
    "plan make",
    "plan schema",
    "plan show",
    "policies",
    "report",
    "run",
    "sweep",
)
# Packages that terminal output needs. numpy alone takes as long to import as all of these.
FOR_HELP = {
    *("annotated_doc", "attr", "markdown_it", "mdurl", "outcore"),
    *("pygments", "rich", "shellingham", "typer", "typing_extensions"),
}

HELP_OF_EACH = """
import contextlib, io, sys
from outcore.cli import main
for command in sys.argv[1:]:
    sys.argv = ["outcore", *command.split(), "--help"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main()
    assert "Usage:" in printed.getvalue(), f"{command}: {printed.getvalue()}"
    assert "torch" not in sys.modules, f"outcore {command} --help imported torch"
"""

RUN = """
import sys
at_start = set(sys.modules)
from outcore.cli import main
try:
    main()
finally:
    assert "torch" not in sys.modules, "this imported torch"
    packages = {name.partition(".")[0] for name in set(sys.modules) - at_start}
    print("packages:", *(packages - sys.stdlib_module_names), file=sys.stderr)
"""


def run(*arguments, code=RUN):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def commands(of, path=()):
    for name, command in sorted(of.commands.items()):
        yield " ".join((*path, name))
        yield from commands(command, (*path, name)) if hasattr(command, "commands") else ()


def test_all_commands_are_tried_here():
    assert tuple(commands(get_command(app))) == COMMANDS


def test_help_lists_the_commands_and_imports_little():
    finished = run("--help")
    assert finished.returncode == 0, finished.stderr
    assert all(command.split()[0] in finished.stdout for command in COMMANDS)
    label, *packages = finished.stderr.split()
    assert label == "packages:"
    assert set(packages) <= FOR_HELP


def test_help_needs_no_torch():
    finished = run(*COMMANDS, code=HELP_OF_EACH)
    assert finished.returncode == 0, finished.stderr


def test_the_version_needs_no_torch():
    finished = run("--version")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip()


def test_hardware_needs_no_torch():
    finished = run("hardware")
    assert finished.returncode == 0, finished.stderr
    assert "v100-pcie3" in finished.stdout


def test_policies_need_no_torch():
    finished = run("policies")
    assert finished.returncode == 0, finished.stderr
    assert "pooch" in finished.stdout


def a_run(title, peak_bytes, seconds, gradients="same"):
    phases = ("warm-up", STEADY, STEADY, METERING)
    steps = (Iteration(p, 0.7 - i / 10, i * seconds, gradients) for i, p in enumerate(phases, 1))
    return TrainingRun(title, tuple(steps), peak_bytes)


def compared(**changes):
    report = Report(
        policy="pooch",
        state="planned",
        budget_bytes=400 << 20,
        graphs=1,
        in_core_peak_bytes=1010 << 20,
        predicted_peak_bytes=399 << 20,
        predicted_seconds=1.25,
        in_core_seconds=1.0,
        planning_seconds=0.5,
        counts=Counts(10, 80, 16),
        offloaded_bytes=600 << 20,
        recompute_seconds=0.125,
    )
    runs = {
        "in_core": a_run("in-core", 1000 << 20, 0.4),
        "budgeted": a_run("budgeted", 390 << 20, 0.5),
    }
    return RunComparison(**{"budget_bytes": 400 << 20, **runs, "report": report, **changes})


def text(shown):
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def test_the_table(golden):
    golden(text(table(compared())), "cli/demo_table")


def test_promises_kept_and_broken():
    assert compared().kept
    over = compared(budgeted=a_run("budgeted", 401 << 20, 0.5))
    assert (over.inside, over.differing, over.kept) == (False, 0, False)
    wrong = compared(budgeted=a_run("budgeted", 390 << 20, 0.5, gradients="other"))
    assert (wrong.inside, wrong.differing, wrong.kept) == (True, 4, False)
    assert "no: 4 of 4 iterations differ" in text(table(wrong))
    traced = compared(
        budgeted=a_run("budgeted", 390 << 20, 0.5, gradients="other"),
        traced=a_run("aot_eager", 1000 << 20, 0.4, gradients="other"),
    )
    assert traced.kept
    assert "yes to aot_eager, which is not equal to eager" in text(table(traced))


def with_gradients(*gradients):
    run = a_run("any", 390 << 20, 0.5)
    steps = (replace(step, gradients=g) for step, g in zip(run.steps, gradients, strict=True))
    return replace(run, steps=tuple(steps))


@pytest.mark.parametrize(
    ("budgeted", "repeated", "differing", "verdict"),
    [
        ("abxy", "abef", 0, "yes, in 2 of 4; then PyTorch's own vary"),
        ("axyz", "abef", 1, "no: 1 of 2 iterations differ"),
        ("wxyz", "efgh", 0, "unknown: PyTorch's own vary"),
    ],
)
def test_iterations_in_which_pytorch_itself_varies_are_not_compared(
    budgeted, repeated, differing, verdict
):
    found = compared(
        budgeted=with_gradients(*budgeted),
        traced=with_gradients(*"abcd"),
        repeated=with_gradients(*repeated),
    )
    assert (found.differing, found.kept) == (differing, not differing)
    assert verdict in text(table(found))
    assert to_dict(found)["varying_iterations"] == found.varying > 0


def test_figures_that_are_not_known_are_dashes():
    unknown = compared(report=Report("pooch", "in-core", 400 << 20))
    assert "│ -" in text(table(unknown))
    assert to_dict(unknown)["report"]["predicted_seconds"] is None


def test_figures_for_programs():
    figures = to_dict(compared())
    assert figures["in_core"]["seconds"] == pytest.approx(1.0)  # of the two steady iterations
    assert figures["budgeted"]["peak_bytes"] == 390 << 20
    assert len(figures["budgeted"]["steps"]) == 4
    assert figures["report"]["counts"] == {"keep": 10, "offload": 80, "recompute": 16}
    assert (figures["reference"], figures["differing_iterations"]) == ("in-core", 0)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(terminal, capsys):
    step = Iteration("profiling", 0.5, 1.5, "")
    console = Console(force_terminal=terminal, width=100)
    with progress(console, "budgeted", 2) as watch:
        watch(step)
        watch(step)
    shown = capsys.readouterr().out
    assert "profiling, loss 0.5000, 1.50 s" in shown
    assert "2/2" in shown
    assert ("\x1b" in shown) is terminal
    assert terminal or shown.count("\n") == 2


@pytest.mark.parametrize(("told", "width"), [("0", WIDE), ("200", 200), ("many", WIDE)])
def test_columns_are_believed_where_they_can_be(told, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", told)
    assert screen().width == width
