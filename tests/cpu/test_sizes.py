"""If torch makes sizes symbolic, each combination of sizes has a separate graph and plan."""

from __future__ import annotations

import copy
import gc
import logging
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from outcore import Backend
from outcore.capture import Symbolic
from outcore.capture.sizes import by_sizes as sizes
from outcore.errors import CaptureError
from outcore.runtime import by_size
from outcore.runtime.budget.plans import Plans
from outcore.runtime.graphs.graph import PlannedGraph
from tests.cpu.test_pitfalls import run_in_threads
from tests.cpu.training import PROFILED_STEPS, Broken, Small, batch, mean_square, same, snapshot

MOVING = "2MiB"
"""A budget that is too small for `Small` in-core with a batch of 4."""


@pytest.fixture(autouse=True)
def _nothing_is_told() -> Iterator[None]:
    """Make outcore's warnings errors, except those that a test expects."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="outcore")
        yield


def step(module: nn.Module, call: Any, seed: int, *args: Any) -> list[Tensor]:
    torch.manual_seed(seed)
    module.zero_grad()
    loss = mean_square(call(*args))
    loss.backward()
    return snapshot(module, loss)


def alike(module: nn.Module, backend: Backend, rows: list[int], **options: Any) -> None:
    """Train with a batch of each size in `rows`; compare each step with plain PyTorch."""
    plain = copy.deepcopy(module)
    call = torch.compile(module, backend=backend, **options)
    for seed, n in enumerate(rows):
        x = batch(seed, n)
        assert same([step(module, call, seed, x)], [step(plain, plain, seed, x)]), (seed, n)


@pytest.mark.parametrize("dynamic", [None, True])
def test_each_size_has_its_plan(*, dynamic: bool | None) -> None:
    """The first size keeps its plan, although torch compiles another graph once a second comes."""
    backend = Backend(budget=MOVING, policy="swap-all", strict=True)
    usual, other = [4] * (PROFILED_STEPS + 1), [3] * (PROFILED_STEPS + 1)
    alike(Small(), backend, [*usual, *other, 4, 3, 4], dynamic=dynamic)
    report = backend.report()
    assert report.state == "planned"
    assert report.graphs == 2
    assert report.counts.offload > 0
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= report.budget_bytes


def test_a_smaller_last_batch_leaves_the_others_their_plan() -> None:
    backend = Backend(budget=MOVING, policy="swap-all")
    epoch = [4] * (PROFILED_STEPS + 2)
    alike(Small(), backend, [*epoch, 1, *epoch, 1])
    assert backend.engine is not None
    usual, last = backend.engine.registry.statuses()
    assert usual.planned is not None
    assert usual.planned.plan.policy == "swap-all"
    assert last.planned is not None, "at its second call"


def test_a_part_of_a_tensor_whose_own_size_is_symbolic() -> None:
    """torch passes the graph no symbols then: only the storage of an input has one."""
    backend = Backend(budget="1GiB", strict=True)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    plain = copy.deepcopy(module)
    call = torch.compile(module, backend=backend)
    for seed, x in enumerate((torch.randn(4, 16)[:, ::2], torch.randn(1, 8).expand(4, 8)) * 2):
        assert same([step(module, call, seed, x)], [step(plain, plain, seed, x)])
    assert backend.engine is not None
    assert backend.engine.steps.calls == 4


def test_parts_hand_sizes_on() -> None:
    """At a graph break, the earlier graph returns sizes and the later one gets them."""

    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Broken()

        def forward(self, x: Tensor) -> Tensor:
            rows = x.shape[0] * 2
            y = self.inner(x)
            torch._dynamo.graph_break()
            flat: Tensor = y.reshape(rows, -1) * rows
            return flat

    backend = Backend(budget="1GiB")
    alike(Sized(), backend, [2, 3, 4, 3, 2, 3], dynamic=True)
    assert not backend.report().notes


def test_numbers_are_sizes_too() -> None:
    """Two sizes of images, and numbers that the caller passes."""

    class Scaled(Small):
        def forward(self, x: Tensor, times: int = 1, factor: float = 1.0) -> Tensor:
            return super().forward(x) * times * factor

    module = Scaled()
    plain, backend = copy.deepcopy(module), Backend(budget="1GiB")
    call = torch.compile(module, backend=backend, dynamic=True)
    for turn in range(2):
        for seed, (side, times, factor) in enumerate([(8, 2, 0.5), (12, 3, 0.5), (8, 3, 0.25)]):
            args = batch(seed, 2, side), times, factor
            found, expected = step(module, call, seed, *args), step(plain, plain, seed, *args)
            assert same([found], [expected]), (turn, seed)
    assert backend.engine is not None
    assert len(backend.engine.graphs) == 3


def test_sizes_of_memory_laid_out_otherwise() -> None:
    class Along(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).sin().flatten()

    module, backend = Along(), Backend(budget="1GiB")
    plain = copy.deepcopy(module)
    call = torch.compile(module, backend=backend, dynamic=True)
    for n in (4, 5, 4):
        for x in (
            torch.rand(n, n, 3),
            torch.rand(n, n, 3).transpose(0, 1),
            torch.rand(2 * n, n, 3)[::2],
        ):
            assert same([step(module, call, 0, x)], [step(plain, plain, 0, x)])


def test_inputs_that_overlap_in_one_call_only() -> None:
    """When torch compiles, it checks by itself which inputs are written to."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.add_(1.0)
            return (x * self.weight).sin() + y

    module, backend = Writes(), Backend(budget="1GiB")
    plain = copy.deepcopy(module)
    call = torch.compile(module, backend=backend, dynamic=True)

    def pairs(n: int) -> list[tuple[Tensor, Tensor]]:
        both = torch.arange(2.0 * n * 3).reshape(2 * n, 3)
        apart = torch.ones(n, 3), torch.zeros(n, 3)
        return [
            apart,
            (both[:n], both[n:]),
            (both[1 : n + 1], both[:n]),
            (both[:n], both[:n].view(n, 3)),
        ]

    for n in (4, 5, 4):
        for mine, theirs in zip(pairs(n), pairs(n), strict=True):
            assert same([step(module, call, 0, *mine)], [step(plain, plain, 0, *theirs)])
            assert torch.equal(mine[0], theirs[0])


