"""packages: write packages for a test as pip installs them, with a `dist-info` folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest


def write_package(
    folder: Path, name: str, entry_points: Mapping[str, str], modules: Mapping[str, str]
) -> None:
    """Write the distribution `name` 1.0, with policies and its modules, into `folder`."""
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source, encoding="utf-8")
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    lines = [f"{entry} = {value}" for entry, value in entry_points.items()]
    text = "\n".join(["[outcore.policies]", *lines, ""])
    (info / "entry_points.txt").write_text(text, encoding="utf-8")


@contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """Make `folder` importable; afterwards, forget the modules that were imported from it."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
