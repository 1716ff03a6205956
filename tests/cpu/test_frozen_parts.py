"""Frozen modules whose calling code torch does not compile: backward passes through them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outcore
from outcore.errors import InfeasibleError, NotEngagedError
from outcore.measure import resident_bytes
from outcore.wrapping.call_wrapper import CALLS_TO_WAIT
from outcore.wrapping.compiled import SKIPPED
from tests.cpu.training import (
    PROFILED_STEPS,
    Away,
    Broken,
    Small,
    away,
    back,
    batch,
    inside,
    mean_square,
    same,
    snapshot,
)

STEPS = PROFILED_STEPS + 4
WIDTH = 64
ROWS = 1024
BUDGET = "1GiB"


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    SKIPPED.clear()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Frozen(nn.Module):
    """Frozen blocks in a loop, which ends their graph, with adapters that are trained, if any."""

    def __init__(self, *, adapted: bool = False, breaks: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(4)
        )
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.requires_grad_(requires_grad=False)
        count = len(self.blocks) if adapted else 0
        self.adapters = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = x + block(x)
            if self.adapters:
                x = x + self.adapters[index](x)
            if self.breaks:
                torch._dynamo.graph_break()
        return x


def train(module: nn.Module, steps: int = STEPS) -> list[Away]:
    """Train a prompt, which is added to each input, and what the module trains."""
    torch.manual_seed(1)
    prompt = nn.Parameter(torch.zeros(1, WIDTH))
    found = []
    for _ in range(steps):
        module.zero_grad()
        prompt.grad = None
        loss = mean_square(module(torch.randn(ROWS, WIDTH) + prompt))
        loss.backward()
        trained = [p.grad for p in (prompt, *module.parameters()) if p.grad is not None]
        found.append(away([loss.detach(), *trained]))
    return found


def alike(first: list[Away], second: list[Away]) -> bool:
    return same(list(map(back, first)), list(map(back, second)))


def entry_points(module: nn.Module) -> list[str]:
    return [path for path, m in module.named_modules() if path and m._compiled_call_impl]


@pytest.mark.parametrize("adapted", [False, True])
def test_frozen_parts_are_planned(*, adapted: bool) -> None:
    expected = train(Frozen(adapted=adapted))
    roomy = outcore.wrap(Frozen(adapted=adapted), BUDGET, strict=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="outcore")
        assert alike(train(roomy), expected)
    report = outcore.handle(roomy).report()
    assert report.state == "in-core"
    assert report.graphs == len(roomy.blocks) + len(roomy.adapters)
    assert report.measured_peak_bytes is not None
    assert "unused" not in entry_points(roomy)
    torch._dynamo.reset()
    activations = report.measured_peak_bytes - resident_bytes(torch.device("cpu"))
    tight = outcore.wrap(
        Frozen(adapted=adapted), report.measured_peak_bytes - activations // 8, policy="swap-all"
    )
    assert alike(train(tight), expected)
    report = outcore.handle(tight).report()
    assert report.state == "planned"
    inside(report)


def test_frozen_parts_of_a_model_in_eval_mode_are_planned() -> None:
    expected = train(Frozen().eval())
    module = outcore.wrap(Frozen().eval(), BUDGET, strict=True)
    assert alike(train(module), expected)
    assert outcore.handle(module).report().graphs == len(module.blocks)


def test_a_frozen_model_without_a_backward_has_no_parts() -> None:
    """As one that gives features: nothing is kept for backward."""
    module = outcore.wrap(Frozen(), BUDGET)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="outcore: ")
        warnings.filterwarnings("ignore", message=".*nothing to plan")
        for _ in range(CALLS_TO_WAIT + 4):
            module(torch.randn(8, WIDTH))
    assert entry_points(module) == []


def replace_forward(module: Frozen) -> None:
    """As accelerate does."""
    for block in module.blocks:
        first: Any = block[0]
        first.forward = partial(type(first).forward, first)


@pytest.fixture
def hook_of_all() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    yield
    handle.remove()


def test_hooks_of_all_modules_do_not_end_a_graph(hook_of_all: None) -> None:
    module = outcore.wrap(Frozen(breaks=False), BUDGET)
    train(module)
    report = outcore.handle(module).report()
    assert (report.graphs, report.notes) == (1, ())


@pytest.mark.parametrize("change", [None, replace_forward])
@pytest.mark.parametrize("adapted", [False, True])
def test_one_graph_stays_one(change: Callable[[Frozen], None] | None, *, adapted: bool) -> None:
    """The first calls are looked at, with no effect on what torch compiles."""
    compilations = []
    for wrapped in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        module = Frozen(adapted=adapted, breaks=False)
        if change is not None:
            change(module)
        call: Any = (
            outcore.wrap(module, BUDGET) if wrapped else torch.compile(module, backend="eager")
        )
        train(call)
        compilations.append(torch._dynamo.utils.counters["frames"]["ok"])
        if wrapped:
            report = outcore.handle(module).report()
            assert (report.graphs, report.notes) == (1, ())
    assert compilations[0] == compilations[1]
    assert not [m for m in module.modules() if m is not module and "_compiled_call_impl" in vars(m)]


def test_hooks_run_once_for_each_call() -> None:
    """Modules with hooks are not looked at: torch would compile what looks."""
    seen: list[Tensor] = []
    module = Frozen()
    first: Any = module.blocks[0]
    first[0].register_forward_hook(lambda *_: seen.append(torch.zeros(())))
    expected = train(module)
    assert len(seen) == STEPS
    outcore.wrap(module, BUDGET)
    assert alike(train(module), expected)
    assert len(seen) == 2 * STEPS
    assert outcore.handle(module).report().graphs >= len(module.blocks)


class Between(nn.Module):
    """Frozen blocks in a function that torch is told not to compile, between trained layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Frozen(breaks=False), nn.Linear(WIDTH, WIDTH)

    @torch.compiler.disable
    def around(self, x: Tensor) -> Any:
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.around(x))
        return result


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_left_alone_on_purpose_is_named(*, strict: bool) -> None:
    expected = train(Between())
    module = outcore.wrap(Between(), BUDGET, strict=strict)
    named = r"that calls body\.blocks\.0\.0, body\.blocks\.0\.2, .* and 5 more: they run as plain"
    if strict:
        with pytest.raises(NotEngagedError, match=named):
            train(module)
        return
    with pytest.warns(UserWarning, match=named):
        assert alike(train(module), expected)
    assert outcore.handle(module).report().graphs == 1


