"""Results that lie otherwise in memory than they did in the first steps."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outcore import Backend
from outcore.errors import StepError
from outcore.execute.laid import relaid
from outcore.ir.trace import Buffer, Op, Phase, Ref, Role, Trace, Value
from tests.cpu.training import PROFILED_STEPS, same

STEPS = PROFILED_STEPS + 3
WARNING = "lies in memory otherwise"
Mood = Callable[[Tensor], Tensor]


def plainly(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def turned(x: Tensor) -> Tensor:
    return x.t().clone(memory_format=torch.contiguous_format).t().detach()


def shifted(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x), x])[len(x) :].detach()


def in_more(x: Tensor) -> Tensor:
    return torch.cat([x, x])[: len(x)].detach()


def conjugate(x: Tensor) -> Tensor:
    """The conjugate of the conjugate: equal to `x`, but not in memory."""
    return x.conj().resolve_conj().conj()


def cut(x: Tensor) -> Tensor:
    return x[1:].clone()


class Moods:
    """How the results of the fickle ops lie now."""

    now: Mood = staticmethod(plainly)


@pytest.fixture(autouse=True)
def even_tempered() -> Iterator[None]:
    yield
    Moods.now = staticmethod(plainly)


def is_fickle(name: str) -> Any:
    """An op that copies its argument."""

    @torch.library.custom_op(f"outcore_tests::{name}", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return Moods.now(x)

    op.register_fake(lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))
    return op


fickle, fickle_gradient = is_fickle("fickle_square"), is_fickle("fickle_gradient")
fickle.register_autograd(lambda _, gradient: fickle_gradient(gradient))


class Viewed(nn.Module):
    """The results of fickle ops are viewed, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.behind(fickle(self.before(x).t().tanh()).t().tanh())
        return result


class Last(nn.Module):
    """The caller gets the result of a fickle op."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = fickle(self.before(x))
        return result


class Moved(nn.Module):
    """The result of a fickle op waits for the backward call."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64, dtype=dtype) / 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = fickle(x @ self.weight)
        for _ in range(6):
            y = (y * y).tanh()
        return y + 1


class Pair:
    """A module under outcore, and the same module as plain PyTorch runs it."""

    def __init__(self, module: nn.Module, budget: str = "1GiB", policy: str = "search") -> None:
        torch._dynamo.reset()
        self.plain, self.module = copy.deepcopy(module), module
        self.backend = Backend(budget=budget, policy=policy, strict=True)
        self.call = torch.compile(module, backend=self.backend, dynamic=False)

    def step(self, x: Tensor) -> list[Tensor]:
        return _step(self.module, self.call, x)

    def begin(self, x: Tensor) -> None:
        for _ in range(STEPS):
            self.step(x.clone())
        assert self.backend.report().state in ("planned", "in-core")

    def equal(self, x: Tensor) -> bool:
        """Whether a step has the bits of plain PyTorch's with results that lie as described."""
        found = self.step(x.clone())
        Moods.now = staticmethod(plainly)
        return same([found], [_step(self.plain, self.plain, x.clone())])


def _step(module: nn.Module, call: Callable[..., Any], x: Tensor) -> list[Tensor]:
    module.zero_grad()
    y = call(x)
    y.mul_(2)  # a result belongs to the caller, who may write to it
    loss = y.abs().square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def test_what_views_read_is_copied_to_where_they_read() -> None:
    pair, x = Pair(Viewed()), torch.randn(64, 64)
    pair.begin(x)
    Moods.now = staticmethod(turned)
    with pytest.warns(UserWarning, match=WARNING) as warned:
        assert pair.equal(x)
    forward, backward = (str(each.message) for each in warned)
    assert "fickle_square" in forward
    assert "tanh_backward" in backward, "its argument has no views"


@pytest.mark.parametrize("mood", [shifted, in_more])
def test_only_strides_are_worth_a_warning(mood: Mood) -> None:
    pair, x = Pair(Viewed()), torch.randn(64, 64)
    pair.begin(x)
    Moods.now = staticmethod(mood)
    assert pair.equal(x)


def test_what_nothing_views_stays_where_it_is() -> None:
    pair, x = Pair(Last()), torch.randn(64, 64)
    pair.begin(x)
    Moods.now = staticmethod(turned)
    found = pair.call(x)
    assert found.stride() == (1, 64)
    assert torch.equal(found, pair.plain(x))


