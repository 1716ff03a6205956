"""script: run a Python script or module as Python does, and report if memory runs out."""

from __future__ import annotations

import _thread
import builtins
import runpy
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from pkgutil import get_importer
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from outcore.preflight.watch import CallWatch

OURS = (__file__, runpy.__file__, "<frozen runpy>")
FAILED = 1
LOOK_EVERY = 0.01
"""Seconds between two looks at what the script does; each look takes microseconds."""


@dataclass(frozen=True, slots=True)
class Script:
    """What to run: a file, or a module by name."""

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def run(self) -> None:
        """Run it. Uncaught errors are shown, and end the process, as in Python.

        If memory ran out, what would fit is shown after the error.
        """
        sys.argv = [self.name, *self.arguments]
        self._set_path()
        with WatchThread() as thread:
            error = self._run()
        if error is None:
            return
        error.__traceback__ = _theirs(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            sys.excepthook = _silent
            raise error  # Python then ends by the signal, so that a shell stops too
        if thread.watch is not None:
            from outcore.preflight.out_of_memory import tell  # noqa: PLC0415 - loads torch

            tell(error, thread.watch)
        raise SystemExit(FAILED)

    def _run(self) -> BaseException | None:
        """The error that ended it, or None. Raises SystemExit if the script does."""
        try:
            self._run_as_main()
        except SystemExit:
            raise
        except BaseException as error:  # noqa: BLE001 - anything may end a script
            return error
        return None

    def _run_as_main(self) -> None:
        """Run it in a new module `__main__`.

        That module stays afterwards, for threads and exit handlers that still need it, such as to
        pickle its classes. `runpy.run_path` and `run_module` would remove it.
        """
        main = sys.modules["__main__"] = ModuleType("__main__")
        vars(main)["__builtins__"] = builtins
        if self.is_module:
            runpy._run_module_as_main(self.name)  # type: ignore[attr-defined]  # noqa: SLF001 - what `python -m` calls
        elif self._is_folder:
            runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]  # noqa: SLF001 - as above
        else:
            path = str(Path(self.name).absolute())  # right also once the script changes the folder
            is_compiled = path.endswith(".pyc")
            loader = (SourcelessFileLoader if is_compiled else SourceFileLoader)("__main__", path)
            vars(main).update(__file__=path, __cached__=None, __loader__=loader)
            code = loader.get_code("__main__") if is_compiled else _compiled(path)
            exec(code, vars(main))  # type: ignore[arg-type]  # noqa: S102 - the user asks for it

    @property
    def _is_folder(self) -> bool:
        """Whether it is a folder or a zip file, with a module `__main__` inside."""
        return not self.is_module and get_importer(self.name) is not None

    def _set_path(self) -> None:
        """Set the first import folder as Python does: the script's, or the working directory."""
        folder = Path(self.name).absolute() if self._is_folder else Path(self.name).resolve().parent
        first = str(Path.cwd() if self.is_module else folder)
        if not sys.flags.safe_path:
            sys.path[0] = first
        elif self._is_folder:
            sys.path.insert(0, first)


@dataclass(slots=True)
class WatchThread:
    """A thread that looks regularly which module this thread is calling, once torch is imported.

    It is not a thread of `threading`, so the script does not see it there.
    """

    watch: CallWatch | None = None
    _over: _thread.LockType = field(default_factory=_thread.allocate_lock)

    def __enter__(self) -> Self:
        self._over.acquire()
        _thread.start_new_thread(self._look, (_thread.get_ident(),))
        return self

    def __exit__(self, *_: object) -> None:
        self._over.release()

    def _look(self, thread: int) -> None:
        while not self._over.acquire(timeout=LOOK_EVERY):
            with suppress(Exception):  # this thread must not disturb the script
                if self.watch is None:
                    self.watch = _watch()
                else:
                    # No variable for the frame: it would keep the frame's locals alive after the
                    # call ends.
                    self.watch.look(sys._current_frames()[thread])  # noqa: SLF001 - no public one


def _compiled(path: str) -> CodeType:
    """The code of a source file, which no cache is written for."""
    return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)


def _watch() -> CallWatch | None:
    """A CallWatch, once torch is imported completely; else None."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    if spec is None or getattr(spec, "_initializing", False):
        return None
    from outcore.preflight.watch import CallWatch  # noqa: PLC0415 - the script decides when torch is imported

    return CallWatch()


def _silent(*_: object) -> None:
    """Show nothing: the error has been shown already."""


def _theirs(found: TracebackType | None) -> TracebackType | None:
    """The traceback from the first line of the script on."""
    while found is not None and found.tb_frame.f_code.co_filename in OURS:
        found = found.tb_next
    return found
