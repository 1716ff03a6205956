"""lazy: names of a package that are loaded when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping


def lazily(
    package: str, names: Mapping[str, Collection[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of `package`. `names`: module -> those loaded from it."""
    homes = {name: module for module, found in names.items() for name in found}
    loaded = vars(sys.modules[package])

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(homes[name]), name)
        loaded[name] = value
        return value

    def listed() -> list[str]:
        return sorted({*loaded, *loaded["__all__"]})

    return load, listed
