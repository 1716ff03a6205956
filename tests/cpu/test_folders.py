"""The spill folder is on a disk, even if temporary files are in memory; otherwise, a warning."""

import os
import tempfile
from pathlib import Path

import pytest

from outcore.execute import folders
from outcore.execute.folders import in_memory, spill_folder
from outcore.execute.link import Spill


@pytest.fixture
def mounted(monkeypatch, tmp_path):
    """Set the kind of file system that a folder is on."""

    def mount(kind: str, folder: Path) -> None:
        device = folder.stat().st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        lines = [
            "21 1 254:254 / / rw - ext4 /dev/root rw",
            f"29 21 {number} / /tmp rw,nosuid shared:5 - {kind} of-its-own rw,size=4g",
            f"30 21 254:253 / /a\\040-\\040b rw - {kind} none rw",
        ]
        folders.MOUNTS.write_text("\n".join(lines))

    monkeypatch.setattr(folders, "MOUNTS", tmp_path / "mountinfo")
    return mount


@pytest.mark.parametrize(("kind", "expected"), [("tmpfs", True), ("ramfs", True), ("xfs", False)])
def test_what_is_written_to_a_folder_may_take_memory(mounted, tmp_path, kind, expected):
    mounted(kind, tmp_path)
    assert in_memory(tmp_path) is expected
    assert in_memory(str(tmp_path)) is expected
    assert not in_memory(tmp_path / "missing")


def test_a_system_that_does_not_tell_is_believed_to_have_disks(mounted, tmp_path):
    assert not folders.MOUNTS.exists()
    assert not in_memory(tmp_path)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
def test_memory_shared_by_name_is_memory():
    assert in_memory("/dev/shm")


def test_what_is_offloaded_goes_to_a_disk_where_there_is_one(monkeypatch, tmp_path):
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(memory))
    monkeypatch.setattr(folders, "ELSEWHERE", disk)
    monkeypatch.setattr(folders, "in_memory", lambda folder: False)
    assert spill_folder() == memory
    monkeypatch.setattr(folders, "in_memory", lambda folder: folder == memory)
    assert spill_folder() == disk
    monkeypatch.setattr(folders, "in_memory", lambda folder: True)
    assert spill_folder() == memory
    disk.rmdir()
    monkeypatch.setattr(folders, "in_memory", lambda folder: folder == memory)
    assert spill_folder() == memory


def test_a_spill_folder_in_memory_is_told(mounted, tmp_path):
    mounted("tmpfs", tmp_path)
    with pytest.warns(UserWarning, match="the spill folder .* is in memory"):
        spill = Spill(tmp_path, None)
    spill.close()
