"""SpillFile: bytes come back, room is accounted for, nothing is left behind."""

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import time
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.errors import SpillError
from outcore.execute import disk
from outcore.execute.disk import FILE_BLOCK_BYTES, MEMORY_ALIGNMENT_BYTES, SpillFile
from outcore.execute.link import Barrier, FileRoom, Spill

CHUNK = 2 * FILE_BLOCK_BYTES
SIZES = st.one_of(st.integers(0, 3 * MEMORY_ALIGNMENT_BYTES), st.integers(0, 6 * FILE_BLOCK_BYTES))


class Memory:
    """Bytes at an address with a chosen offset in its page."""

    def __init__(self, nbytes: int, residue: int, content: bytes = b"") -> None:
        self.map = mmap.mmap(-1, nbytes + 2 * mmap.PAGESIZE)
        self.view = memoryview(self.map)[residue : residue + nbytes]
        self.view[: len(content)] = content
        whole = ctypes.c_char.from_buffer(self.map)
        self.address = ctypes.addressof(whole) + residue


@pytest.fixture(scope="module")
def spill(tmp_path_factory):
    file = SpillFile(tmp_path_factory.mktemp("spill"))
    yield file
    file.close()


def write(file: SpillFile, memory: Memory, offset: int, bounce: memoryview) -> list[int]:
    return list(file.write(memory.address, len(memory.view), offset, bounce, CHUNK))


def read(file: SpillFile, memory: Memory, offset: int, bounce: memoryview) -> list[int]:
    return list(file.read(memory.address, len(memory.view), offset, bounce, CHUNK))


@given(address=st.integers(0, 1 << 20), nbytes=SIZES)
def test_cut_covers_everything_and_the_body_is_aligned(address, nbytes):
    parts = disk.cut(address, nbytes)
    assert sum(parts) == nbytes
    assert min(parts) >= 0
    assert parts.head < MEMORY_ALIGNMENT_BYTES
    assert parts.tail < FILE_BLOCK_BYTES
    assert parts.body % FILE_BLOCK_BYTES == 0
    assert not parts.body or (address + parts.head) % MEMORY_ALIGNMENT_BYTES == 0
    file_bytes = parts.body + disk.region_nbytes(parts.tail + parts.head)
    assert file_bytes == disk.region_nbytes(nbytes)


