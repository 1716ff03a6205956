"""Gradients of pooling and padding need no input, and are bitwise equal to torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from outcore import Backend, aten
from outcore.capture.rewrites import metadata_only, pooling
from outcore.capture.rewrites.pooling import GRADIENTS
from outcore.errors import InfeasibleError
from outcore.measure import metered
from tests.cpu.training import inside, same, trained

ATEN = torch.ops.aten
SIDES = (11, 9, 8)
LAST = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d}
MIB = 1 << 20

Case = tuple[str, list[Any], str, list[Any]]
"""An op's name and its arguments, and the same for the op of its gradient."""


def cases(sides: int) -> Iterator[Case]:
    told: list[Any]
    for kind, margins in product(("reflection", "replication"), ([1, 1], [2, 0])):
        name, told = f"{kind}_pad{sides}d", [margins * sides]
        yield name, told, f"{name}_backward", told
    if sides == 1:
        return  # torch pools over one side with ops for two
    name = f"max_pool{sides}d_with_indices"
    for step, padding, dilation, ceil in product((1, 2), (0, 1), (1, 2), (False, True)):
        told = [[3] * sides, [step] * sides, [padding] * sides, [dilation] * sides, ceil]
        yield name, told, f"{name}_backward", told
    name = f"avg_pool{sides}d"
    for step, padding, ceil, counted, divisor in product(
        (1, 2), (0, 1), (False, True), (False, True), (None, 5)
    ):
        told = [[3] * sides, [step] * sides, [padding] * sides, ceil, counted, divisor]
        yield name, told, f"{name}_backward", told
    for side in (1, 2, 3):
        name = f"_adaptive_avg_pool{sides}d"
        yield name, [[side] * sides], f"{name}_backward", []
        name = f"adaptive_max_pool{sides}d"
        yield name, [[side] * sides], f"{name}_backward", []
        name, told = f"fractional_max_pool{sides}d", [[2] * sides, [side] * sides]
        yield name, told, f"{name}_backward", told


def made(x: Tensor, case: Case) -> tuple[Any, Tensor, list[Any]]:
    """The op of the gradient, tangents, and its other arguments."""
    name, told, backward, rest = case
    if name.startswith("fractional"):
        told = [*told, torch.full((*x.shape[:2], len(told[0])), 0.3, dtype=x.dtype)]
    results = getattr(ATEN, name)(x, *told)
    result, *indices = results if isinstance(results, tuple) else (results,)
    tangents = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
    return getattr(ATEN, backward).default, tangents.to(x.dtype), [*rest, *indices]


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sides", [1, 2, 3])
def test_the_gradient_without_the_input(
    sides: int, dtype: torch.dtype, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> Tensor:
        raise AssertionError("the input has memory")

    monkeypatch.setattr(metadata_only, "with_memory", refused)
    found = set()
    for (n, maps), case in product([(2, 5), (3, 1), (1, 1)], cases(sides)):
        if "avg_pool3d" in case[0] and "adaptive" not in case[0] and dtype.itemsize == 2:
            continue  # torch has no such kernel
        x = torch.randn(n, maps, *SIDES[:sides], generator=torch.Generator().manual_seed(0))
        x = x.to(dtype)
        x = x.to(memory_format=LAST[sides]) if last else x
        theirs, tangents, rest = made(x, case)
        expected = theirs(tangents, x, *rest)
        ours = GRADIENTS[theirs](tangents, x.shape, x.stride(), *rest)
        assert torch.equal(ours, expected), case
        assert ours.stride() == expected.stride(), case
        found.add(theirs)
    assert len(found) >= (2 if sides == 1 else 5)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("sides", [1, 2, 3])
def test_it_is_described_as_torch_describes_its_own(sides: int, last: bool) -> None:
    for case in cases(sides):
        x = torch.randn(2, 3, *SIDES[:sides])
        x = x.to(memory_format=LAST[sides]) if last else x
        theirs, tangents, rest = made(x, case)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(t) if isinstance(t, Tensor) else t for t in (tangents, *rest)]
            expected = theirs(fakes[0], mode.from_tensor(x), *fakes[1:])
            ours = GRADIENTS[theirs](fakes[0], x.shape, x.stride(), *fakes[1:])
        assert (ours.shape, ours.stride(), ours.dtype) == (x.shape, expected.stride(), x.dtype)


