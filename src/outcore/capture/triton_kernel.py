"""TritonKernel: a kernel of the user's, written in Triton, as a graph launches it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch.fx import Node

from outcore.capture.compat import kernel_side_table, triton_kernel_wrapper_functional

PROCESS_NUMBERS = ("kernel_idx", "constant_args_idx")
"""Arguments by which a graph refers to a kernel and to its constants: numbers of the process."""


@dataclass(frozen=True, slots=True)
class TritonKernel:
    """A kernel as a graph calls it: its name, what tells it from others, and itself."""

    name: str
    told: str
    function: object


def triton_kernel(node: Node) -> TritonKernel | None:
    """The kernel that `node` launches; None where it does not.

    Two kernels may be told alike, if functions were made twice from one text.
    """
    if node.target is not triton_kernel_wrapper_functional:
        return None
    function: Any = kernel_side_table.get_kernel(cast(int, node.kwargs["kernel_idx"]))
    constants = kernel_side_table.get_constant_args(cast(int, node.kwargs["constant_args_idx"]))
    inner, settings = function, []
    while hasattr(inner, "fn") and not hasattr(inner, "src"):  # autotuned, or with heuristics
        settings.append(str(getattr(inner, "configs", "")))
        inner = inner.fn
    name = getattr(inner, "__name__", "triton_kernel")
    told = (name, getattr(inner, "src", ""), *settings, constants)
    return TritonKernel(name, "\n".join(map(str, told)), function)