@pytest.mark.parametrize("buffered", [False, True])
@given(
    nbytes=SIZES,
    residue=st.integers(0, MEMORY_ALIGNMENT_BYTES - 1),
    seed=st.integers(0, 255),
)
def test_what_is_written_is_read(spill, buffered, nbytes, residue, seed):
    content = bytes((seed + i * 7 + i // 251) % 256 for i in range(nbytes))
    room = disk.region_nbytes(nbytes)
    offset = spill.take(room + FILE_BLOCK_BYTES)
    neighbor = Memory(FILE_BLOCK_BYTES, 0, b"n" * FILE_BLOCK_BYTES)
    bounce = disk.new_bounce()
    flags = fcntl.fcntl(spill.fd, fcntl.F_GETFL)
    if buffered:
        fcntl.fcntl(spill.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    try:
        write(spill, neighbor, offset + room, bounce)
        moved = write(spill, Memory(nbytes, residue, content), offset, bounce)
        back = Memory(nbytes, residue)
        assert read(spill, back, offset, disk.new_bounce()) == moved
        assert back.view == content
        assert all(chunk <= CHUNK for chunk in moved)
        assert sum(moved) == room
        untouched = Memory(FILE_BLOCK_BYTES, 0)
        read(spill, untouched, offset + room, bounce)
        assert untouched.view == neighbor.view
    finally:
        fcntl.fcntl(spill.fd, fcntl.F_SETFL, flags)
        spill.give(offset, room + FILE_BLOCK_BYTES)


def test_a_file_system_without_direct_io_is_buffered(tmp_path, monkeypatch):
    real = os.pwritev

    def refuse(fd, views, offset):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", refuse)
    file = SpillFile(tmp_path)
    assert not file.direct
    offset, bounce = file.take(2 * FILE_BLOCK_BYTES), disk.new_bounce()
    content, back = Memory(5000, 64, b"abc" * 1000), Memory(5000, 64)
    write(file, content, offset, bounce)
    read(file, back, offset, bounce)
    assert back.view == content.view
    file.close()


def test_the_kernel_may_move_less_than_asked(tmp_path, monkeypatch):
    pwritev, preadv = os.pwritev, os.preadv
    block = FILE_BLOCK_BYTES
    monkeypatch.setattr(os, "pwritev", lambda fd, v, o: pwritev(fd, [v[0][:block]], o))
    monkeypatch.setattr(os, "preadv", lambda fd, v, o: preadv(fd, [v[0][:block]], o))
    file = SpillFile(tmp_path)
    content, back = Memory(20000, 64, bytes(range(250)) * 80), Memory(20000, 64)
    offset, bounce = file.take(disk.region_nbytes(20000)), disk.new_bounce()
    write(file, content, offset, bounce)
    read(file, back, offset, bounce)
    assert back.view == content.view
    file.close()


def test_the_end_of_the_file_is_an_error(tmp_path):
    file = SpillFile(tmp_path)
    with pytest.raises(OSError, match="no progress at file offset 1048576"):
        read(file, Memory(FILE_BLOCK_BYTES, 0), 1 << 20, disk.new_bounce())
    file.close()


def test_the_file_is_private_and_has_no_name(tmp_path):
    file = SpillFile(tmp_path)
    status = os.fstat(file.fd)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert list(tmp_path.iterdir()) == []
    assert not os.get_inheritable(file.fd)
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file.fd)


def test_space_is_taken_before_it_is_needed(tmp_path):
    file = SpillFile(tmp_path)
    file.take(1 << 20)
    status = os.fstat(file.fd)
    assert status.st_size == file.nbytes == 1 << 20
    assert status.st_blocks * 512 >= 1 << 20
    file.close()


def test_room_is_reused_merged_and_grown(tmp_path):
    file = SpillFile(tmp_path)
    a, b, c = (file.take(n * FILE_BLOCK_BYTES) for n in (1, 2, 3))
    assert (a, b, c) == (0, 1 * FILE_BLOCK_BYTES, 3 * FILE_BLOCK_BYTES)
    file.give(b, 2 * FILE_BLOCK_BYTES)
    assert file.take_free(3 * FILE_BLOCK_BYTES) is None
    file.give(a, FILE_BLOCK_BYTES)
    assert file.take_free(3 * FILE_BLOCK_BYTES) == 0
    file.give(c, 3 * FILE_BLOCK_BYTES)
    assert file.take(5 * FILE_BLOCK_BYTES) == c  # the end of the file is free: it grows by two
    assert file.nbytes == 8 * FILE_BLOCK_BYTES
    file.close()


@given(data=st.data())
def test_rooms_never_overlap(spill, data):
    held: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        if held and data.draw(st.booleans()):
            offset = data.draw(st.sampled_from(sorted(held)))
            spill.give(offset, held.pop(offset))
        else:
            nbytes = data.draw(st.integers(1, 4)) * FILE_BLOCK_BYTES
            offset = spill.take(nbytes)
            assert all(offset + nbytes <= o or offset >= o + n for o, n in held.items())
            assert offset + nbytes <= spill.nbytes
            held[offset] = nbytes
    for offset, nbytes in held.items():
        spill.give(offset, nbytes)


def test_a_full_disk_is_told_with_numbers(tmp_path, monkeypatch):
    file = SpillFile(tmp_path)
    held = file.take(FILE_BLOCK_BYTES)
    monkeypatch.setattr(SpillFile, "free_bytes", lambda self: 3 << 20)
    with pytest.raises(SpillError, match="too little disk space") as caught:
        file.take(1 << 30)
    assert caught.value.needed_bytes == 1 << 30
    assert caught.value.free_bytes == 3 << 20
    assert caught.value.directory == str(tmp_path)
    assert "spill_dir" in str(caught.value)
    assert file.nbytes == FILE_BLOCK_BYTES
    file.give(held, FILE_BLOCK_BYTES)
    assert file.take_free(FILE_BLOCK_BYTES) == held
    file.close()


def test_space_that_is_refused_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    file = SpillFile(tmp_path)
    file.take(FILE_BLOCK_BYTES)
    real = os.posix_fallocate

    def fill_up(fd, offset, nbytes):
        real(fd, offset, nbytes // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fill_up)
    with pytest.raises(SpillError, match="No space left on device") as caught:
        file.take(1 << 20)
    assert caught.value.needed_bytes == 1 << 20
    assert caught.value.free_bytes is not None
    assert isinstance(caught.value.__cause__, OSError)
    assert os.fstat(file.fd).st_size == FILE_BLOCK_BYTES
    monkeypatch.undo()
    assert file.take(1 << 20) == FILE_BLOCK_BYTES
    file.close()


def test_a_limit_of_a_users_files_is_told(tmp_path, monkeypatch):
    """As free space does not show it, plans count on more."""
    file = SpillFile(tmp_path)

    def refuse(fd, offset, nbytes):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(SpillError, match="quota exceeded, a limit that a disk_budget must respect"):
        file.take(1 << 20)
    file.close()


def test_a_file_system_that_cannot_reserve_space_is_written_to(tmp_path, monkeypatch):
    """The C library then writes single bytes, which is refused without the page cache."""
    file, real, direct = SpillFile(tmp_path), os.posix_fallocate, []

    def written(fd, offset, nbytes):
        direct.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        if direct[-1]:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", written)
    assert file.take(1 << 20) == 0
    assert os.fstat(file.fd).st_size == 1 << 20
    assert direct == ([True, False] if file.direct else [False])
    assert bool(fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_DIRECT) == file.direct
    file.close()


def test_a_disk_without_one_free_block_is_told(tmp_path, monkeypatch):
    def full(fd, views, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(SpillError, match="too little disk space"):
        SpillFile(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_missing_or_no_directory_is_told(tmp_path):
    with pytest.raises(SpillError, match="No such file or directory") as caught:
        SpillFile(tmp_path / "absent")
    assert caught.value.directory == str(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(SpillError, match="Not a directory"):
        SpillFile(tmp_path / "file")


def test_an_unwritable_directory_is_told(tmp_path, monkeypatch):
    # Not by chmod: tests may run as root, which chmod does not stop.
    def refuse(**arguments):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    with pytest.raises(SpillError, match="Permission denied"):
        SpillFile(tmp_path)


def test_the_default_directory_is_that_for_temporary_files(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = SpillFile()
    assert Path(file.directory) == tmp_path
    file.close()


def test_space_is_given_back_although_a_forked_process_has_the_file_open(tmp_path):
    """Such as a worker that loads data; it closes its own file without a change to this one."""
    file = SpillFile(tmp_path)
    file.take(1 << 20)
    same = os.dup(file.fd)
    process = os.fork()
    if not process:
        file.close()
        os._exit(0)
    os.waitpid(process, 0)
    assert os.fstat(same).st_size == 1 << 20
    file.close()
    assert not os.fstat(same).st_size
    os.close(same)


def test_a_file_dies_with_its_last_reference(tmp_path):
    file = SpillFile(tmp_path)
    fd = file.fd
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_room_that_is_given_back_late_is_waited_for_if_the_file_may_not_grow(tmp_path):
    """Else a small lane would take the place of a large one that comes after it."""
    spill = Spill(tmp_path, None)
    blocks = [2, 3, 5]
    spill.file.budget_bytes = sum(blocks) * FILE_BLOCK_BYTES
    for _ in range(2):
        rooms = []
        for number in blocks:
            nbytes = number * FILE_BLOCK_BYTES
            rooms.append(FileRoom(spill, {}, spill.take(nbytes), nbytes))
        small, *large = rooms
        for room in large:
            room.close()
        spill.drain()
        spill.out.put(Barrier(partial(time.sleep, 0.1)))
        small.close()
    assert spill.file.nbytes == spill.file.budget_bytes
    spill.close()


def test_the_file_stays_within_its_budget(tmp_path):
    file = SpillFile(tmp_path)
    file.budget_bytes = 3 * FILE_BLOCK_BYTES
    first = file.take(FILE_BLOCK_BYTES)
    file.take(FILE_BLOCK_BYTES)
    said = (
        r"disk_budget is used up: 8\.00 KiB needed, 4\.00 KiB of 12\.0 KiB free; raise disk_budget"
    )
    with pytest.raises(SpillError, match=said):
        file.take(2 * FILE_BLOCK_BYTES)
    file.give(first, FILE_BLOCK_BYTES)
    assert file.take(FILE_BLOCK_BYTES) == first
    file.take(FILE_BLOCK_BYTES)
    assert file.nbytes == file.budget_bytes
    file.close()
