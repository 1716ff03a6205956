"""Writes into a part of an input, which may itself be a part of a larger tensor."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import outcore
from outcore import Backend, aten
from outcore.capture.nodes.storages import covered_bytes
from outcore.capture.rewrites.writes import WRITES
from outcore.measure.resident import resident_bytes
from outcore.runtime.step.versions import versions_of
from tests.cpu.training import PROFILED_STEPS, inside, mean_square, same, snapshot

ROWS, WIDTH, STEPS = 16, 32, PROFILED_STEPS + 5
MIB = 1 << 20

Write = Callable[[Tensor], Any]
Place = Callable[[int, Tensor], Tensor]


def _often(x: Tensor) -> None:
    for number in range(4):
        x[number] = x[number + 1] * 2
        x[:, number].add_(1)


def _parts(x: Tensor) -> None:
    first, second = x.split(WIDTH // 2, 1)
    first[2:5] = second[3:6]
    second.mul_(2)


IN_PLACE: dict[str, Write] = {
    "columns": lambda x: x[:, :8].fill_(0),
    "rows": lambda x: x[2:5].copy_(x[5:8]),
    "a row": lambda x: x[3].fill_(1),
    "every other": lambda x: x[1::2, 3:].mul_(2),
    "none": lambda x: x[:0].fill_(1),
    "all": lambda x: x.copy_(x.flip(0)),
    "the diagonal": lambda x: x.diagonal().fill_(3),
    "through a view": lambda x: x.view(2, ROWS // 2, WIDTH)[1, 2:].fill_(1),
    "transposed": lambda x: x.t()[2:4].add_(1),
    "parts": _parts,
    "often": _often,
}

LIES: dict[str, Place] = {
    "rows of a larger tensor": lambda step, data: data[step * ROWS :][:ROWS, :WIDTH],
    "on its own, then in a larger one": lambda step, data: (
        data[:, :WIDTH].contiguous()[step * ROWS * (step > PROFILED_STEPS) :][:ROWS]
        if step > 2
        else data[:ROWS, :WIDTH].contiguous()
    ),
    "columns of a larger tensor": lambda step, data: data[step : step + ROWS, step:][:, :WIDTH],
    "turned": lambda step, data: data.view(-1)[step:][: ROWS * WIDTH].view(WIDTH, ROWS).t(),
    "with gaps": lambda step, data: data[step:][: 2 * ROWS : 2, ::2][:, :WIDTH],
}


class Written(nn.Module):
    """Writes into its argument, and uses it."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.write(x)
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return y + x[:, :1]


def stepped(call: Any, module: nn.Module, batches: Iterator[Tensor]) -> list[list[Tensor]]:
    found = []
    for x in batches:
        module.zero_grad()
        loss = mean_square(call(x))
        loss.backward()
        found.append([x.clone(), *snapshot(module, loss)])
    return found


@pytest.mark.parametrize("lies", LIES)
@pytest.mark.parametrize("write", IN_PLACE)
def test_any_part_may_be_written_wherever_it_lies(write: str, lies: str) -> None:
    def batches() -> Iterator[Tensor]:
        for step in range(STEPS):
            draws = torch.Generator().manual_seed(step)
            yield LIES[lies](step, torch.randn(STEPS * ROWS, 3 * WIDTH, generator=draws))

    torch._dynamo.reset()
    module, plain = Written(IN_PLACE[write]), Written(IN_PLACE[write])
    backend = Backend(budget="1GiB", policy="swap-all", strict=True)
    call = torch.compile(module, backend=backend, dynamic=False)
    assert same(stepped(call, module, batches()), stepped(plain, plain, batches()))
    assert backend.engine is not None
    for graph in backend.engine.graphs:
        trace = graph.captured.trace
        inputs = {trace.values[value].buffer for value in trace.inputs}
        made = [buffer for buffer in trace.buffers if buffer.id not in inputs]
        assert max(buffer.nbytes for buffer in made) <= 8 * ROWS * WIDTH * 4