def test_the_caller_may_write_into_what_was_copied() -> None:
    trace = described((4, 4), (4, 1), 64)
    with pytest.warns(UserWarning, match=WARNING):
        found = relaid(trace, 0, 0, torch.arange(16.0).view(4, 4).t())
    assert found.tolist() == torch.arange(16.0).view(4, 4).t().tolist()
    assert found.stride() == (4, 1)
    assert not found._is_view()


def test_what_was_larger_in_memory_is_moved() -> None:
    Moods.now = staticmethod(in_more)
    pair, x = Pair(Moved(torch.float32), "2800KiB", "swap-all"), torch.randn(1024, 64)
    pair.begin(x)
    assert pair.backend.report().offloaded_bytes
    Moods.now = staticmethod(plainly)
    assert pair.equal(x)


def test_what_is_moved_is_no_conjugate() -> None:
    pair = Pair(Moved(torch.complex64), "5400KiB", "swap-all")
    x = torch.randn(1024, 64, dtype=torch.complex64)
    pair.begin(x)
    assert pair.backend.report().offloaded_bytes
    Moods.now = staticmethod(conjugate)
    assert pair.equal(x)


def test_a_result_of_another_shape() -> None:
    pair, x = Pair(Viewed()), torch.randn(64, 64)
    pair.begin(x)
    Moods.now = staticmethod(cut)
    with pytest.raises(StepError, match=r"fickle_square.*float32 \(63, 64\), not .*\(64, 64\)"):
        pair.step(x)
    Moods.now = staticmethod(plainly)
    assert pair.equal(x)


def test_results_without_elements() -> None:
    """Their strides are not as described from the beginning, and mean nothing."""
    pair, x = Pair(Viewed()), torch.randn(0, 64)
    Moods.now = staticmethod(turned)
    pair.begin(x)
    assert pair.equal(x)


class Weighed(nn.Module):
    """Softmax writes over the result of a convolution, in contiguous order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv3d(4, 4, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.layer(x), dim=1) * torch.arange(8.0)


def test_a_flag_is_changed_after_the_first_steps() -> None:
    pair = Pair(Weighed())
    x = torch.randn(2, 4, 8, 8, 8).contiguous(memory_format=torch.channels_last_3d)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about other flags
        with torch.backends.mkldnn.flags(enabled=False):
            pair.begin(x)
            lay = pair.plain.layer(x).stride()  # type: ignore[operator]  # a layer
    if pair.plain.layer(x).stride() == lay:  # type: ignore[operator]  # a layer
        pytest.skip("both kernels lay it out alike here")
    with pytest.warns(UserWarning, match=f"convolution.*{WARNING}"):
        assert pair.equal(x)


class Scattered(nn.Module):
    """Writes into a part of its argument, given by strides."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(torch.as_strided_scatter(x, x[:, :4] * 3, (8, 4), (8, 1)).t())
        return result


class Sliced(nn.Module):
    """The caller gets its own argument, with another part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.slice_scatter(x, self.layer(x)[:, :4], 1, 0, 4)


@pytest.mark.parametrize("kind", [Scattered, Sliced])
def test_an_argument_that_begins_elsewhere_in_its_storage(kind: type[nn.Module]) -> None:
    pair, batch = Pair(kind()), torch.randn(32, 8)
    pair.begin(batch[:8])
    part = batch.clone()[16:24]
    other = batch.clone()[16:24]
    assert same([pair.step(part)], [_step(pair.plain, pair.plain, other)])


def described(shape: tuple[int, ...], stride: tuple[int, ...], nbytes: int) -> Trace:
    value = Value(0, 0, "float32", shape, stride)
    op = Op(0, "outcore_tests.any.default", (), (0,), Phase.FORWARD, site="here")
    return Trace((Buffer(0, nbytes, Role.ACTIVATION),), (value,), (op,), 1, (), (Ref(0),))


def test_if_only_sides_of_one_lie_otherwise_nothing_is_copied() -> None:
    lies = torch.arange(4.0).as_strided((1, 4), (9, 1))
    found = relaid(described((1, 4), (4, 1), 16), 0, 0, lies)
    assert found.stride() == (4, 1)
    assert found.data_ptr() == lies.data_ptr()
    assert not found._is_view()


def test_what_was_expanded_cannot_be_laid_out() -> None:
    trace = described((4, 4), (0, 1), 16)
    with pytest.raises(StepError, match=r"any.default at here was expanded, and is not any more"):
        relaid(trace, 0, 0, torch.ones(4, 4))
