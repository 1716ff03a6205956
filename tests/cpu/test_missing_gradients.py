"""Results without a gradient: what backward does not reach has none, and costs nothing."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import outcore
from outcore import Backend
from outcore.capture import Missing
from outcore.errors import CaptureError, InfeasibleError, StepError
from outcore.measure import resident_bytes
from outcore.runtime.results import second_run
from tests.cpu.training import PROFILED_STEPS

WIDTH = 32
STEPS = PROFILED_STEPS + 4
MIB = 1 << 20


class Heads(nn.Module):
    """A trunk with batch norm, whose buffers are results of the graph, too, and three heads."""

    def __init__(self, ends: Callable[[Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.ends = ends

    def forward(self, x: Tensor) -> list[Any]:
        trunk = self.trunk(x)
        return [self.ends(torch.sin(head(trunk))) for head in self.heads]


def used(step: int) -> Sequence[int]:
    """The heads whose results get gradients: they differ from step to step."""
    return [(0, 1, 2), (0, 1), (2,), (1, 2)][step % 4]


def train(module: nn.Module, call: Any, rows: Callable[[int], int] = lambda _: 64) -> list[Any]:
    """For each step: the losses, which parameters have a gradient, and what AdamW made of them."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)
    seen: list[Any] = []
    for step in range(STEPS):
        torch.manual_seed(step)
        results = call(torch.randn(rows(step), WIDTH))
        loss = torch.stack([results[i].square().mean() for i in used(step)]).sum()
        loss.backward()
        seen.append([loss.item(), [p.grad is None for p in module.parameters()]])
        optimizer.step()
        optimizer.zero_grad()
        seen.append([p.detach().clone() for p in module.parameters()])
    return seen


