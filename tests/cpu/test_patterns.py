"""Traces for further sizes are told by a pattern, and are what would be captured."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from outcore import Backend
from outcore.capture import AtSizes, Symbolic
from outcore.capture.captured import Captured
from outcore.capture.patterns import Pattern
from outcore.capture.source import Source
from outcore.runtime.graphs.graph import PlannedGraph
from tests.cpu.training import same, snapshot


class Told:
    """Compares each trace that a pattern tells with what is captured of a copy."""

    def __init__(self) -> None:
        self.traces: list[Captured] = []
        self.whole: list[AtSizes] = []

    def of(self, at_sizes: AtSizes, args: Sequence[Any], told: Captured) -> None:
        """Take what a pattern told for `args`."""
        captured = at_sizes.copy(args).source.captured
        assert told.trace == captured.trace
        assert told.within == captured.within
        assert told.overwritten == captured.overwritten
        assert told.turned == captured.turned
        assert told.fixed == captured.fixed
        assert told.device == captured.device
        self.traces.append(told)
        self.whole.append(at_sizes)


def watch(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Compare what patterns tell from now on."""
    seen, by_pattern = Told(), AtSizes._by_pattern

    def watched(at_sizes: AtSizes, args: Sequence[Any], told: Captured) -> Source:
        seen.of(at_sizes, args, told)
        return by_pattern(at_sizes, args, told)

    monkeypatch.setattr(AtSizes, "_by_pattern", watched)
    return seen


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    yield watch(monkeypatch)
    torch._dynamo.reset()


def step(module: nn.Module, call: Any, seed: int, inputs: Sequence[Any]) -> list[Tensor]:
    torch.manual_seed(seed)
    module.zero_grad()
    loss = call(*inputs).square().mean()
    loss.backward()
    return snapshot(module, loss)


def alike(module: nn.Module, made: Sequence[Sequence[Any]], policy: str = "search") -> Backend:
    """Train on inputs of several sizes, each as eager does it."""
    backend = Backend(budget="2GiB", strict=True, policy=policy)
    plain, call = copy.deepcopy(module), torch.compile(module, backend=backend, dynamic=True)
    for seed, inputs in enumerate(made):
        again = copy.deepcopy(inputs)
        here = [step(module, call, seed, inputs)]
        assert same(here, [step(plain, plain, seed, again)]), [
            tuple(x.shape) for x in inputs if isinstance(x, Tensor)
        ]
    return backend


class Heads(nn.Module):
    """Attention over sequences, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[0], x.shape[1], 2, 4
        q, k, v = (t.view(size).transpose(1, 2) for t in self.inner(x).split(8, 2))
        found = self.drop((q @ k.transpose(-1, -2)).softmax(-1)) @ v
        made: Tensor = self.norm(x + self.outer(found.transpose(1, 2).reshape(x.shape)))
        return made


class Maps(nn.Module):
    """Convolutions whose gradients do without large inputs, pooling and resampling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(8), nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        maps = functional.gelu(self.norm(self.first(x)))
        small = functional.max_pool2d(functional.relu(self.second(maps)), 2)
        large = functional.interpolate(small, size=maps.shape[-2:], mode="bilinear")
        made: Tensor = self.last(torch.cat([maps, large], 1))
        return made


class Odd(nn.Module):
    """Numbers of all kinds: padding, slices, ranges, factors, parts of tensors, other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.places = nn.Linear(8, 8), nn.Embedding(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[1]
        made = self.line(x) + self.places(torch.arange(count))
        half = made[:, : count // 2].sum(1) * (1.0 / count) + made[:, count // 2 :].mean(1)
        padded = functional.pad(made, (0, 0, 1, count % 3)).cumsum(1)
        places = torch.view_as_real(torch.complex(made, made.flip(1)))
        parts = places.unfold(1, 2, 1).sum((1, 2, 3, 4)).unsqueeze(-1)
        rolled = made.repeat(1, 2, 1).roll(count // 3, 1)[:, 3]
        found: Tensor = padded[:, 1:].sum(1) + half + rolled + parts
        return found


class Factors(nn.Linear):
    """Floats that are computed from sizes: expressions would round otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[1]
        made = super().forward(x)
        return made * ((1 / count) * 0.1 * (1 / count)) + (made**2) * (1 / count - 0.3 + 0.1)