def test_the_input_takes_no_memory() -> None:
    x = torch.randn(4, 16, 128, 128)
    theirs, tangents, rest = made(x, ("avg_pool2d", [[2, 2]], "avg_pool2d_backward", []))
    rest = [[2, 2], [2, 2], [0, 0], False, True, None]
    expected = theirs(tangents, x, *rest)
    sides, strides = x.shape, x.stride()
    found, meter = metered(lambda: GRADIENTS[theirs](tangents, sides, strides, *rest))
    assert torch.equal(found, expected)
    assert meter.peak_bytes(0, 1 << 62) < x.nbytes + MIB, "what it takes is the gradient's, once"


def test_an_input_that_would_be_copied_first_has_memory() -> None:
    x = torch.randn(2, 4, 8, 8).mT
    assert not pooling._unread(x)
    theirs = ATEN.avg_pool2d_backward.default
    tangents, rest = torch.randn(2, 4, 4, 4), [[2, 2], [2, 2], [0, 0], False, True, None]
    found = GRADIENTS[theirs](tangents, x.shape, x.stride(), *rest)
    assert torch.equal(found, theirs(tangents, x, *rest))


class Normalized(nn.Module):
    """Divides by neighboring maps, which torch averages as volumes."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = nn.functional.local_response_norm(x, 5)
        return made


def mixed(sides: int) -> nn.Module:
    """Each kind of pooling and padding, after a convolution that needs its gradient."""
    convolution: Any = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[sides]
    kinds: list[Any] = {
        1: [
            nn.ReflectionPad1d(2),
            nn.ReplicationPad1d((0, 3)),
            nn.MaxPool1d(2),
            nn.AvgPool1d(3, 2, 1),
            nn.AdaptiveMaxPool1d(20),
        ],
        2: [
            nn.ReflectionPad2d(1),
            nn.ReplicationPad2d((0, 3, 1, 0)),
            nn.FractionalMaxPool2d(2, 28, _random_samples=torch.full((4, 8, 2), 0.3)),
            nn.MaxPool2d(3, 2, 1, ceil_mode=True),
            nn.AvgPool2d(3, 1, 1, count_include_pad=False),
            nn.AdaptiveMaxPool2d(13),
            nn.AdaptiveAvgPool2d(5),
        ],
        3: [
            nn.ReflectionPad3d(1),
            nn.ReplicationPad3d((0, 1, 2, 0, 0, 1)),
            nn.FractionalMaxPool3d(2, 18, _random_samples=torch.full((2, 8, 3), 0.3)),
            nn.MaxPool3d(2),
            nn.AvgPool3d(3, 1, 1, divisor_override=7),
            nn.AdaptiveMaxPool3d(7),
            nn.AdaptiveAvgPool3d(3),
        ],
    }[sides]
    layers: list[nn.Module] = [convolution(2, 8, 3, padding=1)]
    for kind in kinds:
        layers += [nn.Tanh(), kind, convolution(8, 8, 3, padding=1)]
    return nn.Sequential(*layers, *([Normalized()] if sides == 2 else []))


GIVEN = {1: (4, 2, 128), 2: (4, 2, 32, 32), 3: (2, 2, 18, 18, 18)}
FOUND = {
    1: [
        "adaptive_max_pool2d",
        "avg_pool2d",
        "max_pool2d_with_indices",
        "replication_pad1d",
        "reflection_pad1d",
    ],
    2: [
        "avg_pool3d",
        "_adaptive_avg_pool2d",
        "adaptive_max_pool2d",
        "avg_pool2d",
        "max_pool2d_with_indices",
        "fractional_max_pool2d",
        "replication_pad2d",
        "reflection_pad2d",
    ],
    3: [
        "_adaptive_avg_pool3d",
        "adaptive_max_pool3d",
        "avg_pool3d",
        "max_pool3d_with_indices",
        "fractional_max_pool3d",
        "replication_pad3d",
        "reflection_pad3d",
    ],
}


def targets(backend: Backend) -> list[str]:
    assert backend.engine is not None
    (graph,) = backend.engine.graphs
    return [
        op.target for op in graph.captured.trace.ops if "pool" in op.target or "pad" in op.target
    ]


@pytest.mark.parametrize("sides", [1, 2, 3])
def test_steps_are_those_of_plain_torch(sides: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_only, "LEAST_BYTES", 0)
    expected = trained("aot_eager", mixed(sides), *GIVEN[sides], steps=1)
    backend = Backend(budget="1GiB")
    found = trained(backend, mixed(sides), *GIVEN[sides])
    assert same([found], [expected])
    backward = [target for target in targets(backend) if "backward" in target]
    assert backward == [f"outcore.{name}_backward.default" for name in FOUND[sides]]
    inside(backend.report())


class Wide(nn.Module):
    """Maps of 8 MiB that only `pool` reads, which makes half a MiB of them."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.empty(32, 1, 1))
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.pool(x[:, :1] + self.shift)
        return made