def alike(one: list[Any], other: list[Any]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(
        all(map(torch.equal, a, b)) if isinstance(a[0], Tensor) else a == b for a, b in pairs
    )


def both(
    module: nn.Module, rows: Callable[[int], int] = lambda _: 64, **options: Any
) -> tuple[list[Any], list[Any]]:
    torch._dynamo.reset()
    wrapped = copy.deepcopy(module)
    expected = train(module, module, rows)
    outcore.wrap(wrapped, strict=True, **options)
    return train(wrapped, wrapped, rows), expected


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("policy", ["swap-all", "recompute-all"])
def test_heads_that_a_step_does_not_use_have_no_gradient(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outcore.runtime.planning.solving.fits", lambda *_: False)
    found, expected = both(Heads(), budget="1GiB", policy=policy)
    assert alike(found, expected)


def test_with_sizes_that_change() -> None:
    found, expected = both(Heads(), lambda step: 16 + 8 * step, budget="1GiB")
    assert alike(found, expected)


@pytest.mark.parametrize(
    "ends",
    [
        lambda x: x.view(-1),
        lambda x: x[:8].t(),
        lambda x: x.add_(1),
        lambda x: x.chunk(2)[1],
        lambda x: x.to(torch.cfloat).abs(),
    ],
)
def test_whatever_the_results_are(ends: Callable[[Tensor], Any]) -> None:
    """If all of them are views, zeros are left."""
    torch._dynamo.reset()

    class Ending(Heads):
        def forward(self, x: Tensor) -> list[Any]:
            whole, *rest = super().forward(x)
            return [whole, *map(ends, rest)]

    found, expected = both(Ending(), budget="1GiB")
    assert alike(found, expected)


class Broken(Heads):
    """Each head is a graph by itself."""

    def forward(self, x: Tensor) -> list[Any]:
        trunk, results = self.trunk(x), []
        for head in self.heads:
            torch._dynamo.graph_break()
            results.append(torch.sin(head(trunk * 2)))
        return results


def test_through_several_graphs() -> None:
    torch._dynamo.reset()
    module = Broken()
    wrapped = outcore.wrap(copy.deepcopy(module), budget="1GiB")
    assert alike(train(wrapped, wrapped), train(module, module))
    assert outcore.handle(wrapped).report().graphs > 1


def test_in_a_graph_that_runs_in_core() -> None:
    torch._dynamo.reset()
    module = Heads()
    wrapped, backend = copy.deepcopy(module), Backend(budget="1GiB")
    call = torch.compile(wrapped, backend=backend)
    call(torch.randn(8, WIDTH))
    assert backend.engine is not None
    with pytest.warns(UserWarning, match="by the test"):
        backend.engine.graphs[0].give_up(CaptureError(reason="by the test"))
    wrapped.load_state_dict(module.state_dict())
    assert alike(train(wrapped, call), train(module, module))


def test_several_backward_calls() -> None:
    torch._dynamo.reset()
    module = Heads()
    wrapped = outcore.wrap(copy.deepcopy(module), budget="1GiB", strict=True)
    x = torch.randn(8, WIDTH)
    for _ in range(STEPS):
        found = []
        for each in (module, wrapped):
            each.zero_grad()
            results = each(x)
            for i in (2, 0):
                results[i].sum().backward(retain_graph=i == 2)
                found.append(
                    [None if p.grad is None else p.grad.clone() for p in each.parameters()]
                )
        for ours, plain in zip(found[2:], found[:2], strict=True):
            for a, b in zip(ours, plain, strict=True):
                if a is None or b is None:
                    assert a is b
                else:
                    assert torch.equal(a, b)


def test_an_input_without_a_gradient_is_told() -> None:
    module = outcore.wrap(Heads(), budget="1GiB", strict=True)
    results = module(torch.randn(8, WIDTH))
    weights = [head.weight for head in module.heads if isinstance(head, nn.Linear)]
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(results[0].sum(), weights)


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(64, 8, sparse=True) for _ in range(2))

    def forward(self, indices: Tensor) -> list[Tensor]:
        return [table(indices).tanh() for table in self.tables]


def test_sparse_gradients() -> None:
    torch._dynamo.reset()
    module = Tables()
    wrapped = outcore.wrap(copy.deepcopy(module), budget="1GiB", strict=True)
    indices = torch.arange(16)
    for step in range(STEPS):
        for each in (module, wrapped):
            each.zero_grad()
            each(indices)[step % 2].sum().backward()
        for ours, plain in zip(wrapped.parameters(), module.parameters(), strict=True):
            if ours.grad is None or plain.grad is None:
                assert ours.grad is plain.grad
            else:
                assert torch.equal(ours.grad.to_dense(), plain.grad.to_dense())


class Stored(torch.autograd.Function):
    """Its gradients are made in forward, whatever backward is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x - y)
        return x.sum() * 0 + 1

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor]:
        (difference,) = ctx.saved_tensors
        return difference, -difference


class Balanced(torch.autograd.Function):
    """Its first argument comes through; backward gives the second one a gradient of ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones(())


class Own(Heads):
    """Gradients do not follow the data, and an unused result depends on what they reach."""

    def forward(self, x: Tensor) -> list[Any]:
        first, second, third = super().forward(x)
        return [Balanced.apply(first, third.sum()), Stored.apply(second, first), second, third]


class Allowed(Heads):
    def forward(self, x: Tensor) -> list[Any]:
        first, second, third = super().forward(x)
        return [balanced(first, third.sum()), second, third]


@torch._dynamo.allow_in_graph
def balanced(x: Tensor, loss: Tensor) -> Any:
    return Balanced.apply(x, loss)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo does
@pytest.mark.parametrize("kind", [Own, Allowed])
def test_gradients_that_do_not_follow_the_data(kind: type[nn.Module]) -> None:
    """As torch's compiler gives them, of unused results, too; but None instead of zeros."""
    torch._dynamo.reset()
    module = kind()
    wrapped = outcore.wrap(copy.deepcopy(module), budget="1GiB", strict=True)
    call: Any = torch.compile(module, backend="aot_eager")
    x = torch.randn(8, WIDTH)
    for used in (0, 1, 0, 0, 1, 1):
        for run in (call, wrapped):
            run.zero_grad()
            run(x)[used].sum().backward()
        for ours, theirs in zip(wrapped.parameters(), module.parameters(), strict=True):
            assert theirs.grad is not None
            assert (
                not theirs.grad.any() if ours.grad is None else torch.equal(ours.grad, theirs.grad)
            )
        assert wrapped.heads[2].weight.grad.any()


@pytest.mark.parametrize("registered", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_are_given_zeros(registered: str) -> None:
    """Plain PyTorch does not call them. Autograd would call them with None."""
    torch._dynamo.reset()
    module = outcore.wrap(Heads(), budget="1GiB", strict=True)
    module(torch.randn(8, WIDTH))[0].sum().backward()
    module.zero_grad()
    hooked, free = (head.weight for head in module.heads[1:] if isinstance(head, nn.Linear))
    seen: list[Tensor] = []
    getattr(hooked, registered)(seen.append)
    module(torch.randn(8, WIDTH))[0].sum().backward()
    assert len(seen) == 1
    assert hooked.grad is not None
    assert torch.equal(hooked.grad, torch.zeros(WIDTH, WIDTH))
    assert free.grad is None


def test_results_of_another_compiled_function_keep_their_zeros() -> None:
    """Numbers of autograd's nodes begin anew in each thread, and a result may be an input."""
    torch._dynamo.reset()
    other = torch.compile(lambda a, b: (a * 2, b * 3), backend="aot_eager")
    a, b = (torch.ones(4, requires_grad=True) for _ in range(2))
    u, v = other(a, b)

    class Through(Heads):
        def forward(self, x: Tensor) -> list[Any]:
            return [u, u.view(-1), *super().forward(x)]

    model = outcore.wrap(Through(), budget="1GiB")
    thread = threading.Thread(target=lambda: model(torch.randn(8, WIDTH)))
    thread.start()
    thread.join()
    u.sum().backward()
    assert v.requires_grad
    assert b.grad is not None
    assert not b.grad.any()


def test_several_processes_get_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """What trains them together expects a gradient for each parameter."""
    torch._dynamo.reset()
    there = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True)
    monkeypatch.setattr("outcore.runtime.missing_gradients.distributed", there)
    module = outcore.wrap(Heads(), budget="1GiB", strict=True)
    for _ in range(STEPS):
        module.zero_grad()
        module(torch.randn(8, WIDTH))[0].sum().backward()
        for parameter in module.heads[1].parameters():
            assert parameter.grad is not None
            assert not parameter.grad.any()


class Scored(nn.Module):
    """As language models: returns a loss, scores, and what it caches. Draws random numbers."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(64, WIDTH)
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, 4096)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.drop(self.norm(self.table(tokens)))
        scores = self.head(hidden)
        return nn.functional.cross_entropy(scores, labels), scores, hidden.t()


Loss = Callable[[int, Sequence[Tensor]], Tensor]


def scored(module: nn.Module, call: Any, loss: Loss, rows: int = 32) -> list[Any]:
    """The gradients of each step, and what is drawn after it."""
    found: list[Any] = []
    for step in range(STEPS):
        torch.manual_seed(step)
        module.zero_grad()
        tokens = torch.randint(0, 64, (rows + step % 2,))
        loss(step, call(tokens, tokens)).backward()
        found += [None if p.grad is None else p.grad.clone() for p in module.parameters()]
        found.append(torch.rand(2))
    return found


def equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def surprising(step: int, results: Sequence[Tensor]) -> Tensor:
    """The loss, and in some steps what no earlier step has used."""
    loss, scores, hidden = results
    extra = {3: scores.square().mean(), 5: hidden.sin().sum()}
    return loss + extra.get(step, loss * 0)


@pytest.mark.parametrize(("norm", "dynamic"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("moves", [False, True])
def test_results_that_get_a_gradient_later(
    norm: bool, dynamic: bool, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward runs again for them, with the random numbers of the first time."""
    torch._dynamo.reset()
    if moves:
        monkeypatch.setattr("outcore.runtime.planning.solving.fits", lambda *_: False)
    module = Scored(norm)
    wrapped = copy.deepcopy(module)
    backend = Backend(budget="1GiB", strict=True, policy="swap-all")
    call = torch.compile(wrapped, backend=backend, dynamic=dynamic)
    same: Any = "aot_eager" if norm else lambda graph, _: graph  # eager's layouts are others
    expected = torch.compile(module, backend=same, dynamic=dynamic)
    assert equal(scored(wrapped, call, surprising), scored(module, expected, surprising))
    statistics = zip(wrapped.buffers(), module.buffers(), strict=True)
    assert all(torch.equal(a, b) for a, b in statistics)


def tangents(backend: Backend) -> list[int]:
    assert backend.engine is not None
    return [len(graph.captured.trace.tangents) for graph in backend.engine.graphs]


def test_graphs_do_without_what_gets_no_gradient() -> None:
    torch._dynamo.reset()
    module, backend = Scored(), Backend(budget="1GiB", strict=True)
    call = torch.compile(module, backend=backend)
    scored(module, call, lambda _, results: results[0])
    assert set(tangents(backend)) == {1}


def test_without_a_loss_the_first_step_tells() -> None:
    """Then what stands in for the other results is left out, if that can be."""
    torch._dynamo.reset()
    module, backend = Heads(), Backend(budget="1GiB", strict=True)
    call = torch.compile(module, backend=backend)
    for step in range(2):
        results = call(torch.randn(8, WIDTH))
        assert tangents(backend) == [1 if step else 3]
        results[0].sum().backward()


def test_the_smallest_budget_is_that_of_a_loss_alone() -> None:
    def smallest(call: Callable[..., Any], module: nn.Module) -> int:
        torch._dynamo.reset()
        tokens = torch.randint(0, 64, (1024,))
        limit = resident_bytes(torch.device("cpu")) + MIB
        compiled: Any = torch.compile(call, backend=Backend(budget=limit, policy="swap-all"))

        def train() -> None:
            for _ in range(STEPS):
                compiled(tokens, tokens)[0].backward()

        with pytest.raises(InfeasibleError) as caught:
            train()
        assert caught.value.floor_bytes is not None
        return caught.value.floor_bytes - limit

    module = Scored()
    alone = smallest(lambda *args: module(*args)[:1], module)
    whole = smallest(module, module)
    scores = 1024 * 4096 * 4
    assert whole - alone < 1.5 * scores  # the caller holds one


def test_retained_graphs_get_other_gradients_later() -> None:
    torch._dynamo.reset()
    module = Scored()
    wrapped = outcore.wrap(copy.deepcopy(module), budget="1GiB", strict=True)
    for step in range(STEPS):
        found = []
        for each in (module, wrapped):
            torch.manual_seed(step)
            each.zero_grad()
            tokens = torch.randint(0, 64, (32,))
            loss, scores, _ = each(tokens, tokens)
            loss.backward(retain_graph=True)
            scores.sin().sum().backward(retain_graph=True)
            (loss * 2 + scores.sum()).backward()
            found.append([p.grad for p in each.parameters()])
        assert equal(*found)


def test_a_weight_that_was_changed_meanwhile_is_told() -> None:
    torch._dynamo.reset()
    module = outcore.wrap(Scored(), budget="1GiB", strict=True)
    tokens = torch.randint(0, 64, (32,))
    _, scores, _ = module(tokens, tokens)
    with torch.no_grad():
        module.head.bias.add_(1)
    with pytest.raises(StepError, match="changed in place"):
        scores.sum().backward()
    module(tokens, tokens)[1].sum().backward()


class Wide(nn.Module):
    """A loss beside a large result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(10))
        self.head = nn.Linear(128, 1024)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return nn.functional.mse_loss(y, x), self.head(y)


def numbers(module: nn.Module) -> list[Any]:
    """The gradients as NumPy arrays, which count against no budget."""
    return [p.grad.numpy().copy() for p in module.parameters() if p.grad is not None]


def surprised(module: nn.Module, budget: int, **options: Any) -> None:
    """Train for the loss alone, and then for both results, twice."""
    x = torch.randn(1024, 128)
    plain = copy.deepcopy(module)
    loss, wide = plain(x)
    (loss + wide.sin().sum()).backward()
    expected = numbers(plain)
    del plain, loss, wide
    resident = resident_bytes(torch.device("cpu"))
    handle = outcore.handle(outcore.wrap(module, budget=budget + resident, **options))
    for _ in range(STEPS):
        module(x)[0].backward()
        module.zero_grad()
    assert handle.report().state != "profiling"
    for _ in range(2):
        loss, wide = module(x)
        (loss + wide.sin().sum()).backward()
        del loss, wide
        assert all(map(np.array_equal, numbers(module), expected))
        module.zero_grad()


def test_a_second_run_has_no_room_for_results_of_its_own() -> None:
    torch._dynamo.reset()
    surprised(Wide(), 13 << 20)


def test_no_room_for_a_second_run_is_told_and_the_next_step_runs() -> None:
    """What a late graph makes is not recomputed, and there is nowhere to move it."""
    torch._dynamo.reset()
    module = Wide()
    with pytest.raises(InfeasibleError) as caught:
        surprised(module, 13 << 20, disk_budget=0)
    assert any("Run the step again" in note for note in caught.value.__notes__)
    del caught
    module.zero_grad()
    loss, wide = module(torch.randn(1024, 128))
    (loss + wide.sin().sum()).backward()


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Whatever runs again finds no room beside the results of its first run. Lists how often."""
    often, forward = list[int](), second_run._forward

    def refuse(graph: Any, inputs: list[Any]) -> Any:
        often.append(1)
        if len(often) % 2 == 0:  # the second attempt, of a graph that computes all in backward
            return forward(graph, inputs)
        raise InfeasibleError(budget_bytes=1, floor_bytes=2, op="op", needed_bytes=1)

    monkeypatch.setattr(second_run, "_forward", refuse)
    return often


class Various(nn.Module):
    """Dropout, running statistics, a result that is an input, and a view of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y = self.drop(self.norm(self.first(x)))
        z = self.drop(torch.relu(self.second(y)))
        return z.square().mean(), z, y[:, 1:], self.first.weight


@torch._functorch.config.patch(donated_buffer=False)  # aot_eager refuses `retain_graph` otherwise
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("retain", [False, True])
def test_all_is_computed_in_backward(dynamic: bool, retain: bool, no_room: list[int]) -> None:
    """In the last steps, further results get gradients, one after the other."""
    modules = [Various(), Various()]
    modules[1].load_state_dict(modules[0].state_dict())
    found = []
    backends: list[Any] = ["aot_eager", Backend(budget="1GiB", strict=True)]
    for module, backend in zip(modules, backends, strict=True):
        torch._dynamo.reset()
        call = torch.compile(module, backend=backend, dynamic=dynamic)
        for step in range(STEPS + 5):
            torch.manual_seed(step)
            module.zero_grad()
            results = call(torch.randn(16 + dynamic * step, WIDTH))
            used = results[: max(1, step - STEPS)]
            for each in reversed(range(1 + retain)):
                sum(t.sin().sum() for t in used).backward(retain_graph=bool(each))
            found.append([*numbers(module), *(b.numpy().copy() for b in module.buffers())])
            found[-1].append(torch.rand(1).numpy())
    half = len(found) // 2
    for step, (one, other) in enumerate(zip(found[:half], found[half:], strict=True)):
        assert all(map(np.array_equal, one, other)), f"step {step}"
    assert len(no_room) >= 4 + 4 * retain


def test_what_finds_no_room_is_not_held(
    no_room: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Missing, "late", lambda *_: None)
    torch._dynamo.reset()
    module = outcore.wrap(Wide(), budget="1GiB", strict=True)
    module(torch.randn(8, 128))[0].backward()
    gc.collect()
    loss, wide = module(torch.randn(8, 128))
    given = list[StorageWeakRef]()
    wide.register_hook(lambda t: given.append(StorageWeakRef(t.untyped_storage())))
    gc.disable()
    try:
        with pytest.raises(InfeasibleError) as caught:
            (loss + wide.sin().sum()).backward()
        assert any("Run the step again" in note for note in caught.value.__notes__)
        del caught, loss, wide
        assert [each.expired() for each in given] == [True]
    finally:
        gc.enable()
    assert len(no_room) == 1


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, given: Tensor) -> Tensor:
        return given + torch.rand_like(given)


class Noisy(Wide):
    """What its backward draws, it must not draw from where forward began."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loss, wide = super().forward(x)
        return Noise.apply(loss), wide


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.usefixtures("no_room")
def test_a_backward_that_draws_is_not_computed_with_its_forward() -> None:
    torch._dynamo.reset()
    module = outcore.wrap(Noisy(), budget="1GiB", strict=True)
    module(torch.randn(8, 128))[0].backward()
    loss, wide = module(torch.randn(8, 128))
    with pytest.raises(InfeasibleError):
        (loss + wide.sin().sum()).backward()


class Large(nn.Module):
    """Backward of the loss does not read the input, which plain PyTorch then does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        small = x.mean(0) + self.weight
        return small.sum(), (small * 2).sin()


def test_large_inputs_are_not_held_once_a_guess_was_right() -> None:
    torch._dynamo.reset()
    module = outcore.wrap(Large(), budget="1GiB", strict=True)
    for step in range(2):
        x = torch.ones(1 << 18, 4)
        loss, other = module(x)
        memory = StorageWeakRef(x.untyped_storage())
        del x
        assert memory.expired() == bool(step)
        if not step:
            loss.backward()
    with pytest.raises(StepError, match="Run the step again"):
        other.sum().backward()
    module.zero_grad()
    module(torch.ones(1 << 18, 4))[1].sum().backward()
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad, 2 * torch.cos(torch.full((4,), 4.0)))


def test_a_large_input_that_is_alive_runs_again() -> None:
    torch._dynamo.reset()
    module = outcore.wrap(Large(), budget="1GiB", strict=True)
    x = torch.ones(1 << 18, 4)
    for used in (0, 0, 0, 1):
        module.zero_grad()
        module(x)[used].sum().backward()
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad, 2 * torch.cos(torch.full((4,), 4.0)))


@torch.library.custom_op("missing_gradients::masked", mutates_args=())
def masked(x: Tensor) -> Tensor:
    mask = np.random.default_rng().random(x.shape) > 0.5
    return x * torch.from_numpy(mask)


@masked.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def multiply(ctx: Any, gradient: Tensor) -> Any:
    return gradient * (ctx.saved_tensors[0] != 0)


masked.register_autograd(multiply, setup_context=keep)


def test_ops_that_may_do_otherwise_next_time_run_once() -> None:
    """Only their author knows whether they draw numbers of their own."""
    torch._dynamo.reset()

    class Masked(Scored):
        def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            loss, scores, hidden = super().forward(tokens, labels)
            return loss, masked(scores), hidden

    module, backend = Masked(), Backend(budget="1GiB", strict=True)
    call = torch.compile(module, backend=backend)
    for _ in range(STEPS):
        module.zero_grad()
        tokens = torch.randint(0, 64, (32,))
        scores = call(tokens, tokens)[1]
        scores.sum().backward()
        assert module.head.bias.grad is not None
        assert torch.equal(module.head.bias.grad, (scores != 0).sum(0).float())
    assert set(tangents(backend)) == {3}


class TwoTables(nn.Module):
    """A sparse table that is read twice cannot be planned."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        loss = self.head(tokens.float().mean(0).expand(WIDTH)).square().mean()
        return loss, self.table(tokens).sum(0) + self.table(tokens + 1).sum(0)


@pytest.mark.filterwarnings("ignore:outcore runs a graph in-core")
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_cannot_be_planned_runs_in_core(dynamic: bool) -> None:
    """Although what the first loss needs could be planned."""
    torch._dynamo.reset()
    module = TwoTables()
    wrapped = copy.deepcopy(module)
    call = torch.compile(wrapped, backend=Backend(budget="1GiB"), dynamic=dynamic)
    for step in range(STEPS):
        found = []
        for each, run in ((module, module), (wrapped, call)):
            torch.manual_seed(step)
            each.zero_grad()
            loss, other = run(torch.randint(0, 63, (8 + step,)))
            (loss + other.sum()).backward()
            found.append([p.grad.to_dense() for p in each.parameters() if p.grad is not None])
        assert equal(*found)


@pytest.mark.parametrize("close", [Backend.close, lambda _: None])
def test_a_surprise_after_the_backend_was_closed(close: Callable[[Backend], object]) -> None:
    torch._dynamo.reset()
    module, backend = Scored(), Backend(budget="1GiB", strict=True)
    wrapped = copy.deepcopy(module)
    call = torch.compile(wrapped, backend=backend)
    for step in range(4):
        found = []
        for each, run in ((module, module), (wrapped, call)):
            torch.manual_seed(step)
            each.zero_grad()
            tokens = torch.randint(0, 64, (32,))
            results = run(tokens, tokens)
            if run is call and step == 2:
                close(backend)
            results[step == 2].sum().backward()
            found.append([p.grad for p in each.parameters()])
        assert equal(*found)


def test_a_call_without_backward_is_freed() -> None:
    """Also if it overwrites an input, which then knows the call that made its gradient."""
    torch._dynamo.reset()

    class Adds(Scored):
        def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            found = super().forward(labels, labels)
            tokens.add_(self.head.bias.sum())
            return found

    module, backend = Adds(), Backend(budget="1GiB", strict=True)
    call = torch.compile(module, backend=backend)
    for _ in range(4):
        tokens = torch.zeros(32)
        call(tokens, torch.zeros(32, dtype=torch.long))
        assert tokens.requires_grad
        del tokens
        gc.collect()
    assert backend.engine is not None
    assert not len(backend.engine.stores)


def test_instances_whose_hooks_differ_share_a_graph() -> None:
    torch._dynamo.reset()
    backend = Backend(budget="1GiB", strict=True)
    modules = [Heads(), Heads()]
    next(modules[1].heads[1].parameters()).register_hook(lambda gradient: gradient)
    calls = [torch.compile(module, backend=backend) for module in modules]
    for _ in range(8):
        for call in calls:
            call(torch.randn(8, WIDTH))[0].sum().backward()
    assert len(tangents(backend)) == 1


def test_numbers_of_parameters_alone_are_no_losses() -> None:
    torch._dynamo.reset()

    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.head(x), self.scale.exp()

    module, backend = Tempered(), Backend(budget="1GiB", strict=True)
    call = torch.compile(module, backend=backend)
    scores, scale = call(torch.randn(8, WIDTH))
    assert tangents(backend) == [2]
    (scores * scale).sum().backward()
    assert tangents(backend) == [2]


def test_a_hook_that_is_added_late_gets_zeros() -> None:
    torch._dynamo.reset()
    module = outcore.wrap(Heads(), budget="1GiB", strict=True)
    seen: list[Tensor] = []
    for step in range(STEPS):
        results = module(torch.randn(8, WIDTH))
        if step == STEPS - 1:
            next(module.heads[1].parameters()).register_hook(seen.append)
        results[0].sum().backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], torch.zeros(WIDTH, WIDTH))


