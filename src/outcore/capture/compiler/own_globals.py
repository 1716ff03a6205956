"""own_globals: keep dynamo from reading a function's globals in another module of the same name.

Before torch 2.14 it looks for the globals of functions that it inlines in `sys.modules`, by the
name of their module. A wrapped model's `forward` is inlined. What lies there under that name may be
another module, such as a second `model.py`, a notebook in which a script was run, or nothing. Then
graphs would have the values of other variables, and would not be made again when the right ones
change.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch._dynamo import symbolic_convert
from torch._dynamo.exc import unimplemented
from torch._dynamo.symbolic_convert import InliningInstructionTranslator

FIXED = hasattr(symbolic_convert, "_registered_module_for_globals")
"""Whether torch finds the right globals by itself."""

_here = threading.local()
_MISSING = object()


@contextmanager
def own_globals() -> Iterator[None]:
    """Context in which dynamo inlines no function whose globals it would read elsewhere.

    Graphs end at a call of such a function, and others begin inside it: there, dynamo reads the
    function's own globals.
    """
    if not FIXED:
        _patch()
    before, _here.wanted = getattr(_here, "wanted", False), True
    try:
        yield
    finally:
        _here.wanted = before


def is_elsewhere(namespace: dict[str, Any], name: str) -> bool:
    """Whether dynamo would read the global `name` of a function in another module.

    `namespace`: the function's globals. An object that replaced a module in `sys.modules`, and gets
    its attributes from there, is no other module.
    """
    module_name = namespace.get("__name__")
    if not isinstance(module_name, str) or module_name.startswith("namedtuple_"):
        return False  # dynamo reads such globals where they are
    if "torch_package" in module_name:
        return False  # they are in no `sys.modules`
    module = sys.modules.get(module_name)
    there = getattr(module, "__dict__", {})
    if there is namespace:
        return False
    value = namespace.get(name, _MISSING)
    return name in there or value is _MISSING or getattr(module, name, _MISSING) is not value


@cache
def _patch() -> None:
    kind: Any = InliningInstructionTranslator
    plain = kind.get_globals_source_and_value

    def found(self: Any, name: str) -> Any:
        if getattr(_here, "wanted", False) and is_elsewhere(self.f_globals, name):
            module = self.f_globals["__name__"]
            unimplemented(
                gb_type="Globals in no module of sys.modules",
                context=f"{module}.{name}",
                explanation=f"sys.modules has another module as {module}, or none.",
                hints=["Keep the module in sys.modules while its functions are in use."],
            )
        return plain(self, name)

    kind.get_globals_source_and_value = found
