"""disk: a private file as a memory tier, read and written without the page cache.

The file knows addresses and offsets, not tensors. If the file system supports O_DIRECT, bytes move
between memory and the disk without a copy in between. Addresses, offsets and lengths must then be
aligned, and storages are not. So a storage is cut into three parts. The body consists of whole
blocks, begins at the first aligned address, and is moved from where it is. The head and the tail,
together little more than a block, pass through an aligned buffer. In the file, the tail and the
head follow the body.

To read the body back the same way, the target memory must be as far from an aligned address as the
memory that was written.
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
"""Direct I/O needs memory at multiples of this. Kernels before 6.0 require the disk's block size,
which is 4096 on some disks. The file is then buffered."""

FILE_BLOCK_BYTES = 4096
"""Offsets and lengths in the file are multiples of this. It is a multiple of every common block
size, so offsets can be planned before the disk is known."""

LIMITED = frozenset({errno.EDQUOT, errno.EFBIG})
"""Errors of limits that free space does not show: of a user's files together, and of each file."""

_WRITABLE = 0x200
"""PyBUF_WRITE of CPython's buffer interface."""

_memory = ctypes.pythonapi.PyMemoryView_FromMemory
"""Makes a memoryview of an address and a size."""
_memory.restype = ctypes.py_object
_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)

_Views: TypeAlias = list[memoryview]
_Call: TypeAlias = Callable[[int, _Views, int], int]