def test_what_is_overwritten_and_read_by_backward_is_not_guessed() -> None:
    torch._dynamo.reset()

    class Counted(Scored):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            self.scale.mul_(1.5)
            loss, scores, hidden = super().forward(tokens, labels)
            return loss * self.scale, scores, hidden

    module, backend = Counted(), Backend(budget="1GiB", strict=True)
    wrapped = copy.deepcopy(module)
    call = torch.compile(wrapped, backend=backend)
    assert equal(scored(wrapped, call, surprising), scored(module, module, surprising))
    assert set(tangents(backend)) == {3}


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.reshape(4, -1).reshape(x.shape),
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "softmax": lambda x: x.softmax(-1),
    "norm": lambda x: nn.functional.layer_norm(x, x.shape[-1:]),
    "index": lambda x: x[torch.arange(x.shape[0]).flip(0)],
    "slices": lambda x: torch.cat([x[:, 4:], x[:, :4]], 1),
    "where": lambda x: torch.where(x > 0, x, x * 0.5),
    "mask": lambda x: x.masked_fill(x > 1, 0.25),
    "scatter": lambda x: torch.zeros_like(x).scatter_add(0, torch.zeros_like(x).long(), x),
    "sum": lambda x: x - x.mean(1, keepdim=True),
    "max": lambda x: x.amax(1, keepdim=True) + x,
    "half": lambda x: x.to(torch.bfloat16).float(),
    "matrix": lambda x: x @ x.t() @ x / 8,
    "cumsum": lambda x: x.cumsum(1) / 8,
    "dropout": lambda x: nn.functional.dropout(x, 0.3),
}