class Wide(nn.Module):
    """Sets columns of its argument to zero, and passes it through many layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        x[:, :8] = 0
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def new_bytes(step: Callable[[], None]) -> int:
    """The most that was allocated in a step, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        step()
    assert run.profiler is not None
    events = (e for e in run.profiler.kineto_results.events() if e.name() == "[memory]")
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.mark.parametrize("own", [0, PROFILED_STEPS + 3])
@pytest.mark.parametrize("policy", ["search", "swap-all"])
def test_a_budget_has_room_for_what_is_written_alone(policy: str, own: int) -> None:
    """The first `own` batches have storages of their own, later ones are slices of all data."""
    torch._dynamo.reset()
    gc.collect()
    module, data = Wide(), torch.randn(16, 1024, 256, generator=torch.Generator().manual_seed(1))
    held = resident_bytes(torch.device("cpu"))
    room = (20 if policy == "search" else 12) * MIB
    backend = Backend(budget=held + room, policy=policy, strict=True)
    call = torch.compile(module, backend=backend)

    for number in range(PROFILED_STEPS + 6):
        x = data[number].clone() if number < own else data[number]
        module.zero_grad()

        def step(x: Tensor = x) -> None:
            mean_square(call(x)).backward()

        if number > PROFILED_STEPS + 3:
            peak, report = held + new_bytes(step), backend.report()
            assert report.predicted_peak_bytes is not None
            assert peak <= report.predicted_peak_bytes <= report.budget_bytes
            inside(report)
        else:
            step()
    assert (backend.report().counts.offload > 0) == (policy == "swap-all")


SIDES = st.integers(1, 4)


@given(data=st.data(), shape=st.tuples(SIDES, SIDES), steps=st.tuples(SIDES, SIDES))
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_what_torch_writes(
    data: st.DataObject, shape: tuple[int, int], steps: tuple[int, int]
) -> None:
    """In a storage of what the tensor covers, with the strides of the tensor."""
    whole = torch.randn(20, 20)
    start = data.draw(st.tuples(SIDES, SIDES))
    x = whole[start[0] :: steps[0], start[1] :: steps[1]][: shape[0], : shape[1]]
    x = x.t() if data.draw(st.booleans()) else x
    where: dict[str, tuple[Tensor, Any]] = {
        "copy": (x, ()),
        "diagonal_scatter": (x.diagonal(0, 1, 0), (0, 1, 0)),
        "select_scatter": (x.select(1, -1), (1, -1)),
        "slice_scatter": (x[1:], (0, 1)),
    }
    for theirs, ours in WRITES.items():
        part, args = where[theirs._opname]
        source = torch.randn(part.shape, dtype=torch.float64)
        made, expected = ours(x, source, *args), theirs(x, source, *args)
        assert torch.equal(made, expected)
        assert (made.stride(), made.dtype) == (expected.stride(), expected.dtype)
        assert made.storage_offset() == 0
        assert made.untyped_storage().nbytes() == len(covered_bytes(x))


def test_what_reads_beyond_an_input_is_left_to_torch() -> None:
    layer = nn.Linear(8, 8)

    def targets(write: Callable[[Tensor], Tensor], x: Tensor) -> set[str]:
        trace = outcore.trace(lambda x: layer(write(x)).sum(), x)
        return {op.target for op in trace.ops} & {*aten.WRITES, *aten.COVERED_WRITES}

    def beyond(x: Tensor) -> Tensor:
        return torch.slice_scatter(x, x[:1] * 2, 0, 0, 1).as_strided((4, 8), (16, 1))

    def written(x: Tensor) -> Tensor:
        return torch.slice_scatter(x, x[:1] * 2, 0, 0, 1)

    theirs, ours = {"aten.slice_scatter.default"}, {"outcore.slice_scatter.default"}
    whole = torch.randn(8, 16)
    assert targets(beyond, whole[:4, :8]) == theirs
    assert targets(written, torch.randn(8).expand(4, 8)) == theirs
    assert targets(written, whole.view(-1).as_strided((4, 8), (4, 1))) == theirs
    assert targets(lambda x: written(x * 2), whole[:4, :8]) == theirs
    assert targets(written, whole[:4, :8]) == ours
    assert targets(lambda x: written(x.t()), whole[:8, :8]) == ours


def test_versions_are_those_of_what_somebody_else_may_write() -> None:
    written, kept, overwritten = (torch.zeros(4) for _ in range(3))
    written.add_(1)
    things = [written, kept, overwritten, overwritten[:2], 3]
    once, before = range(1, 2), range(1)
    assert versions_of(things, [overwritten]) == [once, before, None, range(2), None]
    assert versions_of(things, [overwritten], (1, 3)) == [once, None, None, None, None]
    assert versions_of(things, []) == [once, before, before, before, None]
