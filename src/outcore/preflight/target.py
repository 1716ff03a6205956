"""target: find `path/to/script.py:function` or `package.module:function`, and make its Step."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from outcore.errors import TargetError, did_you_mean
from outcore.preflight.lines import line_of
from outcore.preflight.step import Step

FORM = "write path/to/script.py:function or package.module:function"
CONTRACT = (
    "let it return (model, inputs), (model, inputs, loss_fn) or (function, inputs): inputs are a "
    "tuple of arguments, a dict of keyword arguments, or one tensor; loss_fn takes what the model "
    "returns"
)
PAIR, TRIPLE = 2, 3


@contextmanager
def own_arguments(target: str) -> Iterator[None]:
    """Set `sys.argv` as if the target's file ran without arguments, and restore it after."""
    before = sys.argv
    sys.argv = [target.rpartition(":")[0]]
    try:
        yield
    finally:
        sys.argv = before


def find(target: str) -> Callable[[], Any]:
    """The function that a target names, after importing its module.

    Raises TargetError if there is no such function, or if the import fails.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise TargetError(target=target, reason="it names no function", advice=FORM)
    if Path(place).is_dir() and Path(place).name != place:
        raise TargetError(target=target, reason=f"{place} is a folder", advice=FORM)
    try:
        module = _script(target, Path(place)) if place.endswith(".py") else _module(place)
    except TargetError:
        raise
    except SystemExit as error:
        advice = 'put code that runs on import under if __name__ == "__main__":'
        reason = f"importing it ends this process (exit code {error.code})"
        raise TargetError(
            target=target, reason=reason, where=line_of(error), advice=advice
        ) from error
    except Exception as error:
        reason = f"importing it raises {type(error).__name__}: {error}"
        raise TargetError(target=target, reason=reason, where=line_of(error)) from error
    found = getattr(module, name, None)
    if not callable(found):
        functions = [each for each, value in vars(module).items() if callable(value)]
        reason = f"there is no function {name!r}" if found is None else f"{name} is not a function"
        raise TargetError(target=target, reason=reason, advice=did_you_mean(name, functions))
    function: Callable[[], Any] = found
    return function


def make_step(target: str, returned: Any) -> Step:
    """The step that a function returned. Raises TargetError if it returned something else."""
    if isinstance(returned, Coroutine):
        returned.close()  # or Python warns that nothing awaited it
    if not (isinstance(returned, tuple | list) and len(returned) in (PAIR, TRIPLE)):
        reason = f"it returns {_kind(returned)}"
        raise TargetError(target=target, reason=reason, advice=CONTRACT)
    call, inputs, *rest = returned
    loss = rest[0] if rest else None
    for what, each in (("first", call), ("third", loss)):
        if each is not None and not callable(each):
            reason = f"the {what} value that it returns is {_kind(each)}, not a function or a model"
            raise TargetError(target=target, reason=reason, advice=CONTRACT)
    if isinstance(inputs, Mapping):
        return Step(call, (), dict(inputs), loss)
    return Step(call, tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}, loss)


def _kind(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a {type(value).__name__} of {len(value)}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def _script(target: str, path: Path) -> ModuleType:
    """Import a file as a module, with the import path that Python would use to run it."""
    if not path.is_file():
        raise TargetError(target=target, reason=f"there is no file {path}", advice=FORM)
    name = path.stem if path.stem not in sys.modules else f"_{path.stem}"
    spec = spec_from_file_location(name, path.resolve())
    assert spec is not None  # noqa: S101 - its name ends in .py
    assert spec.loader is not None  # noqa: S101 - as above
    sys.path.insert(0, str(path.resolve().parent))
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _module(name: str) -> ModuleType:
    """Import a module by name, also from the working directory, as `python -m` does."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)