class Drawn(nn.Module):
    """Chains of ops that share some of their results; each ends in a result."""

    def __init__(self, choices: Sequence[tuple[str, int]], ends: Sequence[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8) / 3 for _ in choices)
        self.choices, self.ends = choices, ends

    def forward(self, x: Tensor) -> list[Tensor]:
        made = [x]
        for weight, (op, source) in zip(self.weights, self.choices, strict=True):
            made.append(OPS[op](made[source % len(made)] @ weight))
        return [made[1 + end % (len(made) - 1)] * 2 for end in self.ends]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    choices=st.lists(
        st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 20)), min_size=2, max_size=8
    ),
    ends=st.lists(st.integers(0, 20), min_size=2, max_size=4),
    used=st.lists(st.integers(1, 15), min_size=4, max_size=4),
)
def test_generated_graphs(choices: list[tuple[str, int]], ends: list[int], used: list[int]) -> None:
    """Gradients are those of plain PyTorch whichever results get some, and None where its are."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Drawn(choices, ends)
    wrapped = outcore.wrap(copy.deepcopy(module), budget="1GiB", strict=True)
    same: Any = torch.compile(copy.deepcopy(module), backend="aot_eager")
    for step, bits in enumerate(used):
        found = []
        for each, call in ((module, module), (wrapped, wrapped), (same._orig_mod, same)):
            torch.manual_seed(step)
            each.zero_grad()
            results = call(torch.randn(8, 8))
            kept = [r for i, r in enumerate(results) if bits >> i & 1] or results[:1]
            torch.stack([r.sum() for r in kept]).sum().backward()
            found.append([p.grad for p in each.parameters()])
        for plain, ours, zeros in zip(*found, strict=True):
            assert (plain is None) == (ours is None)
            assert ours is None or torch.equal(ours, zeros)


def test_saved_plans_are_found_again(tmp_path: Path) -> None:
    """Also with `strict`, and although the first steps have another graph."""
    path = tmp_path / "plans.json"
    for plan in (None, path):
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Heads()
        options: dict[str, Any] = {"plan": plan, "strict": plan is not None}
        backend = Backend(budget="1GiB", policy="swap-all", **options)
        call = torch.compile(module, backend=backend)
        for _ in range(STEPS + 2):
            call(torch.randn(64, WIDTH))[0].sum().backward()
        if plan is None:
            backend.save_plans(path)
    assert f"from {path}" in str(backend.report())


class Gated(torch.autograd.Function):
    """The gradient of the first result is taken where that of the second one is positive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        first, second = gradients
        return torch.where(second > 0, first, 0)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo does
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_that_only_such_zeros_depend_on(dynamic: bool) -> None:
    """They are given, although the graph needs them no more."""
    torch._dynamo.reset()

    class Both(Heads):
        def forward(self, x: Tensor) -> list[Any]:
            first, second, third = super().forward(x)
            return [*Gated.apply(first), second, third]

    module = Both()
    backend = Backend(budget="1GiB", strict=True)
    wrapped = copy.deepcopy(module)
    call = torch.compile(wrapped, backend=backend, dynamic=dynamic)
    for step in range(STEPS):
        found = []
        for each, run in ((module, module), (wrapped, call)):
            torch.manual_seed(step)
            each.zero_grad()
            _, gate, second, _ = run(torch.randn(8 + step, WIDTH))
            (gate.sum() + second.sum()).backward()
            found.append([p.grad for p in each.parameters()])
        for plain, ours in zip(*found, strict=True):
            if ours is None:
                assert plain is None or not plain.any()
            else:
                assert torch.equal(ours, plain)


