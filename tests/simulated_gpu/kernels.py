"""kernels: run the CPU's kernels on the streams and in the memory of the simulated GPU.

Every torch op with a CUDA kernel gets a replacement. It computes the results' shapes on the meta
device, allocates them by torch's CUDA allocator, and hands the work to the current stream's thread.
The host goes on, as with a GPU. It waits only if it needs a result's value.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tests.simulated_gpu.attention import ATTENTION, DRAWING
from tests.simulated_gpu.duration import KEPT_BYTES, PRODUCTS, seconds, workspace_bytes

COMPUTES = os.environ.get("SIMULATED_GPU_COMPUTES", "1") != "0"
"""If False, ops use a GPU's time and memory but compute nothing: steps of any size can run."""

_AS_THEY_ARE = {
    *("empty", "empty_strided", "_efficientzerotensor", "resize_", "set_", "is_set_to"),
    *("record_stream", "_local_scalar_dense", "_fused_sdp_choice"),
}
"""Not replaced, as they run no kernel. Ops that make views are not replaced, either."""
_BESIDES = {"convolution", "convolution_backward", "copy_", "native_dropout"}
"""Replaced in any case: else torch would compose them of other ops, such as cuDNN's."""
_CYCLES_PER_SECOND = 2e9
_SEEDS = 1 << 62

_Args = Sequence[Any]
_Kwargs = Mapping[str, Any]
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Streams:
    """Hands work to the threads that are the streams."""

    def __init__(self) -> None:
        self.runtime = ctypes.CDLL(None)  # preloaded
        self.runtime.cudaStreamSynchronize.argtypes = [ctypes.c_void_p]
        self.runtime.cudaLaunchHostFunc.argtypes = [ctypes.c_void_p, _CALLBACK, ctypes.c_void_p]
        self.runtime.simulated_gpu_sleep.argtypes = [ctypes.c_void_p, ctypes.c_double]
        self.runtime.cudaMemcpyAsync.argtypes = [
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        ]
        self.runtime.simulated_gpu_is_pinned.argtypes = [ctypes.c_void_p]
        self.work: dict[int, Callable[[], None]] = {}
        self.numbers = itertools.count(1)
        self.errors: list[BaseException] = []
        self.kept: dict[tuple[int, int], Tensor] = {}
        """Thread and stream -> what the library for matrix products keeps for them."""
        self.callback = _CALLBACK(self._serve)
        atexit.register(
            self.runtime.cudaDeviceSynchronize
        )  # the threads need Python until they are done

    def _serve(self, number: int) -> None:
        try:
            with torch.inference_mode():  # it may write to inference tensors and to others
                self.work.pop(number)()
        except BaseException as error:  # noqa: BLE001 - no caller could catch it
            traceback.print_exc()
            self.errors.append(error)

    def launch(self, work: Callable[[], None]) -> None:
        """Make the current stream do `work`. Raises errors of earlier work here, as torch does."""
        if self.errors:
            raise self.errors.pop()
        if error := self.runtime.cudaGetLastError():
            raise RuntimeError(f"CUDA error {error} of an earlier call")
        number = next(self.numbers)
        self.work[number] = work
        self.runtime.cudaLaunchHostFunc(_stream(), self.callback, number)

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Make the current stream copy memory between host and device."""
        kind = 4  # cudaMemcpyDefault: the addresses say the direction
        at = to.data_ptr(), source.data_ptr(), to.numel() * to.element_size()
        self.runtime.cudaMemcpyAsync(*at, kind, _stream())
        host = to if source.is_cuda else source
        if self.runtime.simulated_gpu_is_pinned(host.data_ptr()):
            self.launch(lambda: _keep(host))  # torch does not reuse it before, either

    def wait(self, what: object) -> None:
        """Make the host wait. Raises RuntimeError if torch's sync debug mode forbids it."""
        if torch.cuda.get_sync_debug_mode() > 1:
            raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
        self.runtime.cudaStreamSynchronize(_stream())

    def keep_for_products(self, op: torch._ops.OpOverload) -> None:
        """Allocate what a library keeps once `op`, a matrix product, ran on this stream."""
        key = threading.get_ident(), _stream()
        if op.overloadpacket.__name__ in PRODUCTS and key not in self.kept:
            self.kept[key] = torch.empty(KEPT_BYTES, dtype=torch.uint8, device="cuda")

    def sleep(self, cycles: int) -> None:
        """`torch.cuda._sleep`."""
        self.pass_time(cycles / _CYCLES_PER_SECOND)

    def pass_time(self, seconds: float) -> None:
        """Keep the current stream busy for some seconds."""
        self.runtime.simulated_gpu_sleep(_stream(), seconds)


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def _alias(tensor: Tensor) -> Tensor:
    """A CPU tensor over the memory of a device tensor; it does not keep that memory alive."""
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    if not nbytes:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_ubyte * nbytes).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    alias = torch.empty(0, dtype=tensor.dtype)
    alias.set_(flat, tensor.storage_offset(), tensor.size(), tensor.stride())
    return alias.conj() if tensor.is_conj() else alias


