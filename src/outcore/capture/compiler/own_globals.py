"""own_globals: keep dynamo from reading a function's globals in another module of the same name.

It looks for the globals of functions that it inlines in the module that it first imported under the
name of theirs. A wrapped model's `forward` is inlined. What it imported may be another module, such
as a second `model.py`, an earlier state of one that was loaded again, a notebook in which a script
was run, or nothing. Then graphs would have the values of other variables, and would not be made
again when the right ones change. torch 2.14 reads globals where they are, as is done here, but not
those of a module that was loaded again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch._dynamo import symbolic_convert
from torch._dynamo.exc import unimplemented
from torch._dynamo.source import DictGetItemSource, GlobalSource
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.variables.builder import VariableBuilder

_SCOPE = "___unnamed_scope"
"""What dynamo calls globals of no module, such as those of a named tuple's functions."""

_here = threading.local()
_patching = threading.Lock()


@contextmanager
def own_globals() -> Iterator[None]:
    """Context in which dynamo reads the globals of functions that it inlines where they are."""
    with _patching:
        _patch()
    before, _here.wanted = getattr(_here, "wanted", False), True
    try:
        yield
    finally:
        _here.wanted = before


def is_elsewhere(namespace: Mapping[str, Any]) -> bool:
    """Whether dynamo would look for these globals of a function in another module, or in none."""
    name = namespace.get("__name__")
    if not isinstance(name, str) or name.startswith("namedtuple_"):
        return False  # dynamo reads such globals where they are
    if "torch_package" in name:
        return False  # they are in no `sys.modules`
    if sys.modules.get(name) is None:
        return True
    module = symbolic_convert._import_module(name)
    return getattr(module, "__dict__", None) is not namespace


@cache
def _patch() -> None:
    kind: Any = InliningInstructionTranslator
    find = kind.get_globals_source_and_value

    def found(self: Any, name: str) -> Any:
        if not (getattr(_here, "wanted", False) and is_elsewhere(self.f_globals)):
            return find(self, name)
        if self.current_instruction.opname == "STORE_GLOBAL":
            unimplemented(
                gb_type="Global set in no module of sys.modules",
                context=f"{self.f_globals['__name__']}.{name}",
                explanation="Dynamo sets globals of inlined functions in modules alone.",
                hints=["Keep the module in sys.modules while its functions are in use."],
            )
        scope = GlobalSource(self.output.install_global_by_id(_SCOPE, self.f_globals))
        variable = VariableBuilder(self, scope)(self.f_globals)
        return self.f_globals, variable, DictGetItemSource(scope, name)

    kind.get_globals_source_and_value = found
