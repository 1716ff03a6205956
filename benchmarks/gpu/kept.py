"""kept: files of outcore's rows for later analysis: problems, plans and timelines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from outcore import Backend
from outcore.ir.store import save

_folder: list[Path] = []
"""Where files are kept, if anywhere."""


def keep_in(folder: Path) -> None:
    """Keep the files of all rows from now on in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    _folder[:] = [folder]


def keeps() -> bool:
    """Whether files are kept."""
    return bool(_folder)


def keep(row: str, files: Mapping[str, bytes]) -> None:
    """Write `files`, by name, as those of a row."""
    start = re.sub(r"\W+", "-", row)
    for name, content in files.items():
        (_folder[0] / f"{start}-{name}").write_bytes(content)


def files_of(backend: Backend) -> dict[str, bytes]:
    """The problem of each graph with a plan, all plans, and the timelines, by file name."""
    engine = backend.engine
    statuses = [] if engine is None else engine.registry.statuses()
    problems = [status.planned.problem for status in statuses if status.planned is not None]
    if not problems:
        return {}
    with TemporaryDirectory() as made:
        folder = Path(made)
        for number, problem in enumerate(problems):
            save(problem, folder / f"problem-{number}.json")
        backend.save_plans(folder / "plans.json", most=0)
        backend.report().to_chrome_trace(folder / "timelines.json")
        return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
