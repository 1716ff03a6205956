"""The disk as a memory tier: one private file, read and written past the page cache.

The file knows addresses and offsets, not tensors. Where the file system takes it, bytes go from
memory to the disk with no copy in between (O_DIRECT), for which addresses, offsets and lengths must
be aligned. Storages are not, so a storage is cut in three. The body, of whole blocks, begins at the
first aligned address and is moved from where it lies; head and tail, together little more than a
block, pass through an aligned buffer. In the file, the body is followed by tail and head.

For the body to come back the same way, memory to read into must lie as far from an aligned address
as the memory that was written.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
import threading
import weakref
from bisect import insort
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from outcore.errors import SpillError
from outcore.execute.folders import spill_folder

MEMORY_ALIGNMENT_BYTES = 512
"""Direct I/O needs memory at multiples of this. Kernels before 6.0 ask for the disk's block size,
which is 4096 on some disks; the file is then buffered."""

FILE_BLOCK_BYTES = 4096
"""Offsets and lengths in the file are multiples of this: a multiple of every common block size, so
that offsets can be planned before the disk is known."""

_WRITABLE = 0x200
"""PyBUF_WRITE of CPython's buffer interface."""

_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.restype = ctypes.py_object
_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)

_Views: TypeAlias = list[memoryview]
_Call: TypeAlias = Callable[[int, _Views, int], int]


