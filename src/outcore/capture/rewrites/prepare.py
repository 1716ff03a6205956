"""prepare: rewrite a joint graph before it is captured."""

from __future__ import annotations

from torch.fx import GraphModule

from outcore.capture.rewrites.batch_norm import by_cudnn
from outcore.capture.rewrites.conjugates import as_tensors
from outcore.capture.rewrites.convolution import one_by_one
from outcore.capture.rewrites.cross_entropy import by_rows
from outcore.capture.rewrites.gradients import unshared
from outcore.capture.rewrites.metadata_only import LargeInputs, Sites
from outcore.capture.rewrites.opaque import as_ops
from outcore.capture.rewrites.pooling import from_places
from outcore.capture.rewrites.views import of_what_is_there
from outcore.capture.rewrites.writes import of_what_is_covered


def prepare(
    joint: GraphModule, forward_outputs: int, large: LargeInputs, *, anywhere: bool
) -> Sites:
    """Rewrite `joint` so that it runs plain PyTorch's kernels, by ops that fit a Trace. In place.

    If torch has one call for several kernels, it becomes one op per kernel. `large`: the large
    inputs of the same graph at other sizes. `anywhere`: for no machine in particular; such a graph
    must not be run. Returns the calls of `joint` as traced.
    """
    of_what_is_there(joint)
    unshared(joint, forward_outputs)
    by_cudnn(joint)
    sites = large.sites(joint, anywhere=anywhere)
    one_by_one(joint, sites)
    from_places(joint, sites)
    by_rows(joint, sites)
    of_what_is_covered(joint)
    as_ops(joint)
    as_tensors(joint)
    return sites
