"""reached: None as the gradient of what backward does not reach, as in plain PyTorch.

Autograd gives AOTAutograd's backward zeros for results of forward that get no gradient. So zeros
come out for parameters that only such results depend on. Optimizers move these, by weight decay or
momentum, but leave parameters without a gradient alone (decision 0049).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr
from torch.autograd.function import BackwardCFunction

from outcore.ir.trace import Trace

NODE = "CompiledFunctionBackward"
"""The name of AOTAutograd's node in autograd's graph."""

Call = Callable[..., Any]


def telling_missing(call: Call) -> Call:
    """`call` of a compiled graph, whose backward is given None for results without a gradient."""

    def told(*args: Any) -> Any:
        before = _get_sequence_nr()
        results = call(*args)
        node = _node_of(results, before)
        if node is not None:
            node.set_materialize_grads(False)
        return results

    return told


def _node_of(results: Iterable[Any], since: int) -> Any:
    """AOTAutograd's node of a call with these results, if it is from `since` on; else None."""
    for result in results:
        node = result.grad_fn if isinstance(result, torch.Tensor) else None
        while node is not None and node._sequence_nr() >= since:
            if isinstance(node, BackwardCFunction):
                return node if _is_plain(type(node)) else None
            before = node.next_functions  # the result is a view
            node = before[0][0] if len(before) == 1 else None
    return None


def _is_plain(kind: type) -> bool:
    """Whether nodes of this class are AOTAutograd's, and take no gradients of tensor subclasses."""
    whole = getattr(kind, "_forward_cls", None)
    return kind.__name__ == NODE and getattr(whole, "maybe_subclass_metadata", whole) is None


def filled(trace: Trace, tangents: list[Any], device: torch.device) -> frozenset[int]:
    """Put zeros in place of missing `tangents`, as autograd would; returns their positions."""
    missing = frozenset(i for i, tangent in enumerate(tangents) if tangent is None)
    for position in missing:
        value = trace.values[trace.tangents[position]]
        dtype = getattr(torch, value.dtype)
        made = torch.empty_strided(value.shape, value.stride, dtype=dtype, device=device)
        tangents[position] = made.zero_()
    return missing


def unreached(trace: Trace, missing: Collection[int]) -> tuple[bool, ...]:
    """For each gradient of `trace`, whether it depends on tangents, all of which are `missing`."""
    buffers = [trace.values[value].buffer for value in trace.tangents]
    found = {buffer: position in missing for position, buffer in enumerate(buffers)}
    """Buffer -> whether it depends on missing tangents alone; not in here: on none."""
    for op, reads in zip(trace.ops, trace.reads, strict=True):
        known = [found[buffer] for buffer in reads if buffer in found]
        made = (trace.values[v].buffer for v in op.outputs if v is not None)
        for buffer in made if known else ():
            found[buffer] = all(known) and found.get(buffer, True)
    return tuple(_all(trace, found, gradient) for gradient in trace.gradients)


def _all(trace: Trace, found: dict[int, bool], gradient: Any) -> bool:
    known = [found.get(buffer) for buffer in trace.value_buffers((gradient,))]
    return known != [] and all(known)
