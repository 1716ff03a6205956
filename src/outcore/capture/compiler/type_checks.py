"""type_checks: let dynamo trace `torch.jit.isinstance`, at which it would end a graph.

Modules that can also be scripted call it, such as each block of MONAI's BasicUNet on the way up.
What waits between the graphs of one step needs room in each of them.
"""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import torch
from torch._dynamo import trace_rules


@cache
def trace_type_checks() -> None:
    """Have dynamo trace checks for tensors, from now on in this process.

    If dynamo cannot be told so, or was told otherwise, graphs end there.
    """
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        rules = trace_rules.get_torch_obj_rule_map()
        before = rules.pop(torch.jit.isinstance, None)
        try:
            torch.compiler.substitute_in_graph(torch.jit.isinstance)(_is_instance)
        except BaseException:
            if before is not None:
                rules[torch.jit.isinstance] = before
            raise


def _is_instance(obj: Any, target_type: Any) -> bool:
    """As `torch.jit.isinstance`. Dynamo does not know of all classes what Python does."""
    if target_type is torch.Tensor:
        return isinstance(obj, torch.Tensor)
    return bool(torch._jit_internal._isinstance(obj, target_type))  # a graph ends here