def _elsewhere(device: str, tensor: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return tensor(value)
        if isinstance(value, torch.device):
            return torch.device(device)
        return None if isinstance(value, torch.Generator) else value

    return moved


def _described(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


# A CPU tensor without dimensions stays: torch expects it there among device tensors.
_ON_META = _elsewhere(
    "meta", lambda each: each if each.is_cpu and not each.dim() else _described(each)
)
# CPU tensors are cloned: the host may change them as soon as the call returns.
_ON_CPU = _elsewhere("cpu", lambda tensor: _alias(tensor) if tensor.is_cuda else tensor.clone())


def _like(value: Any) -> Any:
    """An empty device tensor like `value`; numbers, None and CPU tensors are returned as is."""
    if not isinstance(value, Tensor) or value.is_cpu:
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cuda")


def _reshape(tensor: Tensor, like: Tensor) -> None:
    if tensor.size() != like.size():
        tensor.resize_(like.size())
        if tensor.stride() != like.stride():
            tensor.as_strided_(like.size(), like.stride())


def _next_generator(*, goes_on: bool = True) -> torch.Generator:
    """A CPU generator seeded by the device generator's state, which `goes_on` advances."""
    generator = torch.cuda.default_generators[0]
    seed, offset = generator.initial_seed(), generator.get_offset()
    if goes_on:
        generator.set_offset(offset + 4)
    return torch.Generator().manual_seed((seed * 1_000_003 + offset) % _SEEDS)


class _Kernel:
    """One op's CUDA kernel, which runs `compute` on the CPU."""

    def __init__(
        self, streams: _Streams, op: torch._ops.OpOverload, compute: Callable[..., Any] | None
    ) -> None:
        self.streams, self.op, self.compute = streams, op, compute or op
        arguments = op._schema.arguments
        self.names = [each.name for each in arguments]
        self.outs = [each.name for each in arguments if each.is_out]
        self.written = {
            next(iter(each.alias_info.before_set), None): number
            for number, each in enumerate(arguments)
            if each.alias_info is not None and each.alias_info.is_write
        }
        self.returns = op._schema.returns
        draws = torch.Tag.nondeterministic_seeded in op.tags
        self.seeds = compute in DRAWING
        """Whether its results include the seed, and only calls with dropout draw numbers."""
        self.is_random = draws and ("generator" in self.names or compute is _dropout)
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        self.needs_values = compute is None and (
            bool(tags & set(op.tags))
            or any(
                each.alias_info is None and "Tensor" not in str(each.type) for each in self.returns
            )
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            # This may move tensors given as `out`, so their memory is looked up only after it.
            described = None if self.needs_values else self._describe(args, kwargs)
            work = self._work(*tree_map(_ON_CPU, (args, kwargs)))
            if described is None:
                self.streams.wait(self.op)
                with torch.inference_mode():
                    fresh = self._fresh(work())
                values = [tree_map(self._brought, value) for value in fresh]
                return self._results(values, args, kwargs)
            made = [tree_map(_like, value) for value in described]
            if COMPUTES:
                self._launch(work, made)
            else:
                self.streams.keep_for_products(self.op)
                nbytes = workspace_bytes(self.op, args, made)
                workspace = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
                self.streams.pass_time(seconds(self.op, args, kwargs, made))
                del workspace
            return self._results(made, args, kwargs)

    def _work(self, args: _Args, kwargs: _Kwargs) -> Callable[[], Any]:
        """A function that runs the op on the CPU."""
        given = dict(kwargs)
        if self.is_random or (self.seeds and self._drops_out(args, kwargs)):
            given["generator"] = _next_generator()

        def work() -> Any:
            return self.compute(*args, **given)

        return work

    def _describe(self, args: _Args, kwargs: _Kwargs) -> list[Any] | None:
        """The new results on the meta device; None if torch needs values to know them."""
        if not self.outs and not self._fresh_returns():
            return []
        meta_args, meta_kwargs = tree_map(_ON_META, (args, dict(kwargs)))
        if self.seeds and self._drops_out(args, kwargs):
            meta_kwargs["generator"] = _next_generator(goes_on=False)
        try:
            result = self.compute(*meta_args, **meta_kwargs)
        except (NotImplementedError, RuntimeError, TypeError):
            return None
        for name in self.outs:
            _reshape(kwargs[name], meta_kwargs[name])
        return self._fresh(result)

    def _drops_out(self, args: _Args, kwargs: _Kwargs) -> bool:
        share = dict(zip(self.names, args, strict=False)) | dict(kwargs)
        return bool(share.get("dropout_p"))

    def _launch(self, work: Callable[[], Any], made: list[Any]) -> None:
        leaves = tree_leaves(made)
        places = [i for i, each in enumerate(leaves) if isinstance(each, Tensor) and each.is_cuda]
        targets = [_alias(leaves[place]) for place in places]

        def run() -> None:
            values = tree_leaves(self._fresh(work()))
            for target, place in zip(targets, places, strict=True):
                value = values[place]
                if value is not None and value.numel():
                    target.copy_(value)  # the CPU omits results that CUDA's kernels leave undefined

        self.streams.launch(run)

    def _brought(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        made = _like(_described(value))
        _alias(made).copy_(value)
        return made

    def _fresh_returns(self) -> list[Any]:
        return [each for each in self.returns if each.alias_info is None]

    def _fresh(self, result: Any) -> list[Any]:
        """A call's results that are not arguments."""
        results = (result,) if len(self.returns) == 1 else result or ()
        pairs = zip(results, self.returns, strict=True)
        return [value for value, each in pairs if each.alias_info is None]

    def _results(self, fresh: Iterable[Any], args: _Args, kwargs: _Kwargs) -> Any:
        left, results = iter(fresh), []
        for each in self.returns:
            if each.alias_info is None:
                results.append(next(left))
                continue
            number = self.written[next(iter(each.alias_info.before_set))]
            name = self.names[number]
            results.append(kwargs[name] if name in kwargs else args[number])
        if len(results) == 1:
            return results[0]
        return tuple(results) if results else None


class _Copy:
    """`copy_`, which uses the link if one side is on the host."""

    def __init__(self, streams: _Streams) -> None:
        self.streams = streams

    def __call__(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        with _disable_current_modes():
            if not to.numel():
                return to
            if to.is_cuda and source.is_cuda and not COMPUTES:
                self.streams.pass_time(seconds(torch.ops.aten.copy_.default, (to, source), {}, []))
            elif to.is_cuda and source.is_cuda:
                target, value = _alias(to), _alias(source)
                self.streams.launch(lambda: _assign(target, value))
            elif _same_layout(to, source):
                self.streams.copy(to, source)
                if not non_blocking:
                    self.streams.wait("copy_")
            else:
                self.streams.wait("copy_")
                _assign(*(_alias(each) if each.is_cuda else each for each in (to, source)))
            return to


def _keep(_: Tensor) -> None:
    pass


def _assign(to: Tensor, source: Tensor) -> None:
    to.copy_(source)


def _same_layout(one: Tensor, other: Tensor) -> bool:
    def described(tensor: Tensor) -> tuple[Any, ...]:
        return tensor.dtype, tensor.size(), tensor.stride(), tensor.is_conj(), tensor.is_neg()

    return described(one) == described(other) and _is_dense(one)


def _is_dense(tensor: Tensor) -> bool:
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    return span == tensor.numel()


def _dropout(
    of: Tensor, share: float, train: bool | None, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """`native_dropout`."""
    if not train:
        return of.clone(), torch.ones_like(of, dtype=torch.bool)
    kept = torch.empty_like(of, dtype=torch.bool).bernoulli_(1 - share, generator=generator)
    return of * kept / (1 - share), kept


def _batch_norm(of: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """`cudnn_batch_norm`."""
    is_training = rest[4]
    reserve = of.new_zeros(RESERVE_BYTES if is_training else 0, dtype=torch.uint8)
    return *torch.ops.aten.native_batch_norm(of, *rest), reserve


def _batch_norm_backward(of: Tensor, gradient: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """`cudnn_batch_norm_backward`."""
    *given, epsilon, _reserve = rest
    backward = torch.ops.aten.native_batch_norm_backward
    result: tuple[Tensor, ...] = backward(gradient, of, *given, True, epsilon, [True] * 3)
    return result


def _layer_norm_backward(
    gradient: Tensor, of: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor, *rest: Any
) -> tuple[Tensor | None, ...]:
    """`native_layer_norm_backward`: CUDA keeps mean and rstd in float32, the CPU as the input."""
    backward = torch.ops.aten.native_layer_norm_backward
    given = mean.to(of.dtype), rstd.to(of.dtype)
    result: tuple[Tensor | None, ...] = backward(gradient, of, shape, *given, *rest)
    return result


def _histc(of: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:  # noqa: A002 - torch's names
    """`histc`, for which the CPU does not support integers."""
    counts: Tensor = torch.ops.aten.histc(of.double(), bins, min, max)
    return counts.to(of.dtype)


def _in_float(op: torch._ops.OpOverloadPacket) -> Callable[..., Any]:
    """`op` computed in float32 for bfloat16 and float16, which the CPU's kernel lacks."""

    def computed(*args: Any, **kwargs: Any) -> Any:
        dtype = args[0].dtype
        if dtype not in (torch.bfloat16, torch.float16):
            return op(*args, **kwargs)
        given = (each.float() if isinstance(each, Tensor) else each for each in args)
        return op(*given, **kwargs).to(dtype)

    return computed


RESERVE_BYTES = 64
_BY_OTHERS: dict[str, Callable[..., Any]] = {
    "avg_pool3d": _in_float(torch.ops.aten.avg_pool3d),
    "avg_pool3d_backward": _in_float(torch.ops.aten.avg_pool3d_backward),
    "histc": _histc,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_dropout": _dropout,
    "cudnn_batch_norm": _batch_norm,
    "cudnn_batch_norm_backward": _batch_norm_backward,
    **ATTENTION,
}
"""Ops that the CPU lacks or supports only in part, made of ops that it has."""


def install() -> torch.library.Library:
    """Replace CUDA's kernels for as long as the returned library lives."""
    disabled: Any = torch._disable_dynamo  # type: ignore[attr-defined]  # the stubs lack it
    streams, library = _Streams(), torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # torch warns of the first replacement
        for full_name in torch._C._dispatch_get_all_op_names():
            namespace, _, name = full_name.partition("::")
            if namespace == "aten" and (kernel := _kernel(streams, name)) is not None:
                # Else Dynamo would trace this Python code where it resumes after a graph break.
                library.impl(name, disabled(kernel), "CUDA", allow_override=True)
    torch.cuda._sleep = streams.sleep
    torch._C._get_cudnn_batch_norm_reserve_space_size = lambda *_: RESERVE_BYTES  # type: ignore[attr-defined]  # the stubs lack it
    return library


def _kernel(streams: _Streams, name: str) -> Callable[..., Any] | None:
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    op = getattr(packet, overload or "default", None)

    def has(key: str) -> bool:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key))

    if op is None or base in _AS_THEY_ARE or not (has("CUDA") or base in _BESIDES):
        return None
    if any(each.alias_info and not each.alias_info.is_write for each in op._schema.returns):
        return None
    if name == "copy_":
        return _Copy(streams)
    keys = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    if base in _BY_OTHERS or base in _BESIDES or any(map(has, keys)):
        return _Kernel(streams, op, _BY_OTHERS.get(base))
    return None