def keep(monkeypatch: pytest.MonkeyPatch, graphs: int, ops: int = 0) -> None:
    """Let so many graphs be kept, and as many more as have no more ops together than `ops`."""
    monkeypatch.setattr(by_size, "KEPT_GRAPHS", graphs)
    monkeypatch.setattr(by_size, "KEPT_OPS", ops)


def test_as_many_sizes_as_one_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph used longest ago is dropped, with what it holds; its plan is remembered."""
    keep(monkeypatch, 3)
    backend = Backend(budget=MOVING, policy="swap-all", strict=True)
    usual = [4] * (PROFILED_STEPS + 1)
    alike(Small(), backend, [*usual, 5, 6, 7, 8, 9, 4], dynamic=True)
    assert backend.engine is not None
    gc.collect()
    graphs = backend.engine.graphs
    assert len(graphs) == 3
    latest = max(graphs, key=lambda graph: graph.status.history.last_step)
    assert latest.planned is not None, "the usual size: captured again, and given its plan"
    assert not backend.report().notes


def test_a_graph_with_an_outstanding_call_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(monkeypatch, 2)
    module, backend = nn.Linear(4, 4), Backend(budget="1GiB", strict=True)
    plain = copy.deepcopy(module)
    call = torch.compile(module, backend=backend, dynamic=True)
    losses = [mean_square(call(torch.full((n, 4), 0.5))) for n in range(2, 7)]
    expected = [mean_square(plain(torch.full((n, 4), 0.5))) for n in range(2, 7)]
    for one, other in zip(losses, expected, strict=True):
        one.backward()
        other.backward()
    assert same([snapshot(module, losses[0])], [snapshot(plain, expected[0])])
    call(torch.ones(7, 4)).sum().backward()
    gc.collect()
    assert backend.engine is not None
    assert len(backend.engine.graphs) == 2, "once one came, those that had come back went"


def test_more_graphs_are_kept_if_they_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    module, backend = nn.Linear(4, 4), Backend(budget="1GiB", strict=True)
    keep(monkeypatch, graphs=2, ops=1_000)
    call = torch.compile(module, backend=backend, dynamic=True)
    for n in range(2, 6):
        mean_square(call(torch.ones(n, 4))).backward()
    assert backend.engine is not None
    graphs = backend.engine.graphs
    assert len(graphs) == 4
    keep(monkeypatch, graphs=2, ops=3 * len(graphs[0].captured.trace.ops))
    del graphs
    mean_square(call(torch.ones(6, 4))).backward()
    gc.collect()
    assert len(backend.engine.graphs) == 3


def test_smaller_sizes_get_the_plan_of_larger_ones() -> None:
    """Only the checked steps come first, and those run the plan already."""
    backend = Backend(budget=MOVING, policy="swap-all", strict=True)
    usual = [4] * (PROFILED_STEPS + 1)
    alike(Small(), backend, [*usual, 3, 3, 1, 1, 4], dynamic=True)
    assert backend.engine is not None
    plans = [status.planned for status in backend.engine.registry.known()]
    moves = [None if plan is None else len(plan.plan.moves) for plan in plans]
    assert moves[0] == moves[1], "the plan of the usual size, at three rows"
    assert moves[0]
    assert moves[2] == 0, "one row fits as it is"
    report = backend.report()
    assert report.state == "planned"
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= report.budget_bytes


def test_larger_sizes_are_profiled() -> None:
    backend = Backend(budget=MOVING, policy="swap-all", strict=True)
    alike(Small(), backend, [*[3] * (PROFILED_STEPS + 1), 4, 4], dynamic=True)
    assert backend.engine is not None
    first, second = (status.planned for status in backend.engine.registry.known())
    assert first is not None
    assert second is None


def test_one_of_many_sizes_is_planned_sooner() -> None:
    """It is checked, timed once, and planned at its third call, whatever comes in between."""
    backend = Backend(budget=MOVING, policy="swap-all", strict=True)
    alike(Small(), backend, [3, 4, 5, 6, 6, 7, 6], dynamic=True)
    assert backend.engine is not None
    found = [status.planned for status in backend.engine.registry.known()]
    assert [plan is not None for plan in found] == [False, False, False, True, False]


def test_a_plan_that_does_not_fit_after_all_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspaces measured at the smaller size turn out to be too large for it."""
    backend = Backend(budget=MOVING, policy="swap-all", strict=True)
    asked: list[PlannedGraph] = []

    def refused(_: Any, graph: PlannedGraph, *__: Any) -> None:
        asked.append(graph)

    monkeypatch.setattr(Plans, "take_lent", refused)
    usual, other = [4] * (PROFILED_STEPS + 1), [3] * (PROFILED_STEPS + 2)
    alike(Small(), backend, [*usual, *other], dynamic=True)
    assert len(asked) == 1
    assert backend.engine is not None
    assert all(status.planned for status in backend.engine.registry.known())