def test_a_step_without_room_for_frozen_parts_can_be_run_again() -> None:
    """In the first step they run as plain PyTorch, before the graphs of what is trained."""

    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Frozen(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(self.body(x))
            return result

    expected = train(Headed())
    module = Headed()
    held = resident_bytes(torch.device("cpu")) - sum(p.nbytes for p in module.parameters())
    outcore.wrap(module, held + (3 << 20), policy="swap-all")
    with pytest.raises(InfeasibleError) as caught:
        train(module)
    (note,) = [note for note in caught.value.__notes__ if "so far" in note]
    assert "body.blocks.0, body.blocks.1, body.blocks.2 and 1 more" in note
    del caught
    assert alike(train(module), expected)
    inside(outcore.handle(module).report())


@pytest.mark.parametrize("make", [Small, Broken])
def test_parameters_that_are_unfrozen_get_gradients(make: Callable[[], nn.Module]) -> None:
    """Before torch 2.13, `aot_eager` goes on without them."""

    def trained(module: nn.Module) -> list[list[Tensor]]:
        *frozen, _, _ = module.parameters()
        seen = []
        for step in range(4):
            for parameter in frozen:
                parameter.requires_grad_(step % 2 == 1)
            torch.manual_seed(step)
            module.zero_grad()
            loss = mean_square(module(batch(step)))
            loss.backward()
            seen.append(snapshot(module, loss))
        return seen

    torch.manual_seed(0)
    module = make()
    found = trained(outcore.wrap(copy.deepcopy(module), BUDGET))
    assert len(found[0]) < len(found[1])
    assert same(found, trained(module))


def test_watching_what_is_trained_runs_no_code_of_the_model() -> None:
    """Spectral norm counts how often its weight is read in training."""

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))

    seen = []
    for module in (made(), outcore.wrap(made(), BUDGET)):
        torch.manual_seed(1)
        nn.utils.parametrizations.spectral_norm(module[0])
        steps = []
        for step in range(4):
            module.zero_grad()
            loss = mean_square(module(torch.full((2, 8), step + 1.0)))
            loss.backward()
            steps.append(snapshot(module, loss))
        seen.append(steps)
    assert same(*seen)


def test_weights_that_get_other_memory_are_still_in_their_graphs() -> None:
    module = outcore.wrap(Frozen(adapted=True), BUDGET, strict=True)
    module.unused.requires_grad_(requires_grad=True)
    for step in range(8):
        if step == 6:
            module.requires_grad_(requires_grad=True)
        module.zero_grad()
        mean_square(module(torch.ones(4, WIDTH))).backward()
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.data = parameter.data - 1e-3 * parameter.grad
    assert not [note for note in outcore.handle(module).notes if "plain" in note]
