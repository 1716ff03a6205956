"""compat: every private symbol of torch that capture uses, in one place, each with the reason."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch._C._dynamo.guards import _reinterpret_tensor  # type: ignore[attr-defined]  # no types
from torch._dynamo import compiled_autograd
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import (
    RestartAnalysis,
    ShortenTraceback,
    TorchDynamoException,
    UncapturedHigherOrderOpError,
)
from torch._dynamo.variables.torch_function import TorchFunctionModeStackStateManager
from torch._functorch import config, partitioners
from torch._functorch.aot_autograd import aot_function
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.auto_functionalize import (
    auto_functionalized_v2,
    auto_functionalized_v2_dense,
)
from torch._higher_order_ops.effects import with_effects
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from torch._prims_common import clone_preserve_strides, suggest_memory_format
from torch._subclasses import FakeTensor, FakeTensorMode, UnsupportedFakeTensorException
from torch.autograd import forward_ad
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true
from torch.fx.graph import _BoxedCodeGen
from torch.nn.utils.stateless import _reparametrize_module as with_states
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from outcore.capture.compiler.layouts import VIEWS
from outcore.errors import CaptureError

__all__ = [
    "DISABLED",
    "SETTINGS_OF_THREADS",
    "LazyGraphModule",
    "RestartAnalysis",
    "ShortenTraceback",
    "TorchDynamoException",
    "UncapturedHigherOrderOpError",
    "UnsupportedFakeTensorException",
    "aot_autograd",
    "aot_function",
    "as_dynamo_compiles",
    "as_if_compiled",
    "as_it_lies",
    "auto_functionalized_v2",
    "auto_functionalized_v2_dense",
    "boxed",
    "by_inductor",
    "carry_sources",
    "clone_preserve_strides",
    "compiles_autograd",
    "cudnn_reserve_bytes",
    "default_partition",
    "dynamo_config",
    "keeps_graph",
    "kernel_side_table",
    "layout_if_input_unread",
    "marked_as_backward",
    "must_run_uncompiled",
    "mutated_inputs",
    "normalized_by_cudnn",
    "noticing_changes",
    "partition_later",
    "plain",
    "runs_in_backward",
    "runs_in_forward",
    "stand_in_survives",
    "statically_known_true",
    "suggest_memory_format",
    "triton_kernel_wrapper_functional",
    "triton_kernel_wrapper_mutation",
    "with_effects",
    "with_states",
    "without_autocast",
    "without_function_modes",
    "without_memory",
]


DISABLED = "_torchdynamo_disable"
"""The attribute by which `torch.compiler.disable` marks a function: a graph ends at its calls."""

SIGNALS = 3
"""Dimensions of a batch of 1-D signals: samples, channels, length."""

_entry = getattr(dynamo_config, "_config", {}).get("allow_rnn")
SETTINGS_OF_THREADS = isinstance(getattr(_entry, "user_override", None), ContextVar)
"""Whether dynamo's settings belong to a thread (since torch 2.13) or to the process (before)."""


def default_partition(
    joint: GraphModule, joint_inputs: Any, **options: Any
) -> tuple[GraphModule, GraphModule]:
    """Split a joint graph by torch's own partitioner into calls with the inputs that the trace has.

    The setting is off because torch would otherwise make both calls on a GPU take generators as
    extra inputs, for random ops that run again.
    """
    with config.patch(graphsafe_rng_functionalization=False):
        parts: tuple[GraphModule, GraphModule]
        parts = partitioners.default_partition(joint, joint_inputs, **options)
    return parts


def partition_later(
    joint: GraphModule, forward_outputs: int, static_inputs: Sequence[int]
) -> tuple[GraphModule, GraphModule]:
    """`default_partition` after AOTAutograd is done: torch's passes look for the fake mode."""
    described = (n.meta.get("val") for n in joint.graph.find_nodes(op="placeholder"))
    mode = next(val.fake_mode for val in described if isinstance(val, FakeTensor))
    with tracing(TracingContext(mode)):
        return default_partition(
            joint,
            None,
            num_fwd_outputs=forward_outputs,
            static_lifetime_input_indices=list(static_inputs),
        )


