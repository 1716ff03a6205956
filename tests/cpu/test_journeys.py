"""Each journey in examples/journeys prints what its text file shows, except for figures."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pages
from tests.pages import ROOT, Block

FOLDER = ROOT / "examples" / "journeys"
WIDTH = "100"


def walk(name: str, folder: Path) -> str:
    """What the script of a journey prints, run in `folder` with copies of all its files."""
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
    scripts = folder / "bin"
    scripts.mkdir()
    command = f'#!/bin/sh\nexec "{sys.executable}" -c "from outcore.cli import main; main()" "$@"\n'
    for program, text in (
        ("outcore", command),
        ("python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'),
    ):
        (scripts / program).write_text(text)
        (scripts / program).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{scripts}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "COLUMNS": WIDTH,
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", f"{name}.sh"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.sh")))
def test_a_journey(name, tmp_path):
    printed = walk(name, tmp_path)
    expected = FOLDER / f"{name}.txt"
    shown = Block(expected, 1, "", expected.read_text(), {"figures vary": "times, and plans"})
    assert not (wrong := pages.differ(shown, printed)), wrong
    if name == "newcomer":
        losses = [line for line in printed.splitlines() if line.startswith("iteration")]
        assert losses[: len(losses) // 2] == losses[len(losses) // 2 :]
        assert len(set(losses)) == len(losses) // 2 > 5
