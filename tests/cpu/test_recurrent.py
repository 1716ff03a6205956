"""Models with torch's recurrent layers: `wrap` plans what comes before and after them."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import outcore
from outcore.capture import recurrent_apart
from tests.cpu.test_budget_kept import inside
from tests.cpu.training import mean_square, same, train

FRAMES, STEPS = 8, 8


class Reader(nn.Module):
    """Convolutions of each frame of a clip, in the same forward as the layer that reads them."""

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.looks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(6))
        self.reads = recurrent
        self.head = nn.Linear(16, 4)

    def seen(self, clips: Tensor) -> Tensor:
        y = self.first(clips.flatten(0, 1))
        for look in self.looks:
            y = torch.relu(look(y))
        rows: Tensor = y.mean(3).view(len(clips), FRAMES, -1)[..., :64]
        return rows

    def forward(self, clips: Tensor) -> Tensor:
        frames = self.seen(clips)
        found, _ = self.reads(frames)
        scores: Tensor = self.head(found)
        return scores


class Packed(Reader):
    """The same with clips of different lengths."""

    def forward(self, clips: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.seen(clips), torch.tensor([8, 5]), batch_first=True)
        found, _ = pad_packed_sequence(self.reads(packed)[0], batch_first=True)
        scores: Tensor = self.head(found)
        return scores


class Deeper(nn.Module):
    """The same, called by another module."""

    reader: Reader

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.reader = Reader(recurrent)

    def forward(self, clips: Tensor) -> Tensor:
        scores: Tensor = self.reader(clips).tanh()
        return scores


def clips() -> Tensor:
    return torch.randn(2, FRAMES, 3, 48, 48, generator=torch.Generator().manual_seed(0))


def steps(module: nn.Module) -> list[list[Tensor]]:
    return train(module, module, [clips()], mean_square, STEPS)


def reference(module: nn.Module) -> list[list[Tensor]]:
    """Train with the same graphs, without a plan."""
    with recurrent_apart():
        call = torch.compile(module, backend="aot_eager")
        return train(module, call, [clips()], mean_square, STEPS)


def lstm() -> nn.Module:
    return nn.LSTM(64, 8, batch_first=True, bidirectional=True)


def gru() -> nn.Module:
    return nn.GRU(64, 16, num_layers=2, dropout=0.2, batch_first=True)


def rnn() -> nn.Module:
    return nn.RNN(64, 16, batch_first=True)


def made(kind: type[nn.Module], recurrent: Callable[[], nn.Module]) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return kind(recurrent())


@pytest.mark.parametrize("recurrent", [lstm, gru, rnn])
@pytest.mark.parametrize("kind", [Reader, Packed, Deeper])
def test_what_comes_before_and_after_is_planned(
    kind: type[nn.Module], recurrent: Callable[[], nn.Module]
) -> None:
    roomy = outcore.wrap(made(kind, recurrent), "1GiB", strict=True)
    steps(roomy)
    peak = outcore.handle(roomy).report().measured_peak_bytes
    assert peak is not None
    outcore.unwrap(roomy)
    del roomy
    plain = reference(made(kind, recurrent))
    model = outcore.wrap(made(kind, recurrent), int(peak * 0.6), strict=True)
    assert same(steps(model), plain)
    backend = outcore.handle(model)
    report = backend.report()
    assert report.state == "planned"
    assert report.counts.offload + report.counts.recompute > 0
    inside(backend)
    outcore.unwrap(model)


class Stacked(Reader):
    """The same with several recurrent layers, one after the other."""

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__(recurrent)
        self.second = nn.GRU(16, 16, batch_first=True)
        self.between = nn.Linear(16, 16)

    def forward(self, clips: Tensor) -> Tensor:
        found, _ = self.reads(self.seen(clips))
        found, _ = self.second(torch.tanh(self.between(found)))
        scores: Tensor = self.head(found)
        return scores


def planned(model: nn.Module, graphs: int) -> None:
    report = outcore.handle(model).report()
    assert (report.state, report.graphs) == ("in-core", graphs)
    outcore.unwrap(model)


def test_several_layers_make_several_graphs() -> None:
    model = outcore.wrap(made(Stacked, lstm), "1GiB", strict=True)
    assert same(steps(model), reference(made(Stacked, lstm)))
    planned(model, 3)


def test_a_class_that_torch_met_before_is_planned_too() -> None:
    torch.compile(made(Reader, lstm), backend="eager")(clips())
    model = outcore.wrap(Reader(lstm()), "1GiB", strict=True)
    steps(model)
    planned(model, 2)


def test_a_layer_may_come_after_the_wrapping() -> None:
    model = outcore.wrap(made(Reader, nn.Identity), "1GiB", strict=True)
    model.reads = lstm()
    steps(model)
    planned(model, 2)


def test_what_holds_a_layer_may_be_wrapped_inside_of_what_is_wrapped() -> None:
    outer = made(Deeper, lstm)
    assert isinstance(outer, Deeper)
    with outcore.session("1GiB", strict=True) as ooc:
        ooc.wrap(outer)
        ooc.wrap(outer.reader)
        seen = steps(outer)
        assert ooc.calls > 0
    assert same(seen, reference(made(Deeper, lstm)))


class Own(nn.LSTM):
    """Calls the kernel directly, not `forward` of the layer."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]  # as such layers have it
        state = x.new_zeros(1, x.size(0), 16)
        weights: Any = self._flat_weights
        made = torch._VF.lstm(x, (state, state), weights, True, 1, 0.0, self.training, False, True)
        return made[0], made[1:]


def test_a_layer_of_its_own_is_not_taken_apart() -> None:
    model = outcore.wrap(made(Reader, lambda: Own(64, 16, batch_first=True)), "1GiB", strict=True)
    steps(model)
    planned(model, 2)  # before and after it: torch breaks the graph there by itself


def marks() -> list[bool]:
    functions = [kind.forward for kind in (nn.LSTM, nn.GRU, nn.RNN)]
    return [hasattr(each, "_torchdynamo_disable") for each in functions]


def test_nobody_else_finds_them_marked() -> None:
    with recurrent_apart():
        with recurrent_apart():
            pass
        assert all(marks())
        assert torch._dynamo.config.allow_rnn
    assert not any(marks())
    assert not torch._dynamo.config.allow_rnn


def test_threads_may_want_that_one_over_the_other() -> None:
    first, second = recurrent_apart(), recurrent_apart()
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        one.submit(first.__enter__).result()
        other.submit(second.__enter__).result()
        one.submit(first.__exit__, None, None, None).result()
        assert all(marks())
        assert other.submit(lambda: torch._dynamo.config.allow_rnn).result()
        other.submit(second.__exit__, None, None, None).result()
        assert not other.submit(lambda: torch._dynamo.config.allow_rnn).result()
    assert not any(marks())
    assert not torch._dynamo.config.allow_rnn


def test_who_has_them_traced_keeps_that() -> None:
    with torch._dynamo.config.patch(allow_rnn=True):
        with recurrent_apart():
            assert not any(marks())
        assert torch._dynamo.config.allow_rnn


def test_calls_leave_nothing_behind() -> None:
    def held() -> int:
        return len(contextvars.copy_context())

    with recurrent_apart():
        pass
    before = held()
    for _ in range(100):
        with recurrent_apart():
            pass
    assert held() == before
