"""Gradients of convolutions: computed one by one, bitwise equal to PyTorch's single op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outcore import Backend
from outcore.capture.compiler.compat import layout_if_input_unread
from outcore.capture.rewrites import convolution, metadata_only
from outcore.errors import InfeasibleError
from outcore.measure import metered
from tests.cpu.training import inside, same, trained

ATEN = torch.ops.aten
WHOLE, INPUT = "aten.convolution_backward.default", "outcore.convolution_input_gradient.default"
MIB = 1 << 20


def settings(
    sides: int, *, step: int = 1, dilation: int = 1, groups: int = 1, kernel: int = 3
) -> list[Any]:
    """The arguments of PyTorch's op that describe a convolution."""
    padding = [kernel // 2 * dilation] * sides
    return [[step] * sides, padding, [dilation] * sides, False, [0] * sides, groups]


def cases() -> Iterator[Any]:
    for sides in (2, 3):
        for name, how in {
            "plain": {},
            "step": {"step": 2},
            "dilation": {"dilation": 2},
            "groups": {"groups": 2},
            "depthwise": {"groups": 8},
            "pointwise": {"kernel": 1},
        }.items():
            yield pytest.param(sides, how, id=f"{name}{sides}d")


def needs_kernels(dtype: torch.dtype) -> None:
    """Skip the test if oneDNN has no kernels for the dtype on this processor."""
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no kernels for bfloat16 on this processor")


@pytest.fixture
def two_threads() -> Iterator[None]:
    """With one thread, PyTorch does not use oneDNN for pointwise convolutions."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("sides", "how"), [*cases()])
def test_the_gradient_of_the_input_alone(
    sides: int, how: dict[str, int], dtype: torch.dtype, last: bool
) -> None:
    needs_kernels(dtype)
    random = torch.Generator().manual_seed(0)
    kernel, groups = how.get("kernel", 3), how.get("groups", 1)
    x = torch.randn(2, 8, *[10] * sides, generator=random).to(dtype)
    weight = torch.randn(16, 8 // groups, *[kernel] * sides, generator=random).to(dtype)
    if last:
        lies = torch.channels_last if sides == 2 else torch.channels_last_3d
        x, weight = x.to(memory_format=lies), weight.to(memory_format=lies)
    rest = settings(sides, **how)
    tangents = torch.randn_like(ATEN.convolution(x, weight, None, *rest))
    laid_out = layout_if_input_unread(x, weight, [16], *rest)
    assert laid_out is not None
    of_input, of_weight, _ = ATEN.convolution_backward(
        tangents, x, weight, [16], *rest, [True, True, True]
    )
    strides = torch.empty_like(x, memory_format=laid_out).stride()
    alone = convolution.INPUT_GRADIENT(tangents, x.shape, strides, weight, [16], *rest)
    assert torch.equal(alone, of_input)
    assert alone.stride() == of_input.stride()
    first = ATEN.convolution_backward(tangents, x, weight, [16], *rest, [False, True, True])[1]
    assert torch.equal(first, of_weight)


def test_the_input_has_no_memory_meanwhile() -> None:
    weight, tangents = torch.randn(4, 16, 3, 3), torch.randn(4, 4, 128, 128)
    sides, rest = [4, 16, 128, 128], settings(2)

    def call(memory: Tensor | None) -> Tensor:
        if memory is None:
            strides = [16 * 128 * 128, 128 * 128, 128, 1]
            alone: Tensor = convolution.INPUT_GRADIENT(
                tangents, sides, strides, weight, None, *rest
            )
            return alone
        mask = [True, False, False]
        made: Tensor = ATEN.convolution_backward(tangents, memory, weight, None, *rest, mask)[0]
        return made

    x = torch.randn(sides)
    expected, with_memory = metered(lambda: call(x))
    found, without = metered(lambda: call(None))
    assert torch.equal(found, expected)
    spans = with_memory.peak_bytes(0, 1 << 62), without.peak_bytes(0, 1 << 62)
    assert abs(spans[1] - spans[0]) < MIB, "what it takes is the gradient's, once"


def test_another_kernel_than_was_captured_finds_memory() -> None:
    weight, tangents = torch.randn(8, 4, 3, 3), torch.randn(2, 8, 12, 12)
    sides, strides, rest = [2, 4, 12, 12], [576, 144, 12, 1], settings(2)
    mask = [True, False, False]
    x = torch.randn(sides)
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        assert layout_if_input_unread(x, weight, [8], *rest) is None
        found = convolution.INPUT_GRADIENT(tangents, sides, strides, weight, [8], *rest)
        expected = ATEN.convolution_backward(tangents, x, weight, [8], *rest, mask)[0]
    finally:
        torch._C._set_mkldnn_enabled(before)
    assert torch.equal(found, expected)


class Net(nn.Module):
    """Convolutions, some of them with an input larger than the result."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.grow = nn.Conv2d(2, 32, 3, padding=1, bias=bias)
        self.same = nn.Conv2d(32, 32, 3, padding=1, bias=bias)
        self.shrink = nn.Conv2d(32, 8, 3, padding=1, bias=bias)
        self.last = nn.Conv2d(8, 2, 3, padding=1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.grow(x))
        for _ in range(3):
            x = torch.tanh(self.same(x))
        x = torch.tanh(self.shrink(x))
        return torch.tanh(self.last(x))


def targets(backend: Backend) -> list[str]:
    assert backend.engine is not None
    (graph,) = backend.engine.graphs
    return [op.target for op in graph.captured.trace.ops if "convolution_" in op.target]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_steps_are_those_of_plain_torch(bias: bool, autocast: bool) -> None:
    needs_kernels(torch.bfloat16 if autocast else torch.float32)
    given = (4, 2, 128, 128)
    expected = trained("aot_eager", Net(bias=bias), *given, steps=1, autocast=autocast)
    roomy = Backend(budget="1GiB")
    found = trained(roomy, Net(bias=bias), *given, autocast=autocast)
    assert same([found], [expected])
    assert targets(roomy) == [WHOLE, INPUT] * 5 + [WHOLE]  # none for the first one's input
    report = roomy.report()
    inside(report)
    assert report.measured_peak_bytes is not None
    tight = Backend(budget=report.measured_peak_bytes * 3 // 4)
    assert same([trained(tight, Net(bias=bias), *given, autocast=autocast)], [expected])
    assert tight.report().state == "planned"
    inside(tight.report())


def test_a_budget_is_enough_that_has_no_room_for_both_gradients_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """32 maps go in, 8 come out: 8 MiB and 2 MiB; both gradients at once need 18 MiB or more."""

    def net() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 32, 3, padding=1), nn.Conv2d(32, 8, 3, padding=1))

    given = (4, 2, 128, 128)
    backend = Backend(budget="28MiB")
    found = trained(backend, net(), *given)
    inside(backend.report())
    assert same([found], [trained("aot_eager", net(), *given, steps=1)])
    monkeypatch.setattr(metadata_only, "LEAST_BYTES", 1 << 60)
    with pytest.raises(InfeasibleError, match="convolution_backward"):
        trained(Backend(budget="28MiB"), net(), *given)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Sequential(nn.Conv2d(2, 8, 3), nn.ConvTranspose2d(8, 2, 3)), (2, 2, 64, 64)),
        (lambda: nn.Sequential(nn.Conv1d(2, 8, 3), nn.Conv1d(8, 2, 3)), (2, 2, 4096)),
        (lambda: nn.Sequential(nn.Conv2d(2, 8, 3), nn.Conv2d(8, 2, 3)), (2, 2, 16, 16)),
    ],
    ids=["transposed", "one side", "small"],
)
def test_what_stays_one_op(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if request.node.callspec.id != "small":
        monkeypatch.setattr(metadata_only, "LEAST_BYTES", 0)
    backend = Backend(budget="1GiB")
    found = trained(backend, make(), *shape, steps=2)
    assert targets(backend) == [WHOLE, WHOLE]
    assert same([found], [trained("aot_eager", make(), *shape, steps=1)])


@pytest.mark.parametrize(
    ("frozen", "found"),
    [(("weight",), [WHOLE, INPUT, WHOLE]), (("weight", "bias"), [INPUT, WHOLE])],
)
def test_of_a_frozen_weight_nothing_is_kept_for_backward(
    frozen: tuple[str, ...], found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata_only, "LEAST_BYTES", 0)

    def net() -> nn.Module:
        module = nn.Sequential(nn.Conv2d(2, 8, 3), nn.Conv2d(8, 2, 3))
        for name in frozen:
            module[1].get_parameter(name).requires_grad = False
        return module

    backend = Backend(budget="1GiB")
    made = trained(backend, net(), 2, 2, 64, 64, steps=2)
    assert targets(backend) == found
    assert same([made], [trained("aot_eager", net(), 2, 2, 64, 64, steps=1)])
    assert backend.engine is not None
    (graph,) = backend.engine.graphs
    trace = graph.captured.trace
    first = next(op for op in trace.ops if op.target == "aten.convolution.default")
    (buffer,) = trace.writes[first.id]
    read = [i for i, buffers in enumerate(trace.reads) if buffer in buffers and i >= trace.boundary]
    assert bool(read) == (len(found) == 3)


@torch.library.custom_op("outcore_tests::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """A copy whose layout differs from the one that its fake kernel describes."""
    return x.clone(memory_format=torch.channels_last)


turned.register_fake(lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))
turned.register_autograd(lambda _, tangents: tangents.clone())


def test_an_input_that_lies_otherwise_than_was_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_only, "LEAST_BYTES", 0)

    class Turning(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = turned(torch.tanh(self.grow(x)))
            return torch.tanh(self.shrink(x))

    backend = Backend(budget="1GiB")
    found = trained(backend, Turning(), 2, 2, 33, 31)
    assert targets(backend)[:2] == [WHOLE, INPUT]
    assert same([found], [trained("aot_eager", Turning(), 2, 2, 33, 31, steps=1)])
    assert backend.engine is not None
    (graph,) = backend.engine.graphs
    assert graph.corrections
    (op,) = (op for op in graph.captured.trace.ops if op.target == INPUT)
    assert op.args[2] == (32 * 33 * 31, 1, 32 * 31, 32)


@pytest.mark.parametrize("turn", ["mT", "cut", "wide"])
def test_an_input_that_lies_otherwise(turn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch copies it for either gradient; the op that reads only its metadata does not."""
    monkeypatch.setattr(metadata_only, "LEAST_BYTES", 0)

    class Turned(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.grow(x))
            x = {"mT": x.mT, "cut": x[:, :, 1:, 1:], "wide": x[:, :, :1].expand_as(x)}[turn]
            return torch.tanh(self.shrink(x))

    backend = Backend(budget="1GiB")
    found = trained(backend, Turned(), 2, 2, 16, 16)
    assert targets(backend)[:2] == [WHOLE, INPUT]
    assert same([found], [trained("aot_eager", Turned(), 2, 2, 16, 16, steps=1)])


def test_there_is_no_such_kernel_for_float64() -> None:
    x, weight = torch.randn(2, 4, 9, 9), torch.randn(8, 4, 3, 3)
    assert layout_if_input_unread(x, weight, None, *settings(2)) is torch.contiguous_format
    assert layout_if_input_unread(x.double(), weight.double(), None, *settings(2)) is None
