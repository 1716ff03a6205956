"""TritonKernel: a user's kernel, written in Triton, as a graph launches it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from torch.fx import GraphModule, Node

from outcore.capture.compiler.compat import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)

NUMBERS = ("kernel_idx", "constant_args_idx")
"""Arguments by which a graph names a kernel and its constants: indices into a table of torch's."""


@dataclass(slots=True, eq=False)
class TritonKernel:
    """A Triton kernel and its constants as a graph launches them."""

    function: Any
    """The kernel's object, perhaps wrapped by an autotuner or heuristics."""
    constants: dict[str, Any]
    """Its constant arguments."""
    name: str
    """The name of the kernel's function."""
    identity: str
    """Text that identifies the kernel, except from a function made a second time from the same
    source."""
    _place: int = field(default=-1, init=False)
    """Index of `constants` in torch's table; -1 if unknown."""

    def numbers(self) -> tuple[int, int]:
        """Return the current indices in torch's table, which `torch._dynamo.reset` empties."""
        if kernel_side_table.constant_args.get(self._place) is not self.constants:
            self._place = kernel_side_table.add_constant_args(self.constants)
        return kernel_side_table.add_kernel(self.function), self._place


def triton_kernel(node: Node) -> TritonKernel | None:
    """Return the kernel that `node` launches; None if it launches none."""
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
    identity = (name, getattr(inner, "src", ""), *settings, str(constants))
    return TritonKernel(function, constants, name, "\n".join(identity))


def launches(module: GraphModule) -> bool:
    """Whether a graph, or a graph inside it, launches Triton kernels."""
    launching = triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation
    graphs = (m.graph for m in module.modules() if isinstance(m, GraphModule))
    return any(node.target in launching for graph in graphs for node in graph.nodes)