class Clamped(nn.Linear):
    """Numbers that are one of two."""

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[1]
        made: Tensor = super().forward(x) * max(count, 9) + min(count, 7) + min(max(count, 5), 12)
        return made


class Classes(nn.Module):
    """Cross-entropy over so many classes that its gradient is made in blocks of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.line = nn.Embedding(4000, 8), nn.Linear(8, 4000)

    def forward(self, x: Tensor) -> Tensor:
        return functional.cross_entropy(self.line(self.places(x)).flatten(0, 1), x.flatten())


class Two(nn.Module):
    """Two lengths, which may be the same."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made: Tensor = (self.line(x) @ self.line(y).transpose(-1, -2)).softmax(-1)
        return made + made.mean(0)


class Marked(nn.Linear):
    """Writes into its argument, in views of it, too, and then uses a copy."""

    def forward(self, x: Tensor) -> Tensor:
        x[: x.shape[0] // 2, 1] = 0
        x.transpose(1, 2)[:, 2:4].mul_(2)
        first, second = x.split(4, 2)
        first[:, 1:] = second[:, 1:]
        return super().forward(x.clone())


def parts(*sizes: tuple[int, int]) -> list[list[Tensor]]:
    """Batches that begin at one place in tensors of other sizes."""
    return [[torch.randn(n + 4, length, 8)[1 : n + 1]] for n, length in sizes]


def texts(*sizes: tuple[int, ...]) -> list[list[Tensor]]:
    return [[torch.randn(*size, 8)] for size in sizes]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "attention": (Heads, lambda: texts((2, 5), (3, 5), (3, 7), (4, 6), (2, 9), (5, 11), (3, 13))),
    "one sequence": (Heads, lambda: texts(*((1, n) for n in (5, 7, 9, 12, 6, 15)))),
    "one place": (Heads, lambda: texts(*((n, 1) for n in (5, 7, 9, 12, 6, 15)))),
    "maps": (
        Maps,
        lambda: [
            [torch.randn(n, 3, h, w)]
            for n, h, w in ((2, 8, 8), (3, 8, 8), (2, 12, 16), (3, 16, 12), (4, 8, 20), (5, 10, 8))
        ],
    ),
    "large maps": (
        Maps,
        lambda: [
            [torch.randn(2, 3, h, w)]
            for h, w in ((96, 192), (128, 160), (192, 128), (144, 144), (192, 192), (160, 200))
        ],
    ),
    "odd": (Odd, lambda: texts(*((3, n) for n in (12, 15, 13, 14, 18, 21, 16, 24, 30, 33)))),
    "factors": (
        lambda: Factors(8, 8).double(),
        lambda: [[torch.randn(3, n, 8).double()] for n in (6, 7, 8, 11, 14, 12, 17, 21, 24, 18)],
    ),
    "clamped": (lambda: Clamped(8, 8), lambda: texts(*((3, n) for n in (13, 14, 15, 16, 4, 8)))),
    "clamped below": (lambda: Clamped(8, 8), lambda: texts(*((3, n) for n in (4, 2, 3, 5, 14, 8)))),
    "classes": (
        Classes,
        lambda: [[torch.randint(0, 4000, (2, n))] for n in (40, 160, 170, 190, 210, 165, 230)],
    ),
    "written": (
        lambda: Marked(8, 8),
        lambda: texts((4, 5), (5, 5), (5, 7), (6, 6), (4, 9), (7, 11), (5, 13)),
    ),
    "written parts": (
        lambda: Marked(8, 8),
        lambda: parts((4, 5), (6, 5), (10, 5), (5, 5), (9, 5), (7, 5), (8, 5)),
    ),
    "two lengths": (
        Two,
        lambda: [
            [torch.randn(n, a, 8), torch.randn(n, b, 8)]
            for n, a, b in ((2, 5, 6), (3, 5, 7), (2, 7, 9), (4, 6, 5), (3, 9, 4), (5, 7, 3))
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", ["search", "swap-all", "recompute-all"])
def test_what_is_told_is_what_would_be_captured(told: Told, case: str, policy: str) -> None:
    make, inputs = CASES[case]
    torch.manual_seed(0)
    alike(make(), inputs(), policy=policy)
    assert told.traces


def test_sizes_that_are_captured_in_another_way(told: Told) -> None:
    """Where two sizes are the same, two results may lie alike; a side of 1 lies otherwise."""
    sizes = (2, 5, 6), (3, 5, 7), (2, 7, 9), (3, 4, 6), (8, 8, 8), (2, 2, 5), (6, 6, 4), (4, 1, 6)
    made = [[torch.randn(n, a, 8), torch.randn(n, b, 8)] for n, a, b in sizes * 2]
    alike(Two(), made)
    assert told.traces


def test_inputs_that_lie_otherwise(told: Told) -> None:
    """Parts of larger tensors, transposed ones, and ones that share a storage."""
    rows = [torch.randn(3, n, 8) for n in (5, 6, 7, 9)]
    others = [
        torch.randn(3, 11, 16)[..., ::2],
        torch.randn(12, 3, 8).transpose(0, 1),
        torch.randn(3, 13, 8)[:, 2:],
    ]
    pairs = [[x, torch.randn(3, 4, 8)] for x in (*rows, *others, *rows)]
    whole = torch.randn(6, 10, 8)
    alike(Two(), [*pairs, [whole[:3], whole[3:]], [whole[:3, :8], whole[3:, 2:]]])
    assert told.traces


class Views(nn.Module):
    """Reads views of its argument, with or without a write into it before."""

    def __init__(self, write: bool) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(8, 8), write

    def forward(self, x: Tensor) -> Tensor:
        if self.write:
            x.view(torch.int32)[:, 2:4] = 5
        made: Tensor = self.layer(x[:, 2:10]) + self.layer(x.t()[4:12].t())
        return made


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("policy", ["search", "swap-all"])
def test_a_batch_may_begin_elsewhere_than_the_first_one(policy: str, write: bool) -> None:
    """torch does not check for that if the first one has a storage of its own."""
    torch.manual_seed(0)
    module, data = Views(write), torch.randn(100, 16)
    backend = Backend(budget="2GiB", strict=True, policy=policy)
    plain, call = copy.deepcopy(module), torch.compile(module, backend=backend, dynamic=True)
    for start, rows in ((0, 8), (3, 8), (3, 9), (40, 20), (0, 8), (50, 9), (17, 11), (18, 11)):
        part = data[start : start + rows]
        here, there = (data.clone()[start:][:rows] if start else part.clone() for _ in range(2))
        assert same([step(module, call, 0, [here])], [step(plain, plain, 0, [there])])
        assert torch.equal(here, there)
    torch._dynamo.reset()


def test_a_pattern_of_larger_sizes(told: Told) -> None:
    """Once something is large, graphs have other ops; the pattern before that tells no more."""
    small = (8, 8), (8, 10), (10, 8), (12, 8), (12, 10)
    later = (192, 192), (8, 14), (192, 200), (14, 8), (10, 14), (200, 192)
    alike(Maps(), [[torch.randn(2, 3, h, w)] for h, w in small + later])
    assert len(told.traces) > 2
    first, last = told.traces[0].trace, told.traces[-1].trace
    assert [op.target for op in first.ops] != [op.target for op in last.ops]


def test_a_pattern_is_for_certain_settings_of_torch(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Effects of ops hang on them."""
    module, backend = Heads(), Backend(budget="2GiB", strict=True)
    plain, call = copy.deepcopy(module), torch.compile(module, backend=backend, dynamic=True)
    for seed, given in enumerate(texts(*((2, n) for n in range(4, 16)))):
        if seed == 6:
            monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
        before = len(told.traces)
        assert same([step(module, call, seed, given)], [step(plain, plain, seed, given)])
        by_pattern = len(told.traces) > before
        assert by_pattern == (seed in (3, 4, 5, 9, 10, 11)), seed


def test_a_pattern_that_is_wrong_is_left(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    at = Pattern.at

    def wrong(pattern: Pattern, args: Sequence[Any]) -> Captured | None:
        right = at(pattern, args)
        sizes = [x.shape for x in args if isinstance(x, Tensor)]
        if right is None or (2, 7, 8) not in sizes:
            return right
        first, *others = right.trace.buffers
        buffers = replace(first, nbytes=first.nbytes + 64), *others
        return replace(right, trace=replace(right.trace, buffers=buffers))

    monkeypatch.setattr(Pattern, "at", wrong)
    alike(Heads(), texts(*((2, n) for n in (4, 5, 7, 8, 9, 10, 11))))
    assert not told.traces


@torch.library.custom_op("outcore_test_patterns::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """A copy, which lies otherwise than declared in a batch of nine."""
    return x.t().contiguous().t() if len(x) == 9 else x.clone()


turned.register_fake(lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))
turned.register_autograd(lambda _, gradient: gradient)


class Turned(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = turned(super().forward(x)).exp().reshape(-1)
        return made


def test_a_kernel_that_does_otherwise_at_one_size(told: Told) -> None:
    """Then the graph is captured after all, and corrected; no pattern is used any more."""
    rows = (2, 3, 4, 5, 6, 9, 7, 9, 8)
    backend = alike(Turned(8, 8), [[torch.randn(n, 8)] for n in rows])
    assert backend.engine is not None
    corrected = [graph for graph in backend.engine.graphs if graph.corrections]
    assert len(corrected) == 1
    assert not told.whole[0]._patterns


def test_a_kernel_that_does_otherwise_within_a_mode(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph is copied without modes, as dynamo does it."""
    at, modes = Symbolic.at, []

    def noted(symbolic: Symbolic, args: Sequence[Any]) -> Any:
        modes.append(torch._C._len_torch_function_stack())
        return at(symbolic, args)

    monkeypatch.setattr(Symbolic, "at", noted)
    with torch.device("cpu"):
        backend = alike(Turned(8, 8), [[torch.randn(n, 8)] for n in (2, 3, 4, 5, 9, 6)])
    assert backend.engine is not None
    assert any(graph.corrections for graph in backend.engine.graphs)
    assert len(modes) == 3 + 2 + 1 + 1, "those told are compared with a copy"
    assert not any(modes)


def test_views_from_a_fixed_place(told: Told) -> None:
    """There is no pattern: captured or not, it hangs on how the input lies."""

    class Fixed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            rows = x.view(-1).as_strided((len(x) - 1, 8), (8, 1), 8)
            return super().forward(rows) + super().forward(x)[1:]

    module = Fixed(8, 8)
    plain, backend = copy.deepcopy(module), Backend(budget="2GiB")
    call, whole = torch.compile(module, backend=backend, dynamic=True), torch.randn(40, 8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="outcore")
        for seed, x in enumerate((*(torch.randn(n, 8) for n in range(4, 11)), whole[:11])):
            assert same([step(module, call, seed, [x])], [step(plain, plain, seed, [x])])
    assert not told.traces


def test_a_graph_that_was_told_runs_in_core(told: Told) -> None:
    """It is made for that."""
    module, backend = Heads(), Backend(budget="2GiB", strict=True)
    plain, call = copy.deepcopy(module), torch.compile(module, backend=backend, dynamic=True)
    inputs = texts(*((2, n) for n in range(4, 10)))
    for again in range(3):
        for seed, given in enumerate(inputs):
            assert same([step(module, call, seed, given)], [step(plain, plain, seed, given)])
        assert backend.engine is not None
        for graph in backend.engine.graphs if again else ():
            graph.retire("a test wants it")
    assert len(told.traces) == 3


def test_sizes_share_code(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that keep everything have one text for all sizes; numbers are looked up."""
    ran: list[Any] = []
    settle = PlannedGraph.settle

    def noted(graph: PlannedGraph, planned: Any) -> Any:
        execution = settle(graph, planned)
        ran.append(execution.executable)
        return execution

    monkeypatch.setattr(PlannedGraph, "settle", noted)
    inputs = texts(*((2, n) for n in range(4, 12)))
    alike(Heads(), inputs * 3)
    traces = [captured.trace for captured in told.traces]
    shared = [each.code for each in ran if each.trace in traces]
    assert len(shared) > 2
    assert len({*shared}) == 1
    text = shared[0].text
    assert "view(s" in text
    assert " n0" in text