@pytest.mark.parametrize(
    "pool", [nn.MaxPool2d(4), nn.AvgPool2d(4), nn.ReflectionPad2d(-48)], ids=["max", "avg", "cut"]
)
def test_a_budget_is_enough_that_has_no_room_for_the_input_beside_its_gradient(
    pool: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (4, 2, 128, 128)
    backend = Backend(budget="12MiB")
    found = trained(backend, Wide(pool), *given)
    inside(backend.report())
    assert same([found], [trained("aot_eager", Wide(pool), *given, steps=1)])
    monkeypatch.setattr(metadata_only, "LEAST_BYTES", 1 << 60)
    with pytest.raises(InfeasibleError, match=r"pool2d|pad2d"):
        trained(Backend(budget="12MiB"), Wide(pool), *given)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Sequential(nn.Conv2d(2, 8, 3), nn.MaxPool2d(2)), (2, 2, 16, 16)),
        (lambda: nn.Sequential(nn.Conv2d(2, 8, 3), nn.MaxPool2d(2)), (2, 66, 66)),
        (lambda: nn.Sequential(nn.Conv3d(2, 8, 3), nn.MaxPool3d(2)), (2, 18, 18, 18)),
    ],
    ids=["small", "one image", "one volume"],
)
def test_what_stays_torch_s(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if request.node.callspec.id != "small":
        monkeypatch.setattr(metadata_only, "LEAST_BYTES", 0)
    backend = Backend(budget="1GiB")
    found = trained(backend, make(), *shape, steps=2)
    assert targets(backend)[-1].startswith("aten.max_pool")
    assert same([found], [trained("aot_eager", make(), *shape, steps=1)])


@pytest.mark.parametrize("turn", ["mT", "cut", "wide"])
def test_an_input_that_lies_otherwise_is_given(turn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kernels change its layout first, which they cannot do if it has no memory."""
    monkeypatch.setattr(metadata_only, "LEAST_BYTES", 0)

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grow = nn.Conv2d(2, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.grow(x))
            x = {"mT": x.mT, "cut": x[:, :, 1:, 1:], "wide": x[:, :, :1].expand_as(x)}[turn]
            return torch.tanh(nn.functional.avg_pool2d(x, 3))

    backend = Backend(budget="1GiB")
    found = trained(backend, Turned(), 2, 2, 16, 16)
    assert targets(backend)[-1] == "aten.avg_pool2d_backward.default"
    assert same([found], [trained("aot_eager", Turned(), 2, 2, 16, 16, steps=1)])


@torch.library.custom_op("outcore_tests::turned_before_pooling", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """Copy `x`, with another layout than the fake kernel describes."""
    return x.clone(memory_format=torch.channels_last)


turned.register_fake(lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))
turned.register_autograd(lambda _, tangents: tangents.clone())


def test_an_input_that_lies_otherwise_than_was_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_only, "LEAST_BYTES", 0)

    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grow = nn.Conv2d(2, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(nn.functional.max_pool2d(turned(torch.tanh(self.grow(x))), 2))

    backend = Backend(budget="1GiB")
    found = trained(backend, Turning(), 2, 2, 33, 31)
    assert same([found], [trained("aot_eager", Turning(), 2, 2, 33, 31, steps=1)])
    assert backend.engine is not None
    (graph,) = backend.engine.graphs
    assert graph.corrections
    (op,) = (op for op in graph.captured.trace.ops if op.target.startswith("outcore.max_pool"))
    assert op.args[2] == (8 * 33 * 31, 1, 8 * 31, 8)


def test_their_effects_are_those_of_torch_s_ops() -> None:
    with FakeTensorMode():
        result = torch.empty(2, 3, 4, 4, device="cuda")
    for theirs, ours in GRADIENTS.items():
        assert not aten.effects(ours)
        on_cuda = aten.effects_on_cuda(ours, (), result)
        assert on_cuda == aten.effects_on_cuda(theirs, (), result)
        assert bool(on_cuda) == (str(theirs) in aten.VARYING_ON_CUDA)
