"""sites: tell where in the user's model and source an op comes from."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch.fx import Node

WHOLE = frozenset({"self", "fn", "model", "call"})
"""Variables that stand for the model as a whole: torch's names, and those in outcore."""

_ROUTE = re.compile(
    r"\.(__closure__\[\d+\]\.cell_contents|__self__|_orig_mod|(__dict__\[')?_modules('\])?)"
    r"(?![^.\[])"
)
"""Steps in torch's path to a module that are not part of the model. It goes through `__dict__` if
the class has a `__getattr__` of its own, as those of diffusers do."""
_VARIABLE = re.compile(r"[LG]\['(__import_\w+'\]\.(?P<imported>\w+)|(?P<name>\w+)'\])")
_KEY = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")
_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_OURS = Path(__file__).parents[2]
_MODELS = _OURS / "networks"


def site(node: Node) -> str:
    """Return `layers.3.conv2 (model.py:41)`: the module path and the innermost source line.

    Lines of this package do not count, except those of the networks that come with it.
    """
    modules = _modules(node)
    path = module_path(str(list(modules.values())[-1][0])) if modules else ""
    line = source_line(node.meta.get("stack_trace") or "")
    return f"{path} ({line})".strip() if line else path


def is_in_module(node: Node) -> bool:
    """Whether the module that a node comes from is known."""
    return bool(_modules(node))


def _modules(node: Node) -> dict[str, Any]:
    meta = node.meta
    found: dict[str, Any] = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    return found


def module_path(source: str) -> str:
    """Return the path by which a user would name the module that torch calls `source`.

    `L['self'].layers.3` is `layers.3`, and `G['encoder'].layers[3]` is `encoder.layers.3`.
    """
    plain = _ROUTE.sub("", source)
    variable = _VARIABLE.match(plain)
    if variable is None:
        return plain
    name = variable["imported"] or variable["name"]
    inside = _KEY.sub(r".\1", plain[variable.end() :])
    return inside.removeprefix(".") if name in WHOLE else name + inside


@lru_cache(maxsize=1024)  # ops of one line share it, and so do graphs for all sizes
def source_line(stack: str) -> str:
    """Return `model.py:41`, the innermost line of a stack outside this package; else empty."""
    for found in reversed(list(_LINE.finditer(stack))):
        file = Path(found["file"])
        if not file.is_relative_to(_OURS) or file.is_relative_to(_MODELS):
            return f"{file.name}:{found['line']}"
    return ""
