"""Inputs that lie in one storage count as the parts that they cover, not each as all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outcore
from outcore import Backend
from outcore.capture.nodes.storages import covered_bytes
from outcore.errors import StepError
from outcore.measure.resident import resident_bytes
from tests.cpu.training import inside, mean_square, same, train

STEPS, PARTS, MIB = 7, 8, 1 << 20


class Chunks(nn.Module):
    """Sums up its arguments, each after a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(PARTS))

    def forward(self, *chunks: Tensor) -> Any:
        parts = (layer(x).tanh() for layer, x in zip(self.layers, chunks, strict=True))
        return sum(parts)


class Beyond(nn.Module):
    """Reads the second half of a storage through the first half, which it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, first: Tensor, second: Tensor) -> Any:
        both = first.as_strided((2, *first.shape), (first.numel(), 256, 1))
        return self.layer(both[0] + both[1]).tanh() + self.layer(second).tanh()


class Marked(nn.Module):
    """Writes into the first of two tensors, and uses what follows from the second all along."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers().children())

    def forward(self, first: Tensor, second: Tensor) -> Any:
        first[:, 0] = 1.0
        x = first
        for layer in self.layers:
            x, second = layer(x) + second.sin(), second * 2
        return x


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(PARTS)))


def in_one_vector() -> nn.Module:
    model = layers()
    vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(vector, model.parameters())
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == 1
    return model


def wrapped(model: nn.Module, args: list[Tensor], **options: Any) -> tuple[Any, outcore.Report]:
    found = train(outcore.wrap(model, **options), model, args, mean_square, STEPS)
    return found, outcore.handle(model).report()


def expected(model: nn.Module, args: list[Tensor]) -> Any:
    return train(model, torch.compile(model, backend="aot_eager"), args, mean_square, STEPS)


def test_parameters_in_one_vector() -> None:
    args = [torch.randn(4096, 256, generator=torch.Generator().manual_seed(1))]
    found, report = wrapped(in_one_vector(), args, budget="40MiB", policy="swap-all")
    inside(report)
    assert report.counts.offload > 0
    assert same(found, expected(in_one_vector(), args))


@pytest.mark.parametrize("dim", [0, 1])
def test_arguments_that_are_chunks_of_one_tensor(dim: int) -> None:
    """Across rows each chunk is a part; across columns each reaches over nearly all of it."""
    shape = (PARTS * 512, 256) if dim == 0 else (512, PARTS * 256)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    chunks = list(whole.chunk(PARTS, dim))
    torch.manual_seed(0)
    model = Chunks()
    found, report = wrapped(model, chunks, budget="80MiB", policy="swap-all")
    torch.manual_seed(0)
    assert same(found, expected(Chunks(), chunks))
    assert report.resident_bytes is not None
    assert (report.resident_bytes < 2 * whole.nbytes + 5 * MIB) == (dim == 0)


def test_one_of_two_chunks_is_written_in_forward() -> None:
    """The two have one count of writes, and the second is read again in backward."""

    def run(model: nn.Module, call: Any) -> list[list[list[Tensor]]]:
        draws = torch.Generator().manual_seed(1)
        made = (torch.randn(1024, 256, generator=draws).chunk(2) for _ in range(STEPS))
        return [train(model, call, list(halves), mean_square, 1) for halves in made]

    plain = Marked()
    without = run(plain, torch.compile(plain, backend="aot_eager"))
    torch._dynamo.reset()
    model, budget = Marked(), resident_bytes(torch.device("cpu")) + 20 * MIB
    backend = Backend(budget=budget, policy="recompute-all", strict=True)
    call = torch.compile(model, backend=backend)
    assert all(same(*both) for both in zip(run(model, call), without, strict=True))
    assert backend.report().counts.recompute > 0
    first, second = torch.randn(1024, 256).chunk(2)
    loss = mean_square(call(first, second))
    second += 1
    with pytest.raises(StepError, match="changed in place"):
        loss.backward()


def test_a_view_that_reaches_beyond_its_part() -> None:
    whole = torch.randn(1024, 256, generator=torch.Generator().manual_seed(1))
    halves = list(whole.chunk(2))
    torch.manual_seed(0)
    found, _ = wrapped(Beyond(), halves, budget="30MiB", policy="swap-all")
    torch.manual_seed(0)
    assert same(found, expected(Beyond(), halves))


def test_one_view_beyond_its_part_leaves_the_other_storages_alone() -> None:
    whole = torch.randn(1024, 256, generator=torch.Generator().manual_seed(1))
    halves = list(whole.chunk(2))

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.beyond, self.layers = Beyond(), in_one_vector()

        def forward(self, first: Tensor, second: Tensor) -> Any:
            return self.layers(self.beyond(first, second))

    _, report = wrapped(Both(), halves, budget="60MiB", policy="swap-all")
    assert report.resident_bytes is not None
    assert report.resident_bytes < 2 * 8 * MIB + 4 * whole.nbytes, "each layer has 257 KiB"


def test_parts_add_up_to_the_storage() -> None:
    """Also where inputs cover only a part of it: the storage is held as a whole."""
    series = torch.empty(1 << 20)
    model = nn.Linear(64, 64)

    def windows(first: Tensor, second: Tensor) -> Tensor:
        return mean_square(model(first) + model(second))

    trace = outcore.trace(windows, series[64:128], series[4096:4160])
    inputs = {trace.values[value].buffer for value in trace.inputs}
    borrowed = sum(trace.buffers[b].nbytes for b in inputs)
    assert borrowed == series.nbytes + sum(p.nbytes for p in model.parameters())


class Statistics(nn.Module):
    """Batch norms whose running statistics lie in one vector."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(64) for _ in range(PARTS))
        vector, size = torch.zeros(4 * MIB // 4), 4 * MIB // 4 // (2 * PARTS)
        for number, norm in enumerate(self.norms):
            for place, name in enumerate(("running_mean", "running_var")):
                start = (2 * number + place) * size
                setattr(norm, name, vector[start : start + 64].fill_(place))

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = torch.relu(norm(x))
        return x


def test_what_is_overwritten_is_copied_as_it_counts() -> None:
    """Profiled steps copy it, to be able to begin again."""
    args = [torch.randn(512, 64, generator=torch.Generator().manual_seed(1))]
    budget = 24 * MIB
    backend = Backend(budget=budget, policy="swap-all", strict=True)
    module = Statistics()
    call = torch.compile(module, backend=backend)
    held = []

    def watched(x: Tensor) -> Tensor:
        made: Tensor = call(x)
        assert backend.engine is not None
        held.append(backend.engine.residency.resident_bytes())
        return made

    found = train(module, watched, args, mean_square, STEPS)
    assert max(held) <= budget
    assert same(found, expected(Statistics(), args))


def test_the_bytes_that_a_tensor_covers() -> None:
    whole = torch.empty(6, 4)
    assert covered_bytes(whole) == range(96)
    assert covered_bytes(whole[2:4]) == range(32, 64)
    assert covered_bytes(whole[:, 1]) == range(4, 88)
    assert covered_bytes(whole[2, :0]) == range(32, 32)
    assert covered_bytes(torch.empty(1).expand(5)) == range(4)
