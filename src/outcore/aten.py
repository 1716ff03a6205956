"""aten: facts about ops: which alias, are random, cannot be repeated, or may write in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from outcore.ir.trace import Effect

UNSAFE_VIEWS = frozenset(
    {
        "aten._unsafe_view.default",
        "aten.unsafe_split.Tensor",
        "aten.unsafe_split_with_sizes.default",
    }
)
"""Ops whose results share their argument's storage although the schema does not say so."""

COVERED_WRITES = {
    f"outcore.{name}.default": f"aten.{name}.default"
    for name in ("copy", "diagonal_scatter", "select_scatter", "slice_scatter")
}
"""Writes into a part of a tensor that copy only the memory that the tensor covers -> torch's ops
with the same results.

`capture.rewrites.writes` makes them.
"""

WRITES = ("aten.as_strided_scatter.default", *COVERED_WRITES.values())
"""Ops that represent writing into a part of a tensor. The result is a view of a copy of the whole
storage that is written into."""

VARYING = frozenset(
    {
        "aten.scatter_add.default",
        "aten.scatter_reduce.two",
        "aten.scatter.reduce",
        "aten.index_add.default",
        "aten.index_copy.default",
        "aten.index_put.default",
        "aten._index_put_impl.default",
        "aten._unsafe_index_put.default",
        "aten._unsafe_masked_index_put_accumulate.default",
        "aten.index_reduce.default",
        "aten.put.default",
        "aten.bincount.default",
        "aten.histc.default",
        "aten.linalg_lstsq.default",
        "aten.max_unpool2d.default",
        "aten.max_unpool3d.default",
        "aten.grid_sampler_2d_backward.default",
        "aten.grid_sampler_3d_backward.default",
        "aten.upsample_linear1d_backward.default",
        "aten.upsample_bilinear2d_backward.default",
        "aten.upsample_bicubic2d_backward.default",
        "aten.upsample_trilinear3d_backward.default",
        "aten._upsample_bilinear2d_aa_backward.default",
        "aten._upsample_bicubic2d_aa_backward.default",
        "aten._upsample_lanczos2d_aa_backward.default",
    }
)
"""Ops whose results may differ from run to run on any device.

They sum in any order, or keep any of several values for one place. LAPACK's solver starts from what
it finds in memory.
"""

VARYING_ON_CUDA = frozenset(
    {
        "aten.cumprod.default",
        "aten.cumsum.default",
        "aten.kthvalue.default",
        "aten.logcumsumexp.default",
        "aten.median.dim",
        "aten.nanmedian.dim",
        "aten.nll_loss2d_forward.default",
        "aten.scatter.src",
        "aten._adaptive_avg_pool2d_backward.default",
        "aten._adaptive_avg_pool3d_backward.default",
        "aten._ctc_loss_backward.default",
        "aten._ctc_loss_backward.Tensor",
        "aten._cudnn_attention_backward.default",
        "aten._cudnn_ctc_loss.default",
        "aten._cudnn_ctc_loss.Tensor",
        "aten._efficient_attention_backward.default",
        "aten._embedding_bag_backward.default",
        "aten._embedding_bag_dense_backward.default",
        "aten._flash_attention_backward.default",
        "aten._scaled_dot_product_cudnn_attention_backward.default",
        "aten._scaled_dot_product_efficient_attention_backward.default",
        "aten._scaled_dot_product_flash_attention_backward.default",
        "aten.adaptive_max_pool2d_backward.default",
        "aten.adaptive_max_pool3d_backward.default",
        "aten.avg_pool3d_backward.default",
        "aten.cudnn_grid_sampler_backward.default",
        "aten.embedding_dense_backward.default",
        "aten.fractional_max_pool2d_backward.default",
        "aten.fractional_max_pool3d_backward.default",
        "aten.max_pool3d_with_indices_backward.default",
        "aten.multinomial.default",
        "aten.reflection_pad1d_backward.default",
        "aten.reflection_pad2d_backward.default",
        "aten.reflection_pad3d_backward.default",
        "aten.replication_pad1d_backward.default",
        "aten.replication_pad2d_backward.default",
        "aten.replication_pad3d_backward.default",
    }
)
"""Ops whose kernels on CUDA sum by atomics, or choose among equal values by which comes first.

They are the ops that `torch.use_deterministic_algorithms` lists and `VARYING` does not have,
except convolutions (`effects_on_cuda`). Added are the ops that scan as `cumsum` does, also within
(`multinomial`), the backward of fused attention, which sums over blocks, and cuDNN's.
"""