def region_nbytes(nbytes: int) -> int:
    """Bytes of the file that a storage of `nbytes` takes, wherever in memory it lies."""
    return -(-nbytes // FILE_BLOCK_BYTES) * FILE_BLOCK_BYTES


class Cut(NamedTuple):
    """A storage in three, in bytes: what precedes the aligned body, the body, what follows it."""

    head: int
    body: int
    tail: int


def cut(address: int, nbytes: int) -> Cut:
    """Cut `nbytes` at `address` so that the body is aligned in memory and of whole file blocks."""
    head = min(-address % MEMORY_ALIGNMENT_BYTES, nbytes)
    tail = (nbytes - head) % FILE_BLOCK_BYTES
    return Cut(head, nbytes - head - tail, tail)


def new_bounce() -> memoryview:
    """An aligned buffer for the head and the tail of one storage. One per worker thread."""
    return memoryview(mmap.mmap(-1, 2 * FILE_BLOCK_BYTES))


class SpillFile:
    """A private file in `directory`: mode 0600, without a name, gone when closed.

    `direct` tells whether the page cache is bypassed. Raises `SpillError` where the directory is
    missing or cannot be written.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.directory = os.fspath(spill_folder() if directory is None else directory)
        self.nbytes = 0
        self.written_bytes = 0
        """What `write` has moved so far."""
        self._free: list[tuple[int, int]] = []
        """Ranges (start, stop) that nobody holds, ascending, neighbours merged."""
        self._lock = threading.Lock()
        try:
            self.fd, path = tempfile.mkstemp(prefix="outcore-", suffix=".spill", dir=self.directory)
        except OSError as error:
            raise self.error(f"cannot create the spill file: {words(error)}") from error
        # Without a name the file cannot outlive the process, however that ends.
        os.unlink(path)  # noqa: PTH108 - directory may be given as text
        self._close = weakref.finalize(self, os.close, self.fd)
        self.direct = self._go_direct()

    def error(self, reason: str, needed_bytes: int | None = None) -> SpillError:
        """A `SpillError` about this file; with `needed_bytes`, also what is free."""
        free = None if needed_bytes is None else self.free_bytes()
        return SpillError(
            directory=self.directory, reason=reason, needed_bytes=needed_bytes, free_bytes=free
        )

    def free_bytes(self) -> int:
        """What the file system has left for this user."""
        status = os.fstatvfs(self.fd)
        return status.f_bavail * status.f_frsize

    def take(self, nbytes: int) -> int:
        """The offset of `nbytes` that nobody holds: what was given back, else more of the disk.

        Raises `SpillError`, and leaves the file as it was, where the disk is full.
        """
        with self._lock:
            offset = self._take_free(nbytes)
            if offset is not None:
                return offset
            self._grow(nbytes)
            return self._free.pop()[0]

    def take_free(self, nbytes: int) -> int | None:
        """As `take`, but None where what was given back does not suffice."""
        with self._lock:
            return self._take_free(nbytes)

    def give(self, offset: int, nbytes: int) -> None:
        """Take back what `take` gave."""
        with self._lock:
            self._give(offset, offset + nbytes)

    def write(
        self, address: int, nbytes: int, offset: int, bounce: memoryview, chunk_bytes: int
    ) -> Iterator[int]:
        """Write `nbytes` of memory at `address` to `offset`, and yield the bytes of each chunk.

        `offset` and `chunk_bytes` are multiples of `FILE_BLOCK_BYTES`. Raises OSError.
        """
        parts = cut(address, nbytes)
        edges = parts.tail + parts.head
        bounce[: parts.tail] = _view(address + nbytes - parts.tail, parts.tail)
        bounce[parts.tail : edges] = _view(address, parts.head)
        views = [_view(address + parts.head, parts.body), bounce[: region_nbytes(edges)]]
        for moved in self._move(os.pwritev, views, offset, chunk_bytes):
            self.written_bytes += moved
            yield moved

    def read(
        self, address: int, nbytes: int, offset: int, bounce: memoryview, chunk_bytes: int
    ) -> Iterator[int]:
        """Read to memory at `address` what `write` put at `offset`, chunk by chunk as there.

        `address` must be that of the memory written, modulo `MEMORY_ALIGNMENT_BYTES`. Raises
        OSError.
        """
        parts = cut(address, nbytes)
        edges = parts.tail + parts.head
        views = [_view(address + parts.head, parts.body), bounce[: region_nbytes(edges)]]
        yield from self._move(os.preadv, views, offset, chunk_bytes)
        _view(address + nbytes - parts.tail, parts.tail)[:] = bounce[: parts.tail]
        _view(address, parts.head)[:] = bounce[parts.tail : edges]

    def close(self) -> None:
        """Give the disk space back. No copy may be under way; more than once is fine."""
        self._close()

    def _take_free(self, nbytes: int) -> int | None:
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= nbytes:
                rest = (start + nbytes, stop)
                self._free[index : index + 1] = [rest] if rest[0] < stop else []
                return start
        return None

    def _grow(self, nbytes: int) -> None:
        """Take as much more of the disk as makes the last free range one of `nbytes`."""
        end = self.nbytes
        start, stop = self._free[-1] if self._free else (end, end)
        more = nbytes - (end - start if stop == end else 0)
        if more > self.free_bytes():
            raise self.error("too little disk space", more)
        try:
            os.posix_fallocate(self.fd, end, more)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, end)
            raise self.error(f"cannot take disk space: {words(error)}", more) from error
        self.nbytes = end + more
        self._give(end, self.nbytes)

    def _give(self, start: int, stop: int) -> None:
        insort(self._free, (start, stop))
        merged: list[tuple[int, int]] = []
        for low, high in self._free:
            if merged and merged[-1][1] == low:
                merged[-1] = (merged[-1][0], high)
            else:
                merged.append((low, high))
        self._free = merged

    def _move(self, call: _Call, views: _Views, offset: int, chunk_bytes: int) -> Iterator[int]:
        start = offset
        for chunk in _chunks(views, chunk_bytes):
            moved = _move_all(call, self.fd, chunk, offset)
            offset += moved
            yield moved
        if not self.direct:
            # What is spilled is read once, much later: in the page cache it would only take RAM.
            os.posix_fadvise(self.fd, start, offset - start, os.POSIX_FADV_DONTNEED)

    def _go_direct(self) -> bool:
        """Bypass the page cache from now on if a write, aligned as ours will be, goes through."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        block = new_bounce()[MEMORY_ALIGNMENT_BYTES:][:FILE_BLOCK_BYTES]
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            _move_all(os.pwritev, self.fd, [block], 0)
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise self.error("too little disk space", FILE_BLOCK_BYTES) from error
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)
            return False
        return True


def words(error: BaseException) -> str:
    """What an operating system error says, without the numbers and names around it."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or repr(error)


def _view(address: int, nbytes: int) -> memoryview:
    # Owns nothing: whoever asks for a copy keeps the memory alive until it is done.
    view: memoryview = _memory(address, nbytes, _WRITABLE)
    return view


def _chunks(views: _Views, chunk_bytes: int) -> Iterator[_Views]:
    """Group the bytes of `views` in lists of at most `chunk_bytes`, in order."""
    chunk: _Views = []
    room = chunk_bytes
    for view in views:
        start = 0
        while start < len(view):
            piece = view[start : start + room]
            chunk.append(piece)
            start, room = start + len(piece), room - len(piece)
            if not room:
                yield chunk
                chunk, room = [], chunk_bytes
    if chunk:
        yield chunk


def _move_all(call: _Call, fd: int, views: _Views, offset: int) -> int:
    """Call until all of `views` is moved, and return their bytes: the kernel may stop early."""
    total = 0
    while views:
        moved = call(fd, views, offset + total)
        if not moved:
            raise OSError(errno.EIO, f"no progress at file offset {offset + total}")
        total += moved
        while views and moved >= len(views[0]):
            moved -= len(views[0])
            views = views[1:]
        if moved:
            views = [views[0][moved:], *views[1:]]
    return total