def region_nbytes(nbytes: int) -> int:
    """Bytes of the file that a storage of `nbytes` needs, at any memory address."""
    return -(-nbytes // FILE_BLOCK_BYTES) * FILE_BLOCK_BYTES


class Cut(NamedTuple):
    """Bytes of a storage's three parts: before the aligned body, the body, after it."""

    head: int
    body: int
    tail: int


def cut(address: int, nbytes: int) -> Cut:
    """Cut `nbytes` at `address`; the body is aligned in memory and a whole number of blocks."""
    head = min(-address % MEMORY_ALIGNMENT_BYTES, nbytes)
    tail = (nbytes - head) % FILE_BLOCK_BYTES
    return Cut(head, nbytes - head - tail, tail)


def new_bounce() -> memoryview:
    """Make an aligned buffer for the head and the tail of one storage.

    Each worker thread has one.
    """
    return memoryview(mmap.mmap(-1, 2 * FILE_BLOCK_BYTES))


class SpillFile:
    """A private file in `directory`: mode 0600, without a name, gone when closed.

    Raises `SpillError` if the directory is missing or cannot be written.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.directory = os.fspath(spill_folder() if directory is None else directory)
        self.nbytes = 0
        """Size of the file: all disk space taken so far."""
        self.budget_bytes: int | None = None
        """The largest size of the file; None: no limit."""
        self.written_bytes = 0
        """Bytes that `write` has moved so far."""
        self._free: list[tuple[int, int]] = []
        """Ranges (start, stop) that are free, ascending, neighbors merged."""
        self._lock = threading.Lock()
        try:
            self.fd, path = tempfile.mkstemp(prefix="outcore-", suffix=".spill", dir=self.directory)
        except OSError as error:
            raise self.error(f"cannot create the spill file: {words(error)}") from error
        # Without a name the file cannot outlive the process, however the process ends.
        os.unlink(path)  # noqa: PTH108 - directory may be given as text
        self._close = weakref.finalize(self, _close, self.fd, os.getpid())
        self.direct = self._go_direct()
        """Whether the page cache is bypassed."""

    def error(self, reason: str, needed_bytes: int | None = None) -> SpillError:
        """Make a `SpillError` about this file; with `needed_bytes`, it says what is free, too."""
        free = None if needed_bytes is None else self.free_bytes()
        return SpillError(
            directory=self.directory, reason=reason, needed_bytes=needed_bytes, free_bytes=free
        )

    def free_bytes(self) -> int:
        """Bytes that the file system has left for this user."""
        status = os.fstatvfs(self.fd)
        return status.f_bavail * status.f_frsize

    def may_grow(self, nbytes: int) -> bool:
        """Whether the budget allows so much more."""
        return self.budget_bytes is None or self.nbytes + nbytes <= self.budget_bytes

    def take(self, nbytes: int) -> int:
        """Take `nbytes` and return their offset: freed space if it suffices, else new space.

        If the disk is full or the budget used up, raises `SpillError` and leaves the file alone.
        """
        with self._lock:
            offset = self._take_free(nbytes)
            if offset is not None:
                return offset
            self._grow(nbytes)
            return self._free.pop()[0]

    def take_free(self, nbytes: int) -> int | None:
        """Do as `take`, but return None if the freed space does not suffice."""
        with self._lock:
            return self._take_free(nbytes)

    def give(self, offset: int, nbytes: int) -> None:
        """Free what `take` took."""
        with self._lock:
            self._give(offset, offset + nbytes)

    def write(
        self, address: int, nbytes: int, offset: int, bounce: memoryview, chunk_bytes: int
    ) -> Iterator[int]:
        """Write `nbytes` of memory at `address` to `offset`, and yield the size of each chunk.

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
        """Read to `address` what `write` put at `offset`, and yield the size of each chunk.

        `address` must equal the address that was written, modulo `MEMORY_ALIGNMENT_BYTES`. Raises
        OSError.
        """
        parts = cut(address, nbytes)
        edges = parts.tail + parts.head
        views = [_view(address + parts.head, parts.body), bounce[: region_nbytes(edges)]]
        yield from self._move(os.preadv, views, offset, chunk_bytes)
        _view(address + nbytes - parts.tail, parts.tail)[:] = bounce[: parts.tail]
        _view(address, parts.head)[:] = bounce[parts.tail : edges]

    def close(self) -> None:
        """Release the disk space. No copy may be in progress. May be called more than once."""
        self._close()

    def _take_free(self, nbytes: int) -> int | None:
        """Do as `take_free`, with the lock held."""
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= nbytes:
                rest = (start + nbytes, stop)
                self._free[index : index + 1] = [rest] if rest[0] < stop else []
                return start
        return None

    def _grow(self, nbytes: int) -> None:
        """Take more disk space, until the last free range has `nbytes`."""
        end = self.nbytes
        start, stop = self._free[-1] if self._free else (end, end)
        more = nbytes - (end - start if stop == end else 0)
        if more > self.free_bytes():
            raise self.error("too little disk space", more)
        if self.budget_bytes is not None and not self.may_grow(more):
            raise SpillError(
                directory=self.directory,
                reason="disk_budget is used up",
                needed_bytes=more,
                free_bytes=self.budget_bytes - end,
                budget_bytes=self.budget_bytes,
            )
        try:
            self._allocate(end, more)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, end)
            limit = ", a limit that a disk_budget must respect" if error.errno in LIMITED else ""
            reason = f"cannot reserve disk space: {words(error)}{limit}"
            raise self.error(reason, more) from error
        self.nbytes = end + more
        self._give(end, self.nbytes)

    def _allocate(self, start: int, nbytes: int) -> None:
        """Take disk space from `start` on. Raises OSError.

        Where a file system has no call for it, the C library writes a byte into each block, which
        only the page cache takes.
        """
        try:
            os.posix_fallocate(self.fd, start, nbytes)
        except OSError as error:
            if not self.direct or error.errno != errno.EINVAL:
                raise
            flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            try:
                os.posix_fallocate(self.fd, start, nbytes)
            finally:
                fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)

    def _give(self, start: int, stop: int) -> None:
        """Add a range to the free ones, and merge neighbors."""
        insort(self._free, (start, stop))
        merged: list[tuple[int, int]] = []
        for low, high in self._free:
            if merged and merged[-1][1] == low:
                merged[-1] = (merged[-1][0], high)
            else:
                merged.append((low, high))
        self._free = merged

    def _move(self, call: _Call, views: _Views, offset: int, chunk_bytes: int) -> Iterator[int]:
        """Move `views` from or to `offset` chunk by chunk, and yield the size of each."""
        start = offset
        for chunk in _chunks(views, chunk_bytes):
            moved = _move_all(call, self.fd, chunk, offset)
            offset += moved
            yield moved
        if not self.direct:
            # Spilled bytes are read once, much later. In the page cache they would only take up
            # RAM.
            os.posix_fadvise(self.fd, start, offset - start, os.POSIX_FADV_DONTNEED)

    def _go_direct(self) -> bool:
        """Bypass the page cache from now on, if a trial write with our alignment succeeds."""
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


def _close(fd: int, pid: int) -> None:
    """Close the file that the process `pid` made, and give its space back.

    Forked processes, such as workers that load data, have the file open, too.
    """
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
    os.close(fd)


def words(error: BaseException) -> str:
    """The message of an operating system error, without the numbers and names around it."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or repr(error)


def _view(address: int, nbytes: int) -> memoryview:
    """A memoryview of memory at an address."""
    # It owns nothing. The code that requests a copy keeps the memory alive until the copy is done.
    view: memoryview = _memory(address, nbytes, _WRITABLE)
    return view


def _chunks(views: _Views, chunk_bytes: int) -> Iterator[_Views]:
    """Group the bytes of `views` into lists of at most `chunk_bytes`, in order."""
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
    """Call until all of `views` is moved, and return the byte count: the kernel may stop early."""
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
