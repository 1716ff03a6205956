"""What is done to a joint graph before it is captured."""

from __future__ import annotations

from torch.fx import GraphModule

from outcore.capture.batch_norm import by_cudnn
from outcore.capture.conjugates import as_tensors
from outcore.capture.convolution import one_by_one
from outcore.capture.cross_entropy import by_rows
from outcore.capture.opaque import as_ops
from outcore.capture.pooling import from_places


def prepare(joint: GraphModule, *, anywhere: bool = False) -> None:
    """Let `joint` say what plain PyTorch runs, by ops that a Trace has words for. In place.

    One kernel is one op where torch has calls of several. `anywhere`: for no machine in particular;
    such a graph is not to be run.
    """
    by_cudnn(joint)
    one_by_one(joint, anywhere=anywhere)
    from_places(joint, anywhere=anywhere)
    by_rows(joint, anywhere=anywhere)
    as_ops(joint)
    as_tensors(joint)
