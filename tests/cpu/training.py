"""training: train the same model with and without outcore, to compare the results."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from outcore import Backend, Report, out_of_process
from outcore.ir.hardware import Tier
from outcore.ir.margin import MARGIN_DIVISOR
from outcore.policies import floor
from outcore.runtime.settings.options import Keywords

Loss = Callable[[Any], Tensor]


class Small(nn.Module):
    """Convolutions, batch norm, in-place ReLU, dropout in two places, and skips."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.middle = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(8))
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.norm(self.first(x)))
        for layer in self.middle:
            y = self.drop(torch.relu(layer(y))) + y
        scores: Tensor = self.head(self.drop(y.mean((2, 3))))
        return scores


class Broken(nn.Module):
    """A model of two graphs: in backward, the first waits until the second is done."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv2d(3, 8, 3, padding=1)
        self.parts = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(10))

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for part in self.parts[:5]:
            x = torch.dropout(torch.relu(part(x)), 0.2, train=True)
        torch._dynamo.graph_break()
        for part in self.parts[5:]:
            x = torch.dropout(torch.relu(part(x)), 0.2, train=True)
        return x


class Normed(nn.Module):
    """Convolutions, batch norm, ReLU and a skip."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            y = torch.relu(norm(convolution(y)) + y)
        made: Tensor = y
        return made


class Deep(nn.Module):
    """Layers that each save a map as large as the input; the last map is a result."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.rand(16, 1) for _ in range(layers))

    def forward(self, maps: Tensor) -> Tensor:
        for scale in self.scales:
            maps = torch.sigmoid(maps * scale)
        return maps


def batch(seed: int, n: int = 4, size: int = 32) -> Tensor:
    """A batch of random images from a seed."""
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(seed))


def mean_square(output: Tensor) -> Tensor:
    """A loss with which training does not diverge."""
    return output.square().mean()


def snapshot(module: nn.Module, loss: Tensor) -> list[Tensor]:
    """Copies of the loss, the gradients and the buffers."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return [t.detach().clone() for t in (loss, *gradients, *module.buffers())]


Away = list[tuple[torch.dtype, torch.Size, Any]]


def away(tensors: Sequence[Tensor]) -> Away:
    """The tensors as NumPy bytes, so that what tests keep does not count toward budgets."""
    flat = (t.detach().cpu().contiguous().view(-1).view(torch.uint8) for t in tensors)
    return [(t.dtype, t.shape, f.numpy().copy()) for t, f in zip(tensors, flat, strict=True)]


def back(kept: Away) -> list[Tensor]:
    """The tensors that `away` stored."""
    return [torch.from_numpy(array).view(dtype).view(shape) for dtype, shape, array in kept]


def train(
    module: nn.Module,
    call: Callable[..., Any],
    args: Sequence[Any],
    loss_of: Loss,
    steps: int,
) -> list[list[Tensor]]:
    """Train `module` by SGD through `call`; the seed is set before each forward call.

    Returns the snapshot of each step.
    """
    seen = []
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = loss_of(call(*args))
        loss.backward()
        seen.append(away(snapshot(module, loss)))
        optimizer.step()
    return list(map(back, seen))


def same(first: Sequence[Sequence[Tensor]], second: Sequence[Sequence[Tensor]]) -> bool:
    """Whether all tensors of all steps are bitwise equal."""
    return len(first) == len(second) and all(
        len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(first, second, strict=True)
    )


PROFILED_STEPS = 5
"""Steps until a single graph is planned: one is metered, three are timed, the next one plans."""


def small_reference(steps: int, *, eager: bool = False) -> list[list[Tensor]]:
    """The snapshots of each step of `Small` without outcore."""
    return list(map(back, _small_reference(steps, eager=eager)))


@cache
def _small_reference(steps: int, *, eager: bool) -> list[Away]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Small()
    call = module if eager else torch.compile(module, backend="aot_eager")
    return list(map(away, train(module, call, [batch(0)], mean_square, steps)))


def small_planned(steps: int, **options: Any) -> tuple[list[list[Tensor]], Backend]:
    """The snapshots of each step of `Small` through a Backend, and that Backend."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, backend = Small(), Backend(**options)
    call = torch.compile(module, backend=backend)
    return train(module, call, [batch(0)], mean_square, steps), backend


def tight_budget(
    module: nn.Module,
    args: Sequence[Any],
    loss_of: Loss,
    share: float = 0.3,
    profiled_steps: int = PROFILED_STEPS,
    **options: Unpack[Keywords],
) -> int:
    """A budget at `share` of the way from the model's floor to its in-core peak."""
    torch._dynamo.reset()
    roomy = 1 << 30
    backend = Backend(budget=roomy, **options)
    call = torch.compile(module, backend=backend)
    for _ in range(profiled_steps):
        module.zero_grad()
        loss_of(call(*args)).backward()
    module.zero_grad()
    engine = backend.engine
    assert engine is not None
    planned = [g.planned for g in engine.registry.active() if g.planned is not None]
    most = max(p.in_core.peak(Tier.DEVICE) for p in planned)
    least = max(floor(p.problem).nbytes for p in planned)
    torch._dynamo.reset()
    margin = roomy // MARGIN_DIVISOR
    within = least + share * (most - least) - margin
    return int(within * (1 + 2 / MARGIN_DIVISOR))


def trained(
    backend: Any, module: nn.Module, *shape: int, steps: int = 7, autocast: bool = False
) -> list[Tensor]:
    """Loss, gradients and buffers of the last step, with weights and a batch from a seed."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    call = torch.compile(module, backend=backend, dynamic=False)
    x = torch.randn(shape)
    for _ in range(steps):
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = mean_square(call(x))
        loss.backward()
    return snapshot(module, loss.detach())


def inside(report: Report) -> None:
    """Assert that the measured peak is within the predicted peak, and that within the budget."""
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= report.budget_bytes


def answered_here(_: str, questions: Iterable[Any], *__: Any) -> Generator[Future[Any], None, None]:
    """Stands in for `worker.ask_each`: answers here, where a test has changed something."""
    for question in questions:
        answered: Future[Any] = Future()
        answered.set_result(out_of_process.answer(question))
        yield answered