def test_slices_of_all_are_not_traced() -> None:
    """torch leaves them out of graphs with numbers: the first size keeps its plan."""

    class Sliced(Small):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x[:, slice(0, None)])
            return y[slice(0, None), :]

    backend = Backend(budget="1GiB", strict=True)
    alike(Sliced(), backend, [4, 3, 4])
    assert backend.engine is not None
    first, _, again = (status.identity for status in backend.engine.registry.known())
    assert first == again


def test_what_follows_a_slice_of_all_lies_as_if_there_were_none() -> None:
    """The slice's gradient would be contiguous; that of what it slices is not."""

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x).unflatten(2, (2, 4)).transpose(1, 2)[:, :, :]
            z: Tensor = y[:, :, None, slice(0, None)].expand(-1, -1, 3, -1, -1).flatten(1, 2)
            whole: Tensor = self.outer(z.mean(1).repeat(1, 1, 2))
            whole = whole[:, slice(0, None)]
            return whole.transpose(1, 2)

    backend = Backend(budget="1GiB", strict=True)
    module = Repeated()
    plain, call = copy.deepcopy(module), torch.compile(module, backend=backend)
    for seed, n in enumerate((4, 3, 4, 6)):
        x = torch.randn(2, n, 8)
        assert same([step(module, call, seed, x)], [step(plain, plain, seed, x)]), n
    assert backend.engine is not None
    first, _, again, _ = (status.identity for status in backend.engine.registry.known())
    assert first == again


