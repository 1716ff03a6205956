"""offline: trace a training step without running it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.utils._pytree import tree_flatten, tree_unflatten

from outcore.capture.captured import Captured
from outcore.capture.compiler.compat import (
    ShortenTraceback,
    aot_autograd,
    aot_function,
    as_if_compiled,
    default_partition,
    is_within,
    with_states,
)
from outcore.capture.compiler.error_passthrough import passing
from outcore.capture.compiler.tracing import as_kernels
from outcore.capture.rewrites.metadata_only import LargeInputs
from outcore.capture.source import rewritten, source_of
from outcore.errors import CaptureError
from outcore.ir.trace import Trace

if TYPE_CHECKING:  # training does not need outcore's networks
    from outcore.networks import NetworkSpec


class _Seen(ShortenTraceback):
    """Raised to end compilation once the joint graph is captured, because nothing is to run."""

    def __init__(self, captured: Captured) -> None:
        super().__init__(first_useful_frame=None)
        self.captured = captured


def trace(step: Callable[..., Any], *inputs: Any) -> Trace:
    """Return the forward and backward ops of `step(*inputs)`, whose result is differentiated.

    Nothing is computed, and no memory is needed beyond what `step` and `inputs` hold. Under torch's
    FakeTensorMode they hold nothing, whatever their size:

    >>> with FakeTensorMode():                                   # doctest: +SKIP
    ...     model, images = ResNet(), torch.empty(1440, 3, 224, 224)
    ...     found = outcore.trace(model, images)

    Raises CaptureError if the step is not one graph that a Trace can express, or if there is
    nothing to differentiate. Resets torch.compile: compiled code is forgotten.
    """
    return _traced(step, inputs, anywhere=False)


def _traced(step: Callable[..., Any], inputs: Sequence[Any], *, anywhere: bool) -> Trace:
    """Trace a step by compiling it with a backend that stops once the joint graph is captured."""
    torch._dynamo.reset()
    backend = partial(_backend, anywhere=anywhere)
    call = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)
    try:
        call(*inputs)
    except _Seen as seen:
        return seen.captured.trace
    except torch._dynamo.exc.Unsupported as error:
        reason = f"the step is not one graph: {str(error).splitlines()[0]}"
        raise CaptureError(reason=reason) from error
    finally:
        torch._dynamo.reset()
    raise _nothing_to_differentiate()  # not even compiled


def trace_as_run(step: Callable[..., Any], owner: nn.Module, *inputs: Any) -> Trace:
    """Trace a step whose Python torch's compiler cannot follow: it runs once on fake tensors.

    `owner` holds the parameters and buffers. Nothing is computed, and little memory is needed. The
    ops do not know their places in the model. Raises CaptureError as `trace`, and whatever `step`
    raises if it needs numbers that are not computed.
    """
    states = {**dict(owner.named_parameters()), **dict(owner.named_buffers())}
    leaves, structure = tree_flatten(inputs)

    def flat(states: dict[str, torch.Tensor], tensors: list[torch.Tensor]) -> Any:
        given = iter(tensors)
        again = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        with with_states(owner, states):
            return step(*tree_unflatten(again, structure))

    def partition(joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        if is_within(inputs):
            return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs)
        raise _seen(joint, num_fwd_outputs, range(len(states)))

    call = aot_function(flat, fw_compiler=_refuse, partition_fn=partition)  # type: ignore[arg-type]  # it names its arguments otherwise
    try:
        with as_kernels(), as_if_compiled():
            call(states, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
    except _Seen as seen:
        return seen.captured.trace
    raise _nothing_to_differentiate()


def trace_network(spec: NetworkSpec, samples: int, **sizes: int) -> Trace:
    """Trace a training step of a network known by name, on samples of `sizes`, without its memory.

    The trace is for no machine in particular: the kernels of this machine, which depend on the
    number of samples, are not considered.
    """
    with FakeTensorMode():
        model, batch = spec.build(), spec.batch(samples, **sizes)

        def step(*inputs: Any) -> Any:
            return spec.criterion(model(*inputs), batch.targets)

        return _traced(step, batch.inputs, anywhere=True)


def _backend(module: GraphModule, inputs: Sequence[Any], *, anywhere: bool) -> Callable[..., Any]:
    """Compile a graph only as far as the joint graph: `_partition` then raises `_Seen`."""
    compiler = aot_autograd(
        fw_compiler=_refuse,
        bw_compiler=_refuse,
        inference_compiler=_refuse,
        partition_fn=partial(_partition, anywhere=anywhere),
    )
    with passing(), as_kernels():
        compiled: Callable[..., Any] = compiler(module, inputs)
    return compiled


def _partition(
    joint: GraphModule,
    inputs: Any,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    anywhere: bool,
    **_: Any,
) -> tuple[GraphModule, GraphModule]:
    """Capture the joint graph, and end compilation by raising `_Seen` with the result."""
    if is_within(inputs):
        return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs)
    static = static_lifetime_input_indices or ()
    raise _seen(joint, num_fwd_outputs, static, anywhere=anywhere)


def _seen(
    joint: GraphModule, outputs: int, static: Sequence[int], *, anywhere: bool = False
) -> _Seen:
    """Rewrite and capture a joint graph. Raises CaptureError as `source_of`."""
    found = rewritten(joint, outputs, LargeInputs(), anywhere=anywhere)
    return _Seen(source_of(found, outputs, static).captured)


def _refuse(_module: GraphModule, _inputs: Any) -> Callable[..., Any]:
    """Raise: if there is no backward, torch compiles the forward alone, to run it."""
    raise _nothing_to_differentiate()


def _nothing_to_differentiate() -> CaptureError:
    return CaptureError(reason="nothing in it needs a gradient: no parameter, no input")
