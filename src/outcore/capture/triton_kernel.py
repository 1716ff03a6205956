"""TritonKernel: a kernel of the user's, written in Triton, as a graph launches it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from torch.fx import GraphModule, Node

from outcore.capture.compat import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)

NUMBERS = ("kernel_idx", "constant_args_idx")
"""Arguments by which a graph refers to a kernel and its constants: places in a table of torch's."""


@dataclass(slots=True, eq=False)
class TritonKernel:
    """A kernel and its constants as a graph launches them."""

    function: Any
    constants: dict[str, Any]
    name: str
    told: str
    """What tells it from others, but for functions that were made twice from one text."""
    _place: int = field(default=-1, init=False)

    def numbers(self) -> tuple[int, int]:
        """Their places in torch's table now, which `torch._dynamo.reset` empties."""
        if kernel_side_table.constant_args.get(self._place) is not self.constants:
            self._place = kernel_side_table.add_constant_args(self.constants)
        return kernel_side_table.add_kernel(self.function), self._place


def triton_kernel(node: Node) -> TritonKernel | None:
    """The kernel that `node` launches; None where it does not."""
    if node.target is not triton_kernel_wrapper_functional:
        return None
    places = [cast(int, node.kwargs[name]) for name in NUMBERS]
    function: Any = kernel_side_table.get_kernel(places[0])
    constants = kernel_side_table.get_constant_args(places[1])
    inner, settings = function, []
    while hasattr(inner, "fn") and not hasattr(inner, "src"):  # autotuned, or with heuristics
        settings.append(str(getattr(inner, "configs", "")))
        inner = inner.fn
    name = getattr(inner, "__name__", "triton_kernel")
    told = (name, getattr(inner, "src", ""), *settings, str(constants))
    return TritonKernel(function, constants, name, "\n".join(told))


def launches(module: GraphModule) -> bool:
    """Whether a graph, or one within, launches kernels."""
    launching = triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation
    graphs = (m.graph for m in module.modules() if isinstance(m, GraphModule))
    return any(node.target in launching for graph in graphs for node in graph.nodes)