def test_views_of_what_passes_of_torch_replace() -> None:
    """torch turns numbers that depend on sizes into tensors, and says so of the products alone."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            scale: float = x.shape[1] ** -0.5
            return (y.sum((1, 2)) * scale).unsqueeze(1).expand(-1, 4)

    backend = Backend(budget="1GiB", strict=True)
    module = Scaled(8, 8)
    plain, call = copy.deepcopy(module), torch.compile(module, backend=backend)
    for seed, n in enumerate((4, 3, 6)):
        x = torch.randn(2, n, 8)
        found, expected = step(module, call, seed, x), step(plain, plain, seed, x)
        torch.testing.assert_close(found, expected)
    assert not backend.report().notes


@pytest.mark.parametrize("policy", ["swap-all", "recompute-all"])
def test_views_of_products_with_a_number_that_differs_in_each_step(policy: str) -> None:
    """As the weight of a mixture does. torch makes it a tensor, and describes the products anew."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(
                *(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6))
            )

        def forward(self, x: Tensor, by: float) -> Tensor:
            y = (self.blocks(by * x) / by).t().reshape(64, -1).t()
            parts = (by * y).split(32, dim=1)
            z: Tensor = (parts[0] * parts[1].T.T).view(2, -1).transpose(0, 1)
            return z

    backend = Backend(budget="2.5MiB", policy=policy, strict=True)
    module = Mixed()
    plain, call = copy.deepcopy(module), torch.compile(module, backend=backend)
    for seed in range(PROFILED_STEPS + 4):
        args = torch.randn(1024, 64), 0.3 + seed / 32
        assert same([step(module, call, seed, *args)], [step(plain, plain, seed, *args)]), seed
    report = backend.report()
    assert report.state == "planned"
    assert report.graphs == 1


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each size that is copied from a symbolic graph, whether that went well."""
    made: list[bool] = []
    new = by_size.BySize._new

    def noted(self: by_size.BySize, *args: Any) -> Any:
        runner = new(self, *args)
        made.append(runner is not None)
        return runner

    monkeypatch.setattr(by_size.BySize, "_new", noted)
    return made


def test_ops_that_return_sizes_too(copies: list[bool]) -> None:
    """As kernels for attention do on a GPU."""
    library = torch.library.Library("outcore_test_sizes", "FRAGMENT")
    library.define("along(Tensor x) -> (Tensor, SymInt)")
    library.define("along_back(Tensor g, SymInt n) -> Tensor")
    for key in ("CPU", "Meta"):
        library.impl("along", lambda x: (x * x.shape[0], x.shape[0]), key)
        library.impl("along_back", lambda g, n: g * n, key)
    ops = torch.ops.outcore_test_sizes

    def keep_size(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.n = output[1]

    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        return ops.along_back(gradient, ctx.n)

    name = "outcore_test_sizes::along"
    torch.library.register_autograd(name, backward, setup_context=keep_size, lib=library)

    class Along(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = ops.along(super().forward(x))[0]
            return y

    module = Along(8, 8)
    plain, call = copy.deepcopy(module), torch.compile(module, backend=Backend(budget="1GiB"))
    for seed, n in enumerate((4, 5, 6)):
        x = torch.ones(n, 8)
        assert same([step(module, call, seed, x)], [step(plain, plain, seed, x)]), n
    assert copies == [True, True]
    library._destroy()


def test_parts_of_larger_tensors_are_copied_too(copies: list[bool]) -> None:
    """Nothing but the bytes of the larger tensor tells how large it is."""

    class Part(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            whole: Tensor = x[:, 0].sin() + x.transpose(1, 2)[..., 0]
            y: Tensor = super().forward(whole)
            return y

    module = Part(8, 8)
    plain, call = copy.deepcopy(module), torch.compile(module, backend=Backend(budget="1GiB"))
    for seed, n in enumerate((4, 5, 6, 8)):
        x = torch.randn(n + 3, 2, 8)[2 : n + 2]
        assert same([step(module, call, seed, x)], [step(plain, plain, seed, x)]), n
    assert copies == [True, True, True]


def test_the_first_size_keeps_its_plan_in_a_batch_of_one(copies: list[bool]) -> None:
    """The strides of a side of 1 are others with symbols."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            size = x.shape[0], x.shape[1], 2, 4
            q, k, v = (t.view(size).transpose(1, 2) for t in self.inner(x).split(8, 2))
            found = (q @ k.transpose(-1, -2)).softmax(-1) @ v
            whole: Tensor = self.outer(found.transpose(1, 2).reshape(x.shape))
            return whole

    module, backend = Heads(), Backend(budget="1GiB", strict=True)
    plain, call = copy.deepcopy(module), torch.compile(module, backend=backend)
    for seed, n in enumerate((4, 5, 4)):
        x = torch.randn(1, n, 8)
        assert same([step(module, call, seed, x)], [step(plain, plain, seed, x)]), n
    assert copies == [True, True]
    assert backend.engine is not None
    first, _, again = (status.identity for status in backend.engine.registry.known())
    assert first == again


