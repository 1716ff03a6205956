"""source: rewrite a joint graph and capture it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch.fx import GraphModule

from outcore.capture.captured import Captured
from outcore.capture.compiler.effect_tokens import without_tokens
from outcore.capture.graph import capture
from outcore.capture.rewrites.metadata_only import LargeInputs, Sites
from outcore.capture.rewrites.prepare import prepare
from outcore.capture.rewrites.sparse import SparseGradients, densely
from outcore.ir.verify import verify_trace


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A joint graph as it is to be captured."""

    dense: GraphModule
    """The graph, as torch can run it, too. Sparse gradients are returned in parts."""
    sparse: SparseGradients | None
    """Makes sparse gradients of their parts; None if there are none."""
    sites: Sites
    """The graph's calls as traced."""


@dataclass(frozen=True, slots=True)
class Source:
    """A graph as captured, and what else it is run with."""

    captured: Captured
    dense: Callable[[], GraphModule]
    """Returns `Rewritten.dense`."""
    sparse: SparseGradients | None = None
    """As `Rewritten.sparse`."""
    told: bool = False
    """Whether a pattern told what is captured, which takes little time."""


def rewritten(
    joint: GraphModule, forward_outputs: int, large: LargeInputs, *, anywhere: bool = False
) -> Rewritten:
    """Rewrite `joint`, in place; arguments as for `prepare`."""
    sites = prepare(joint, forward_outputs, large, anywhere=anywhere)
    return Rewritten(*densely(joint, forward_outputs), sites)


def source_of(graph: Rewritten, forward_outputs: int, static_inputs: Iterable[int]) -> Source:
    """Capture a graph; arguments as for `capture`.

    Raises CaptureError as `capture`, and VerifyError if the Trace breaks a rule.
    """
    dense = graph.dense
    captured = capture(without_tokens(dense), forward_outputs, static_inputs)
    verify_trace(captured.trace)
    return Source(captured, lambda: dense, graph.sparse)