_KERNELS = {
    "compile_threads": 1,  # a pool of processes does not help with one kernel at a time
    "deterministic": True,  # today's fastest kernel may round differently than tomorrow's
    "joint_graph_constant_folding": False,  # it turns `x + full(0)` into `x`, in the same memory
    "triton.autotune_pointwise": False,  # trials need memory that no plan counts
    "triton.cudagraphs": False,  # they keep memory that no plan counts
}


def by_inductor(
    module: GraphModule, given: Sequence[torch.Tensor]
) -> Callable[..., Sequence[torch.Tensor]]:
    """Compile `module` with Inductor, for tensors with the layouts of `given`.

    Raises whatever Inductor raises.
    """
    # Imported here because it loads much that nothing else needs.
    from torch._inductor.compile_fx import compile_fx  # noqa: PLC0415 - see above

    mode = FakeTensorMode(shape_env=ShapeEnv())
    with (
        _disable_current_modes(),
        torch.no_grad(),
        without_autocast(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # torch warns about code that no user wrote
        with mode:
            fakes = [
                torch.empty(
                    t.untyped_storage().nbytes() // t.itemsize, dtype=t.dtype, device=t.device
                ).as_strided(t.shape, t.stride(), t.storage_offset())
                for t in given
            ]
        with tracing(TracingContext(mode)):
            compiled: Any = compile_fx(module, fakes, config_patches=_KERNELS | _caching())
    kernel: Callable[..., Sequence[torch.Tensor]] = compiled
    return kernel


def _caching() -> dict[str, Any]:
    """Inductor's settings for caching kernels.

    Up to torch 2.11 at least, the cache's key lacks the default dtype, so caching is off if that is
    not float32.
    """
    usual = torch.get_default_dtype() is torch.float32
    return {} if usual else {"fx_graph_cache": False, "fx_graph_remote_cache": False}


def boxed(module: GraphModule) -> Callable[[list[Any]], Any]:
    """Return `module` as a call that empties its argument list, so each dies at its last use.

    The caller of an ordinary call holds the arguments until it returns; for a backward call these
    are all that was saved. Tensors of subclasses are passed as plain tensors (`plain`). A view that
    does not fit the tensor that a kernel really made becomes a copy. Changes how `module` itself is
    called.
    """
    for op in VIEWS:
        for node in module.graph.find_nodes(op="call_function", target=op):
            node.target = torch.ops.aten.reshape.default
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    forward: Callable[[list[Any]], Any] = module.forward

    def call(args: list[Any]) -> Any:
        args[:] = map(plain, args)
        return forward(args)

    call._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's mark for boxed calls
    return call


def carry_sources(module: GraphModule, copy: GraphModule, copies: Mapping[Node, Any]) -> None:
    """Copy to `copy` what dynamo recorded about the inputs of `module`: which are parameters.

    `copies`: nodes of `module` -> nodes of the copy, or the numbers that replace them.
    """
    copy.meta.update(module.meta)
    if hasattr(module, "_param_name_to_source"):
        copy._param_name_to_source = module._param_name_to_source
    for node in module.graph.find_nodes(op="placeholder"):
        if isinstance(copies[node], Node) and hasattr(node, "_dynamo_source"):
            copies[node]._dynamo_source = node._dynamo_source


def plain(given: Any) -> Any:
    """Return a tensor of a subclass, such as MONAI's, as a plain tensor: it was traced as one."""
    if isinstance(given, torch.Tensor) and type(given) not in (torch.Tensor, torch.nn.Parameter):
        return given.as_subclass(torch.Tensor)
    return given


def as_it_lies(given: Any, *, conj: bool = False, neg: bool = False) -> Any:
    """Return what must be in memory so that reading it with `conj` and `neg` gives `given`.

    If `given` is stored that way already, the result is a view of its memory, else a copy.
    """
    if not isinstance(given, torch.Tensor):
        return given
    turned = given.conj() if conj else given
    turned = torch._neg_view(turned) if neg else turned
    return turned.resolve_conj().resolve_neg()


def without_autocast() -> AbstractContextManager[None]:
    """Turn autocast off: its casts are already in the graphs."""
    off: AbstractContextManager[None] = torch._C._DisableAutocast()
    return off


@contextmanager
def without_function_modes() -> Iterator[None]:
    """Turn function modes off: their effect is already in dynamo's graphs."""
    with TorchFunctionModeStackStateManager():
        yield


def noticing_changes() -> AbstractContextManager[None]:
    """Let what dynamo compiles check, in later calls, whether modules were given or lost hooks.

    By default it does not. Before torch 2.13 it does not check either whether parameters were
    frozen, or are not any more: gradients would be missing. Settings belong to the process there,
    so there that one alone is changed.
    """
    return _CHECKING


def leaving_uncompiled() -> AbstractContextManager[None]:
    """Let dynamo run uncompiled any code that it fails to trace, whatever the error.

    By default it raises most errors. If the code is wrong, plain PyTorch raises its own error.
    """
    return _LEAVING_UNCOMPILED


class _Setting(AbstractContextManager[None]):
    """Changes a setting of the process as long as any thread is in this context."""

    def __init__(self, setting: str, *, value: bool) -> None:
        self.setting, self.value = setting, value
        self._lock, self._inside, self._before = threading.RLock(), 0, value

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = getattr(dynamo_config, self.setting)
                setattr(dynamo_config, self.setting, self.value)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                setattr(dynamo_config, self.setting, self._before)


def _setting(setting: str, *, value: bool) -> AbstractContextManager[None]:
    """A context for all calls of all threads, also within each other.

    There is one for each setting: where settings belong to threads, each context that a thread has
    entered stays with it.
    """
    if SETTINGS_OF_THREADS:
        changed: AbstractContextManager[None] = dynamo_config.patch(setting, value)
        return changed
    return _Setting(setting, value=value)


_CHECKING = _setting(
    "skip_nnmodule_hook_guards"
    if SETTINGS_OF_THREADS
    else "skip_tensor_guards_with_matching_dict_tags",
    value=False,
)
_LEAVING_UNCOMPILED = _setting("suppress_errors", value=True)


@contextmanager
def as_dynamo_compiles() -> Iterator[None]:
    """Compile as dynamo does: one thread at a time, with the caller's modes turned off."""
    with compile_lock, _disable_current_modes(), without_function_modes():
        yield


@contextmanager
def as_if_compiled() -> Iterator[None]:
    """Let `torch.compiler.is_compiling()` be true: libraries then do not read values of tensors.

    Without a lock: only `trace_as_run` uses it, in the main thread of a command. It could not run
    in two threads anyway, as its caller resets torch's compiler and replaces the model's tensors.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def compiles_autograd() -> bool:
    """Whether compiled autograd is enabled: it copies the backward graph that AOTAutograd saw."""
    return bool(compiled_autograd.compiled_autograd_enabled)


def keeps_graph() -> bool:
    """Inside backward: whether the caller set `retain_graph`."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def is_batched(tangent: Any) -> bool:
    """Whether a tangent stands for several: `torch.autograd.grad` with `is_grads_batched`."""
    # vmap sets one of two keys, depending on its kind; torch exposes only their names.
    return isinstance(tangent, torch.Tensor) and "Batched" in str(torch._C._dispatch_keys(tangent))


def must_run_uncompiled() -> bool:
    """Whether calls must run uncompiled at the moment: inside a transform, a mode or a jit trace.

    If torch.compile first meets code there, it leaves that code uncompiled for good, in later calls
    elsewhere too.
    """
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    transformed |= forward_ad._current_level >= 0
    for mode in _get_current_dispatch_mode_stack():
        # torch.compile ignores torch's own modes, such as fake tensors; the code it makes does not.
        transformed |= mode.is_infra_mode() or not mode.ignore_compile_internals()
    return transformed or torch._C._get_tracing_state() is not None


def stand_in_survives() -> bool:
    """Whether a tensor saved now remains the same object until its autograd graph dies.

    Saved-tensor hooks may keep a copy in its place. Those of torch.utils.checkpoint do not: they
    drop what the first forward saved, and keep what the second one saves.
    """
    return _saved_tensor_hooks() is None or under_checkpoint()


def under_checkpoint() -> bool:
    """Whether this is the first forward call of code that torch.utils.checkpoint runs again."""
    hooks = _saved_tensor_hooks()
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def _saved_tensor_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def runs_in_backward(node: torch.fx.Node) -> bool:
    """Whether the tracer tagged `node` as recorded while it differentiated."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def tag_as_backward(node: torch.fx.Node) -> None:
    """Tag `node` as if it had been recorded while the tracer differentiated."""
    node.meta["partitioner_tag"] = "is_backward"


def runs_in_forward(node: torch.fx.Node) -> bool:
    """Whether the tracer tagged `node` as recorded before it differentiated."""
    return node.meta.get("partitioner_tag") in ("is_forward", "must_be_in_forward")


def marked_as_backward(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node's metadata for a copy of the node that backward runs (`runs_in_backward`)."""
    return {**meta, "partitioner_tag": "is_backward"}


def is_within(joint_inputs: Any) -> bool:
    """Whether a joint graph belongs to a region that a surrounding graph calls.

    torch passes no inputs for such a graph; for every other graph it passes a tuple of two.
    """
    return not joint_inputs


def mutated_inputs(output: torch.fx.Node, inputs: Sequence[torch.fx.Node]) -> tuple[int, ...]:
    """Positions of forward `inputs` that AOTAutograd overwrites after the forward call.

    They are read from the descriptors on the joint graph. The index in a descriptor is not used: it
    counts the caller's arguments, and inputs that overlap come as one. Raises CaptureError if an
    input is not found.
    """
    known = [node.meta.get("desc") for node in inputs]
    wanted = (getattr(desc, "mutated_input", None) for desc in output.meta.get("desc", ()))
    found = [source for source in wanted if source is not None]
    if any(source not in known for source in found):
        raise CaptureError(reason="an overwritten input cannot be distinguished from the others")
    return tuple(map(known.index, found))


def normalized_by_cudnn(of: torch.Tensor, *rest: torch.Tensor, eps: float) -> bool:
    """Whether plain PyTorch would normalize batches of `of` by cuDNN when it trains.

    `rest`: weight, bias, running mean and variance.
    """
    backend: Any = torch._C._select_batch_norm_backend(of, *rest, True, eps)
    cudnn: Any = torch._C._BatchNormBackend.Cudnn  # type: ignore[attr-defined]  # the stubs lack it
    return bool(backend == cudnn)


def cudnn_reserve_bytes(of: torch.Tensor) -> int:
    """Bytes that cuDNN passes from forward to backward of a normalization of `of`.

    0 without a GPU, where cuDNN cannot be asked; it is usually 0 anyway.
    """
    if not torch.cuda.is_available():
        return 0
    ask: Any = torch._C._get_cudnn_batch_norm_reserve_space_size  # type: ignore[attr-defined]  # the stubs lack it
    return int(ask(of, True))


def layout_if_input_unread(
    of: torch.Tensor, weight: torch.Tensor, bias_sides: Sequence[int] | None, *settings: Any
) -> torch.memory_format | None:
    """Return the layout a convolution's input needs for a kernel that reads only its layout.

    Kernels of cuDNN and oneDNN that make the input's gradient do not read the input; torch lays it
    out for them first. Returns None if torch would use another kernel, and for 1-D inputs: torch
    makes a 2-D view of these first, and a tensor without memory has no views. `settings` are the
    remaining arguments of torch's op.
    """
    if of.dim() == SIGNALS:
        return None
    ask: Any = torch._C._select_conv_backend
    backend = ask(of, weight, None, *settings, bias_sides)
    backends: Any = torch._C._ConvBackend  # type: ignore[attr-defined]  # the stubs lack it
    if backend not in (backends.Cudnn, backends.Mkldnn):
        return None
    lies: Any = torch._C._conv_determine_backend_memory_format
    found: torch.memory_format = lies(of, weight, backend)
    return found


def without_memory(
    sides: Sequence[int], strides: Sequence[int], like: torch.Tensor
) -> torch.Tensor:
    """Return a tensor in a storage of zero bytes, with the dtype and device of `like`.

    A kernel must not read it; torch refuses to make views of it.
    """
    nothing = torch.empty(0, dtype=like.dtype, device=like.device)
    lying: torch.Tensor = _reinterpret_tensor(nothing, tuple(sides), tuple(strides), 0)
    return lying