def test_padding_that_pads_nothing() -> None:
    """It lies as what it pads."""

    class Padded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x[0]).t()
            return nn.functional.pad(y, (0, 3 - x.shape[1])).sin()

    module, backend = Padded(8, 8), Backend(budget="1GiB", strict=True)
    plain, call = copy.deepcopy(module), torch.compile(module, backend=backend)
    for seed, n in enumerate((4, 5, 6)):
        x = torch.randn(1, n, 8)
        assert same([step(module, call, seed, x)], [step(plain, plain, seed, x)]), n
    assert backend.engine is not None
    assert not any(graph.corrections for graph in backend.engine.graphs)


def test_new_sizes_under_autocast() -> None:
    """What is described anew has its casts already."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 8))
    plain, backend = copy.deepcopy(module), Backend(budget="1GiB", strict=True)
    call = torch.compile(module, backend=backend, dynamic=True)
    eager = torch.compile(plain, backend="aot_eager", dynamic=False)
    for n in (4, 5, 1, 4):
        with torch.autocast("cpu", torch.bfloat16):
            found = step(module, call, n, torch.ones(n, 8))
            assert same([found], [step(plain, eager, n, torch.ones(n, 8))]), n


def beside(n: int) -> tuple[Tensor, Tensor]:
    """Two parts of one tensor, so that one graph does not do for all sizes."""
    whole = torch.ones(2 * n, 4)
    return whole[:n], whole[n:]


def test_there_is_a_bound_where_torch_compiles_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "MOST_SIZES", 3)
    module, backend = nn.Linear(4, 4), Backend(budget="1GiB")
    call = torch.compile(lambda x, y: module(x) * y, backend=backend, dynamic=True)
    for n in (2, 3, 4):
        call(*beside(n)).sum().backward()
    with pytest.warns(UserWarning, match="more than 3 combinations of sizes; pad"):
        call(*beside(5)).sum().backward()
    module.zero_grad()
    call(*beside(6)).sum().backward()
    assert module.bias.grad is not None
    assert bool((module.bias.grad == 6).all())
    call(*beside(4)).sum().backward()
    assert backend.engine is not None
    assert len(backend.engine.graphs) == 3, "those that had come are as they were"


def test_past_that_bound_strict_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "MOST_SIZES", 1)
    module, backend = nn.Linear(4, 4), Backend(budget="1GiB", strict=True)
    call = torch.compile(lambda x, y: module(x) * y, backend=backend, dynamic=True)
    call(*beside(2)).sum().backward()
    with pytest.raises(CaptureError, match="more than 1 combinations of sizes; pad"):
        call(*beside(3))


class Doubling(TorchFunctionMode):
    """A mode in which sines are twice as large."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func in (torch.sin, torch.Tensor.sin) else result


