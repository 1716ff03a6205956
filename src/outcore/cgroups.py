"""cgroups: where Linux says what a container may use."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def folders(controller: str) -> list[Path]:
    """Folders of the cgroups of this process that can limit `controller`, and all their parents."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root = ROOT
        elif controller in controllers.split(","):
            root = ROOT / controller
        else:
            continue
        folder = root / path.removeprefix("/")
        found += [folder, *(p for p in folder.parents if p.is_relative_to(root))]
    return found


def text(folder: Path, name: str) -> str | None:
    """What the file `name` of a cgroup says; None if there is none."""
    try:
        return (folder / name).read_text().strip()
    except OSError:
        return None