EXACT_ON_INTEGERS = frozenset({"aten.cumprod.default", "aten.cumsum.default"})
"""Ops of `VARYING_ON_CUDA` whose results vary only by floating-point rounding."""

COLLECTIVES = frozenset({"c10d_functional", "_c10d_functional", "c10d"})
"""The namespaces of ops that communicate with other processes."""

FUSED = "outcore_fused"
"""The namespace of ops that each stand for several of torch's (`capture.fusion`)."""

KNOWN_NAMESPACES = frozenset({"aten", "prims", FUSED, *COLLECTIVES})
"""The namespaces whose ops are known to keep no hidden state.

Ops of other namespaces may keep some, so they run once.
"""

CONVOLUTIONS = (
    "aten.convolution.default",
    "aten.convolution_backward.default",
    "outcore.convolution_input_gradient.default",
)
"""Convolution, its gradients, and that of its input alone (`capture.rewrites.convolution`)."""

BY_PLACE = {
    f"outcore.{name}_backward.default": f"aten.{name}_backward.default"
    for name in (
        "_adaptive_avg_pool2d",
        "_adaptive_avg_pool3d",
        "adaptive_max_pool2d",
        "adaptive_max_pool3d",
        "avg_pool2d",
        "avg_pool3d",
        "fractional_max_pool2d",
        "fractional_max_pool3d",
        "max_pool2d_with_indices",
        "max_pool3d_with_indices",
        "reflection_pad1d",
        "reflection_pad2d",
        "reflection_pad3d",
        "replication_pad1d",
        "replication_pad2d",
        "replication_pad3d",
    )
}
"""Gradients that are made without the input -> torch's ops that they run.

`capture.rewrites.pooling` makes them.
"""

CROSS_ENTROPY = "outcore.cross_entropy_backward.default"
"""The gradient of cross-entropy, made block by block (`capture.rewrites.cross_entropy`)."""

KNOWN = frozenset({*CONVOLUTIONS, *BY_PLACE, CROSS_ENTROPY, *COVERED_WRITES})
"""Ops outside `KNOWN_NAMESPACES` that are known just as well."""

RUNNING_STATISTICS = {
    "aten._native_batch_norm_legit_functional.default": ((3, 4), (3, 4), 5),
    "aten._batch_norm_with_update_functional.default": ((3, 4), (4, 5), None),
    "aten.native_batch_norm_backward.default": ((3, 4), (), 7),
    "aten.batch_norm_backward.default": ((3, 4), (), 7),
}
"""Op -> (arguments that are running statistics, results that are the new ones, index of the
training flag or None).

While training, those arguments reach only the results that are the new statistics. So a rerun after
their update still gives the first run's normalized output. Backward does not read them then.
"""