@pytest.mark.parametrize("most", [64, 0])
def test_a_mode_acts_once(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """dynamo captures its effect; the mode is still on when the graph is compiled or run."""
    monkeypatch.setattr(sizes, "MOST_SIZES", most)

    class Sine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x * self.weight)

    module = Sine()
    call = torch.compile(module, backend=Backend(budget="1GiB"), dynamic=True)
    for n in (4, 5, 4):
        x = torch.rand(n, 3)
        with Doubling(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # past the limit
            found, expected = call(x), module(x)
        assert torch.equal(found, expected)
        found.sum().backward()


def test_threads_that_meet_new_sizes_at_once() -> None:
    module = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    plain, backend = copy.deepcopy(module), Backend(budget="1GiB")
    call = torch.compile(module, backend=backend, dynamic=True)
    call(torch.ones(2, 32)).sum().backward()
    together, wrong = threading.Barrier(4), []

    def run(number: int) -> None:
        for n in range(3, 6):
            together.wait(timeout=60)
            x = torch.full((n, 32), float(number))
            if not torch.equal(call(x), plain(x)):
                wrong.append((number, n))

    run_in_threads(*(partial(run, number) for number in range(4)))
    assert not wrong
    assert backend.engine is not None
    assert len(backend.engine.graphs) == 4


def test_zeros_of_either_sign() -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor, by: float) -> Tensor:
            return self.weight * x / by

    module, backend = Shares(), Backend(budget="1GiB")
    call = torch.compile(module, backend=backend, dynamic=True)
    for n, by in ((4, 2.0), (4, 3.0), (5, 0.0), (5, -0.0), (5, 0.0)):
        x = torch.ones(n, 3)
        assert torch.equal(call(x, by), module(x, by)), by


def test_who_overlaps_whom_is_in_the_key() -> None:
    one, other = torch.ones(4), torch.ones(4)
    pairs = sizes._overlapping((one, one[:], other, other[:]))
    assert [[i for i, *_ in group] for group in pairs] == [[0, 1], [2, 3]]
    assert pairs != sizes._overlapping((one, one[:], one[:], one[:]))
    assert not sizes._overlapping((one, other))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_run_as_they_are() -> None:
    module, backend = nn.Linear(4, 4), Backend(budget="1GiB")
    call = torch.compile(module, backend=backend, dynamic=True)
    for rows in ((2, 3), (4, 1)):
        x = torch.nested.nested_tensor([torch.rand(n, 4) for n in rows], layout=torch.jagged)
        with pytest.warns(UserWarning, match="in-core"):
            found = call(x)
        assert torch.equal(found.values(), module(x).values())
        torch._dynamo.reset()


def test_a_size_that_is_read_from_data() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            chosen: Tensor = self.linear(x[x.sum(1) > 0])
            return chosen

    module, backend = Chosen(), Backend(budget="1GiB")
    plain = copy.deepcopy(module)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        call = torch.compile(module, backend=backend, dynamic=True)
        x = torch.arange(-12.0, 12.0).reshape(6, 4)
        with pytest.warns(UserWarning, match=r"in-core.*sizes are not known"):
            found = step(module, call, 0, x)
        assert same([found], [step(plain, plain, 0, x)])
        for rows in (6, 5, 4, 5):
            expected = step(plain, plain, 0, x[:rows])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert same([step(module, call, 0, x[:rows])], [expected])
    assert len(backend.report().notes) == 1


def test_what_is_not_differentiated_is_left_to_torch() -> None:
    module, backend = nn.Linear(4, 4), Backend(budget="1GiB", strict=True)
    call = torch.compile(module, backend=backend, dynamic=True)
    with torch.no_grad():
        for n in range(2, 6):
            x = torch.rand(n, 4)
            assert torch.equal(call(x), module(x))
    assert backend.engine is None


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
@pytest.mark.parametrize("by", ["size", "factor"])
def test_resampling_is_traced_once(monkeypatch: pytest.MonkeyPatch, mode: str, by: str) -> None:
    """To a size that depends on another one, and by a factor."""

    class Resampled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 3, 3, stride=2, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            to: dict[str, Any] = {"size": x.shape[2:]} if by == "size" else {"scale_factor": 1.5}
            made: Tensor = nn.functional.interpolate(self.convolution(x), **to, mode=mode)
            return made

    monkeypatch.setattr(sizes.BySizes, "_new_call", None)
    module, backend = Resampled(), Backend(budget="1GiB", strict=True)
    plain = copy.deepcopy(module)
    call = torch.compile(module, backend=backend, dynamic=True)
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows, side in ((2, 8), (3, 11), (2, 16), (4, 9)):
            x = batch(0, rows, side)
            assert same([step(module, call, 0, x)], [step(plain, plain, 0, x)]), (rows, side)
    assert backend.engine is not None
    assert len(backend.engine.graphs) == 4


