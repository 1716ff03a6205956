"""captured: a Trace, and what it needs from the graph that it came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from outcore.ir.trace import Trace


@dataclass(frozen=True, slots=True)
class Joint:
    """A joint graph from AOTAutograd, kept so that it can be captured again (`recapture.py`)."""

    module: GraphModule
    """The graph."""
    forward_outputs: int
    """As for `capture`."""
    static_inputs: frozenset[int]
    """As for `capture`."""
    nodes: tuple[Node, ...]
    """The node of each op of the graph's trace."""
    results: Mapping[Node, Any]
    """Node -> the ids of the Values that it makes: one, None, or a list of these."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A Trace, and what it needs from the graph that it came from."""

    trace: Trace
    """The Trace."""
    constants: tuple[torch.Tensor, ...]
    """Tensors that the graph itself holds; they are passed after the forward inputs."""
    overwritten: frozenset[int]
    """Positions of forward inputs that AOTAutograd overwrites after the forward call."""
    turned: tuple[int, ...]
    """Positions of inputs that are read as the conjugate or the negative of what is in memory."""
    device: torch.device
    """The one device that all tensors are on."""
    source: Callable[[], Joint]
    """Returns the source graph, for capturing it again. Raises CaptureError if it has none."""
    fixed: tuple[tuple[int, int], ...] = ()
    """Forward inputs with views from fixed places of their storage: position, offset. There must be
    no call in which they begin elsewhere."""
    within: Mapping[int, int] = field(default_factory=dict)
    """Ops that run graphs inside themselves -> bytes that those graphs hold at least, in addition
    to the op's results."""