def statistics(target: str, args: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Positions of running statistics among the arguments, and of new ones among the results.

    Both are empty if the op has none, or does not train.
    """
    given, new, flag = RUNNING_STATISTICS.get(target, ((), (), None))
    training = flag is None or (flag < len(args) and bool(args[flag]))
    return (given, new) if training else ((), ())


WRITING_OVER: dict[str, Callable[[list[torch.Tensor], list[int]], list[torch.Tensor]]] = {}
"""Fused op -> a function that runs it and may write over the arguments at the given positions.

This is not an op itself: torch has no ops that may return what they were given.
"""


DONATIONS: dict[str, tuple[tuple[int, ...], str]] = {
    "aten.relu.default": ((0,), ""),
    "aten.threshold_backward.default": ((0, 1), "grad_input"),
    "aten.add.Tensor": ((0, 1), "out"),
    "aten.sub.Tensor": ((0, 1), "out"),
    "aten.mul.Tensor": ((0, 1), "out"),
    "aten.mul.Scalar": ((0,), ""),
    "aten.div.Tensor": ((0, 1), "out"),
    "aten.div.Scalar": ((0,), ""),
    "aten.neg.default": ((0,), "out"),
    "aten.sigmoid.default": ((0,), "out"),
    "aten.tanh.default": ((0,), "out"),
    "aten.silu.default": ((0,), "out"),
    "aten.gelu.default": ((0,), "out"),
    "aten.leaky_relu.default": ((0,), "out"),
    "aten.gelu_backward.default": ((0, 1), "grad_input"),
    "aten.silu_backward.default": ((0, 1), "grad_input"),
    "aten.sigmoid_backward.default": ((0, 1), "grad_input"),
    "aten.tanh_backward.default": ((0, 1), "grad_input"),
    "aten.leaky_relu_backward.default": ((0, 1), "grad_input"),
    "aten._softmax.default": ((0,), "out"),
    "aten._log_softmax.default": ((0,), "out"),
    "aten._softmax_backward_data.default": ((0, 1), "grad_input"),
    "aten._log_softmax_backward_data.default": ((0, 1), "out"),
    CROSS_ENTROPY: ((1,), "out"),
}
"""Op -> (arguments whose memory the result may take, in order of preference; name of the out
argument).

All except those of `IN_ORDER` are elementwise over one iterator, so that reading and writing one
element at the same place is safe and gives the same bits. If the name is empty, the op of the same
name with an underscore writes in place, because the overload with an out argument makes a separate
tensor first.
"""

IN_ORDER = frozenset(
    {
        "aten._softmax.default",
        "aten._log_softmax.default",
        "aten._softmax_backward_data.default",
        "aten._log_softmax_backward_data.default",
        CROSS_ENTROPY,
    }
)
"""Ops of `DONATIONS` that work row by row, and so may only write over a contiguous argument.

What processes a row (a thread, a warp, a block) processes all of it, has finished its sums when it
first writes, and reads each element before it writes there. All of torch's kernels do so, on CPUs
and on CUDA, over rows of any length in any dimension. But they write in contiguous order, whatever
the strides of the out argument are, and torch describes the gradient of log-softmax as laid out
like what it is made from. Over an argument that is not contiguous, values would end up in other
places.
"""

IN_PLACE = {"aten.mul.Scalar": "aten.mul_.Tensor"}
"""Op -> the op that writes in place with the same bits, if it is not the one with an underscore.

`mul_.Scalar` rounds the number to the tensor's dtype first, which changes results in half
precision.
"""


def resolve(target: str) -> torch._ops.OpOverload:
    """Return the overload that `target` names, such as `aten.convolution.default`."""
    namespace, packet, overload = target.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    assert isinstance(found, torch._ops.OpOverload)  # noqa: S101 - narrows a dynamic attribute
    return found


def returns_one(op: torch._ops.OpOverload) -> bool:
    """Whether a call returns one tensor itself, not a tuple or list of tensors."""
    returns = op._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"


def mutates(op: torch._ops.OpOverload) -> bool:
    """Whether the schema says that an argument is written."""
    return op._schema.is_mutable


def may_alias(op: torch._ops.OpOverload) -> bool:
    """Whether a result may share the storage of an argument."""
    annotated = any(r.alias_info is not None for r in op._schema.returns)
    return annotated or str(op) in UNSAFE_VIEWS


def is_opaque(target: str) -> bool:
    """Whether only its author knows what an op does: it is neither torch's nor outcore's."""
    return target.partition(".")[0] not in KNOWN_NAMESPACES and target not in KNOWN


def varies(target: str) -> bool:
    """Whether a second run of an op may give other results, though no argument was changed."""
    return target in VARYING or is_opaque(target)


def effects(op: torch._ops.OpOverload) -> frozenset[Effect]:
    """Return what a call does in addition to computing its results."""
    found = set()
    if torch.Tag.nondeterministic_seeded in op.tags:
        found.add(Effect.RANDOM)
    if mutates(op):
        found.add(Effect.MUTATES)
    if op.namespace in COLLECTIVES:
        found.add(Effect.COLLECTIVE)
    if varies(str(op)):
        found.add(Effect.UNREPEATABLE)
    return frozenset(found)


def draws_nothing(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether this call of a random op draws no numbers: attention without dropout."""
    names = [argument.name for argument in op._schema.arguments]
    if "dropout_p" not in names:
        return False
    position = names.index("dropout_p")
    default = op._schema.arguments[position].default_value
    given = args[position] if position < len(args) else kwargs.get("dropout_p", default)
    return bool(given == 0)


def effects_on_cuda(op: torch._ops.OpOverload, args: Sequence[Any], made: Any) -> frozenset[Effect]:
    """Return UNREPEATABLE if a second run on CUDA may give other bits; `made` are the results.

    If the user has not enabled deterministic algorithms, gradients of convolutions, transposed
    convolutions, and ops of `VARYING_ON_CUDA` may sum by atomics.

    All convolutions are unrepeatable while cuDNN picks their algorithms by trials
    (`cudnn.benchmark`). It remembers its picks per thread, and backward has a separate thread:
    there, the same convolution may run by another algorithm, after other trials.
    """
    several = made if isinstance(made, list | tuple) else (made,)
    tensors = [tensor for tensor in several if isinstance(tensor, torch.Tensor)]
    if not any(tensor.is_cuda for tensor in tensors):
        return frozenset()
    name, cudnn = BY_PLACE.get(str(op), str(op)), torch.backends.cudnn
    exact = torch.are_deterministic_algorithms_enabled()
    if name in CONVOLUTIONS:
        adds = name != CONVOLUTIONS[0] or args[6]  # whether it is transposed
        once = cudnn.benchmark or (adds and not (exact or cudnn.deterministic))
    else:
        exact &= not torch.is_deterministic_algorithms_warn_only_enabled()
        rounds = any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
        once = name in VARYING_ON_CUDA and not exact
        once &= rounds or name not in EXACT_ON_INTEGERS
    return frozenset({Effect.UNREPEATABLE}) if once else frozenset()


def is_wait(op: torch._ops.OpOverload) -> bool:
    """Whether a call waits for a collective that makes its argument, and returns the argument."""
    return op.namespace in COLLECTIVES and op._opname == "wait_tensor"


def callable_of(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Return what runs `op`: the op itself, or for a collective a call that also waits for it.

    A collective only begins when it is called. Before it is done, what it reads could be
    overwritten, and what it makes could be moved.
    """
    return _waiting(op) if op.namespace in COLLECTIVES else op


def _waiting(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Return a call of a collective that waits until its results are there."""
    wait = torch.ops._c10d_functional.wait_tensor.default

    def call(*args: Any, **kwargs: Any) -> Any:
        made = op(*args, **kwargs)
        if isinstance(made, torch.Tensor):
            return wait(made)
        return [wait(tensor) for tensor in made]

    return call


def in_place(target: str) -> torch._ops.OpOverload:
    """Return the overload of `target` that writes into a tensor it is given (`DONATIONS`)."""
    namespace, packet, overload = target.split(".")
    wanted = DONATIONS[target][1]
    if not wanted:
        return resolve(IN_PLACE.get(target, f"{namespace}.{packet}_.{overload}"))
    overloads = getattr(getattr(torch.ops, namespace), packet)
    functional = resolve(target)._schema.arguments
    for name in overloads.overloads():
        found = getattr(overloads, name)
        arguments = found._schema.arguments
        same = [str(a.type) for a in arguments[:-1]] == [str(a.type) for a in functional]
        if same and arguments[-1].name == wanted:
            assert isinstance(found, torch._ops.OpOverload)  # noqa: S101 - narrows
            return found
    raise LookupError(f"{target} has no overload with an argument {wanted}")