def test_resampling_to_a_single_number(caplog: pytest.LogCaptureFixture) -> None:
    """Then the gradient's sides are numbers, although the size of the result has symbols."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grid = nn.Parameter(torch.rand(1, 3, 4, 4))

        def forward(self, x: Tensor) -> Tensor:
            to = x.shape[2] // 4, x.shape[3] // 4
            grid = nn.functional.interpolate(self.grid, to, mode="bicubic")
            return nn.functional.avg_pool2d(x, 4) + grid

    module, backend = Positions(), Backend(budget="1GiB", strict=True)
    plain = copy.deepcopy(module)
    call = torch.compile(module, backend=backend)
    for sides in ((16, 16), (20, 16), (16, 20), (4, 4), (20, 24)):
        x = torch.rand(2, 3, *sides)
        assert same([step(module, call, 0, x)], [step(plain, plain, 0, x)]), sides
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_torch_cannot_trace_symbolic_sizes() -> None:
    """Then each combination of sizes is compiled by itself."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Softshrink())
    plain, backend = copy.deepcopy(module), Backend(budget="1GiB", strict=True)
    call = torch.compile(module, backend=backend, dynamic=True)
    for rows in (2, 3, 2, 5):
        x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
        assert same([step(module, call, 0, x)], [step(plain, plain, 0, x)]), rows
    assert backend.engine is not None
    assert len(backend.engine.graphs) == 3


def test_more_outstanding_calls_than_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(monkeypatch, 3)
    module, backend = nn.Linear(4, 4), Backend(budget="1GiB", strict=True)
    plain = copy.deepcopy(module)
    call = torch.compile(module, backend=backend, dynamic=True)
    outstanding = [(call(batch_of(n)), plain(batch_of(n))) for n in (2, 3, 4, 5, 6, 7)]
    assert backend.engine is not None
    assert len(backend.engine.graphs) == 6
    while outstanding:
        ends = []
        for results, of in zip(outstanding.pop(), (module, plain), strict=True):
            of.zero_grad()
            results.square().sum().backward()
            ends.append(snapshot(of, results))
        assert same(ends[:1], ends[1:])
    del results
    call(batch_of(8)).sum().backward()
    assert len(backend.engine.graphs) == 3


def batch_of(rows: int) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))


def test_a_call_outlives_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may drop a graph whose forward call has begun."""
    keep(monkeypatch, 1)
    monkeypatch.setattr(by_size, "_is_needed", lambda _: False)
    module = nn.Linear(4, 4)
    plain, backend = copy.deepcopy(module), Backend(budget="1GiB", strict=True)
    call = torch.compile(module, backend=backend, dynamic=True)
    losses = [call(batch_of(n)).square().sum() for n in (2, 3, 4)]
    for loss, n in zip(losses, (2, 3, 4), strict=True):
        loss.backward()
        plain(batch_of(n)).square().sum().backward()
    assert same([snapshot(module, loss)], [snapshot(plain, loss)])
    del loss, losses
    gc.collect()
    assert backend.engine is not None
    assert len(backend.engine.graphs) == 1


def test_sizes_without_a_graph_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def at(_: Any, args: Any) -> Any:
        tried.append(args)
        raise CaptureError(reason="of a test")

    monkeypatch.setattr(Symbolic, "at", at)
    alike(nn.Sequential(nn.Conv2d(3, 3, 3)), Backend(budget="1GiB"), [2, 3, 2, 3], dynamic=True)
    assert len(tried) == 2


def test_checkpoints_with_dropout() -> None:
    """torch's partitioner then has backward draw the same numbers again."""

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout(0.3), nn.Conv2d(8, 3, 3))

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return made

    backend = Backend(budget="1GiB", strict=True, policy="swap-all")
    alike(Inside(), backend, [2, 3, 4, *[3] * (PROFILED_STEPS + 2), 2], dynamic=True)