class Tagged(Tensor):
    """As the images of libraries: a tensor with a name."""


@pytest.mark.parametrize("tell", [False, True])
def test_inputs_of_other_classes(tell: bool) -> None:
    class Told(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})

    torch._dynamo.reset()
    module = Heads()
    wrapped = copy.deepcopy(module)
    call = torch.compile(wrapped, backend=Backend(budget="1GiB"))
    for step in range(STEPS):
        found = []
        for each, run in ((module, module), (wrapped, call)):
            torch.manual_seed(step)
            each.zero_grad()
            results = run(torch.randn(64, WIDTH).as_subclass(Told if tell else Tagged))
            results[step == 4].as_subclass(Tensor).sum().backward()
            found.append([p.grad for p in each.parameters()])
        assert equal(*found)


def test_draws_of_another_thread_are_told() -> None:
    torch._dynamo.reset()
    backend = Backend(budget="1GiB", strict=True)
    call = torch.compile(Scored(), backend=backend)
    tokens = torch.randint(0, 64, (32,))
    _, scores, _ = call(tokens, tokens)
    assert backend.engine is not None
    (store,) = backend.engine.stores.all()
    store.draws = torch.Generator().manual_seed(1).get_state(), store.draws[1]
    with pytest.raises(StepError, match="another thread draws"):
        scores.sum().backward()
    call(tokens, tokens)[1].sum().backward()


