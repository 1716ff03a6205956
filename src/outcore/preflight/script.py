"""script: a Python script or module run as Python itself would, and what is said if memory ends."""

from __future__ import annotations

import _thread
import runpy
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from outcore.preflight.watch import Watch

OURS = (__file__, runpy.__file__, "<frozen runpy>")
FAILED = 1
LOOK_EVERY = 0.01
"""Seconds from one look at what the script does to the next, each of which takes microseconds."""


@dataclass(frozen=True, slots=True)
class Script:
    """What to run: a file, or a module by name."""

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def run(self) -> None:
        """Run it. Uncaught errors are shown as Python shows them, and end the process as there.

        Where memory ran out, what would fit is told besides.
        """
        sys.argv = [self.name, *self.arguments]
        self._set_path()
        with Looking() as looking:
            error = self._run()
        if error is None:
            return
        error.__traceback__ = _theirs(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            sys.excepthook = _silent
            raise error  # Python then ends by the signal, which tells a shell to stop too
        if looking.watch is not None:
            from outcore.preflight.out_of_memory import tell  # noqa: PLC0415 - loads torch

            tell(error, looking.watch)
        raise SystemExit(FAILED)

    def _run(self) -> BaseException | None:
        """What ended it, if that was an error. Raises SystemExit where the script does."""
        try:
            if self.is_module:
                runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(self.name, run_name="__main__")
        except SystemExit:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever ends a script
            return error
        return None

    def _set_path(self) -> None:
        """Import from where Python would: the folder of the script, or the working directory."""
        if not sys.flags.safe_path:
            first = Path.cwd() if self.is_module else Path(self.name).resolve().parent
            sys.path[0] = str(first)


@dataclass(slots=True)
class Looking:
    """A thread that looks, now and then, which module this one calls, once torch is there.

    It is none of `threading`'s: the script does not find it there.
    """

    watch: Watch | None = None
    _over: _thread.LockType = field(default_factory=_thread.allocate_lock)

    def __enter__(self) -> Self:
        self._over.acquire()
        _thread.start_new_thread(self._look, (_thread.get_ident(),))
        return self

    def __exit__(self, *_: object) -> None:
        self._over.release()

    def _look(self, thread: int) -> None:
        while not self._over.acquire(timeout=LOOK_EVERY):
            with suppress(Exception):  # nothing is to be heard of this thread
                if self.watch is None:
                    self.watch = _watch()
                else:
                    # A frame that has a name here holds its locals when it is over.
                    self.watch.look(sys._current_frames()[thread])  # noqa: SLF001 - no public one


def _watch() -> Watch | None:
    """Where torch is imported, wholly."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    if spec is None or getattr(spec, "_initializing", False):
        return None
    from outcore.preflight.watch import Watch  # noqa: PLC0415 - the script imports torch when it likes

    return Watch()


def _silent(*_: object) -> None:
    """Said already."""


def _theirs(found: TracebackType | None) -> TracebackType | None:
    """From the first line of the script on."""
    while found is not None and found.tb_frame.f_code.co_filename in OURS:
        found = found.tb_next
    return found
