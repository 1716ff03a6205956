"""Every private symbol of torch that capture leans on, in one place, each with the reason."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition

__all__ = [
    "aot_autograd",
    "default_partition",
    "keeps_graph",
    "mutated_inputs",
    "runs_in_backward",
    "stand_in_survives",
]


def keeps_graph() -> bool:
    """Inside backward: whether the caller asked for `retain_graph`."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def stand_in_survives() -> bool:
    """Whether what is saved now stays itself until its graph dies.

    Saved-tensor hooks may keep a copy in its place. Those of torch.utils.checkpoint do not: they
    drop what the first forward saved, and keep what the second one saves.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is None or hooks[0].__module__ == "torch.utils.checkpoint"


def runs_in_backward(node: torch.fx.Node) -> bool:
    """Whether the tracer recorded `node` while it differentiated."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def mutated_inputs(output: torch.fx.Node) -> tuple[int, ...]:
    """Positions among the forward inputs that AOTAutograd overwrites after the forward call.

    Read from the descriptors on the joint graph's output.
    """
    found = []
    for desc in output.meta.get("desc", ()):
        source = getattr(desc, "mutated_input", None)
        while source is not None and not hasattr(source, "idx"):
            source = getattr(source, "base_of", None) or getattr(source, "parent", None)
        if source is not None:
            found.append(int(source.idx))
    return tuple(found)