@pytest.mark.filterwarnings("ignore:outcore runs a graph in-core")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_that_cannot_be_made_for_a_surprise(
    dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then such steps run in-core, with forward and backward at once."""
    torch._dynamo.reset()
    module = Scored()
    wrapped = copy.deepcopy(module)
    call = torch.compile(wrapped, backend=Backend(budget="1GiB"), dynamic=dynamic)
    made = Missing.reduced
    whole: list[int] = []

    def refuse(missing: Missing, left: int) -> Any:
        if left or whole:
            return made(missing, left)
        whole.append(left)
        raise CaptureError(reason="by the test")

    monkeypatch.setattr(Missing, "reduced", refuse)
    everything = lambda _, results: sum(each.sin().sum() for each in results)  # noqa: E731 - short
    found = scored(wrapped, call, lambda i, r: everything(i, r) if i > 1 else r[0])
    assert len(whole) == 1
    assert equal(found, scored(module, module, lambda i, r: everything(i, r) if i > 1 else r[0]))


@pytest.mark.filterwarnings("ignore:outcore runs a graph in-core")
def test_a_hook_that_is_added_late_where_no_other_graph_can_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    module = Heads()
    call = torch.compile(module, backend=Backend(budget="1GiB"))
    for _ in range(3):
        results = call(torch.randn(8, WIDTH))
        results[0].sum().backward()
    seen: list[Tensor] = []
    next(module.heads[1].parameters()).register_hook(seen.append)

    def refuse(*_: Any) -> Any:
        raise CaptureError(reason="by the test")

    monkeypatch.setattr("outcore.runtime.graph_compiler.source_of", refuse)
    for _ in range(2):
        call(torch.randn(8, WIDTH))[0].sum().backward()
    assert len(seen) == 2
    assert all(torch.equal(each, torch.zeros(WIDTH, WIDTH)) for each in seen)
