"""missing_gradients: None for gradients that a step does not give, or that it does not reach.

Autograd gives AOTAutograd's backward zeros for results of forward that get no gradient. So zeros
come out for parameters that only such results depend on. Optimizers move these, by weight decay or
momentum, but leave parameters without a gradient alone (docs/decisions/0049).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

import torch
from torch import distributed
from torch._C._autograd import _get_sequence_nr
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from outcore.ir.trace import Trace

NODE = "CompiledFunctionBackward"
"""The name of AOTAutograd's node in autograd's graph."""

Call = Callable[..., Any]


class Told(Protocol):
    """What wants to know whether its backward calls are told of missing gradients."""

    @property
    def forward_calls(self) -> int:
        """How many forward calls this thread has made."""
        ...

    def tells(self, *, node: bool) -> None:
        """Note whether the autograd node of the latest forward call was found, and told."""
        ...


def telling_missing(call: Call, told: Told) -> Call:
    """`call` of a compiled graph, whose backward is given None for results without a gradient."""

    def telling(*args: Any) -> Any:
        before, calls = _get_sequence_nr(), told.forward_calls
        results = call(*args)
        if told.forward_calls != calls:
            node = _node_of(results, args, before)
            if node is not None:
                node.set_materialize_grads(False)
            told.tells(node=node is not None)
        return results

    return telling


def _node_of(results: Iterable[Any], args: Collection[Any], since: int) -> Any:
    """AOTAutograd's node of a call with these results, if one of them is no view; else None."""
    given = set(map(id, args))
    for result in results:
        if isinstance(result, torch.Tensor) and id(result) not in given:
            node = result.grad_fn
            if isinstance(node, BackwardCFunction):
                return node if _is_plain(type(node)) and node._sequence_nr() >= since else None
    return None


def _is_plain(kind: type) -> bool:
    """Whether nodes of this class are AOTAutograd's, and take no gradients of tensor subclasses."""
    whole = getattr(kind, "_forward_cls", None)
    return kind.__name__ == NODE and getattr(whole, "maybe_subclass_metadata", whole) is None


def fill(trace: Trace, tangents: list[Any], device: torch.device) -> None:
    """Put zeros in place of missing `tangents`, as autograd would."""
    for position, tangent in enumerate(tangents):
        if tangent is None:
            value = trace.values[trace.tangents[position]]
            dtype = getattr(torch, value.dtype)
            made = torch.empty_strided(value.shape, value.stride, dtype=dtype, device=device)
            tangents[position] = made.zero_()


def trains_alone() -> bool:
    """Whether no other process trains along.

    If one does, hooks expect a gradient for each parameter, and they cannot be seen.
    """
    return not (distributed.is_available() and distributed.is_initialized())


def is_waited_for(parameter: torch.Tensor) -> bool:
    """Whether a parameter has hooks, which autograd would call with None.

    Plain PyTorch would not call them.
    """
    hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    return bool(hooks)


def node_is_waited_for(parameter: torch.Tensor) -> bool:
    """As `is_waited_for`, of what accumulates the gradient. Takes some 20 microseconds."""
    node = get_gradient_edge(parameter).node
    return any(map(_are_there, (node.register_hook, node.register_prehook)))


def _are_there(register: Call) -> bool:
    """Whether a node has other hooks of the kind that `register` adds."""
    handle = register(lambda *_: None)
    found = len(handle.hooks_dict_ref()) > 1
    handle.remove()
    return found
