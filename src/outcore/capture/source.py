"""source: prepare a joint graph and capture it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from outcore.capture.compiler.effect_tokens import without_tokens
from outcore.capture.graph import Captured, capture
from outcore.capture.rewrites.metadata_only import LargeInputs, Sites
from outcore.capture.rewrites.prepare import prepare
from outcore.capture.rewrites.sparse import SparseGradients, densely
from outcore.ir.verify import verify_trace


@dataclass(frozen=True, slots=True)
class Source:
    """A graph as captured, and what else it is run with."""

    captured: Captured
    dense: Callable[[], GraphModule]
    """Returns the graph as torch can run it. Sparse gradients are returned in parts."""
    sparse: SparseGradients | None
    """Makes sparse gradients of their parts; None if there are none."""
    sites: Sites | None
    """The graph's calls as traced; None if no graph was made yet."""


def source_of(
    joint: GraphModule, forward_outputs: int, static_inputs: Sequence[int], large: LargeInputs
) -> Source:
    """Rewrite `joint` (`prepare`) and capture it. Arguments are as for `prepare` and `capture`.

    Raises CaptureError as `capture`, and VerifyError if the Trace breaks a rule.
    """
    sites = prepare(joint, forward_outputs, large)
    dense, sparse = densely(joint, forward_outputs)
    captured = capture(without_tokens(dense), forward_outputs, static_inputs)
    verify_trace(captured.trace)
    return Source(captured, lambda: dense, sparse, sites)
