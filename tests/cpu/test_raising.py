"""After a call that raises, later calls still run as planned."""

from __future__ import annotations

import copy
import gc
import logging
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import convert_frame
from torch._dynamo.utils import counters

import outcore
from outcore.errors import CaptureError, NotEngagedError
from outcore.wrapping.compiled import MOST_FAILURES
from tests.cpu.training import Away, away, back, same

MIB = 1 << 20
PLANNED = 8
"""Steps until there is a plan."""
LATER = 4


class Layers(nn.Module):
    """Refuses inputs of too many rows; if `breaks`, after a graph break."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks:
            x = torch.tanh(x)
            torch._dynamo.graph_break()
        if x.shape[0] > 2048:
            raise ValueError("too many rows")
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def train(module: nn.Module, steps: int) -> list[Away]:
    found = []
    for step in range(steps):
        module.zero_grad()
        module(torch.full((1024, 64), step / 8)).square().mean().backward()
        found.append(away([p.grad for p in module.parameters() if p.grad is not None]))
    return found


def refuse(module: nn.Module, what: Any) -> None:
    with pytest.raises((ValueError, TypeError, NotImplementedError, RuntimeError, AttributeError)):
        module(what)


def compiled() -> int:
    """How many graphs torch has compiled."""
    graphs: int = counters["stats"]["unique_graphs"]
    return graphs


def fresh(*, breaks: bool = False) -> nn.Module:
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    return Layers(breaks=breaks)


WRONG: dict[str, Callable[[], Any]] = {
    "refused": lambda: torch.ones(4096, 64),
    "text": lambda: "abc",
    "another shape": lambda: torch.ones(1024, 32),
    "another dtype": lambda: torch.ones(1024, 64, dtype=torch.float64),
}
TRACED = ("another shape", "another dtype")
"""What raises while torch traces it: what it compiled before stays."""


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("breaks", [False, True])
def test_what_was_planned_goes_on_as_planned(wrong: str, *, breaks: bool) -> None:
    plain = fresh(breaks=breaks)
    expected = train(plain, PLANNED) + train(plain, LATER)
    del plain
    module = outcore.wrap(fresh(breaks=breaks), budget=4 * MIB, policy="swap-all", strict=True)
    found = train(module, PLANNED)
    before = outcore.handle(module).report().disk_bytes_written
    refuse(module, WRONG[wrong]())
    gc.collect()
    graphs = compiled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found += train(module, LATER)
        assert compiled() == graphs or wrong not in TRACED
        after = outcore.handle(module).report().disk_bytes_written
        train(module, PLANNED)
    assert same(list(map(back, found)), list(map(back, expected)))
    assert before is not None
    assert after is not None
    assert after > before
    assert outcore.handle(module).report().state == "planned"


def test_a_first_call_that_raises_is_no_call() -> None:
    module = outcore.wrap(fresh(), budget=4 * MIB, strict=True)
    refuse(module, WRONG["refused"]())
    train(module, PLANNED)
    assert outcore.handle(module).report().state == "planned"


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("breaks", [False, True])
def test_what_comes_later_is_compiled(wrong: str, *, breaks: bool) -> None:
    module = outcore.wrap(fresh(breaks=breaks), budget="1GiB", strict=True)
    train(module, 2)
    refuse(module, WRONG[wrong]())
    before = compiled(), outcore.handle(module).engine.steps.calls
    for _ in range(2):
        module(torch.ones(512, 64)).sum().backward()
    after = compiled(), outcore.handle(module).engine.steps.calls
    assert after > before
    assert after[1] - before[1] == 2


def test_wrong_inputs_raise_what_plain_pytorch_raises() -> None:
    """torch's compiler would say the same in dozens of lines, and name its fake tensors."""
    module = outcore.wrap(fresh(), budget=4 * MIB, strict=True)
    for _ in range(2):  # before there is a graph, and once it is planned
        with pytest.raises(
            RuntimeError, match=r"^mat1 and mat2 shapes cannot be multiplied"
        ) as raised:
            module(torch.ones(1024, 32))
        assert type(raised.value) is RuntimeError
        assert raised.value.__cause__ is None
        assert raised.value.__context__ is None
        train(module, PLANNED)
    assert outcore.handle(module).report().state == "planned"


@torch.library.custom_op("outcore_tests::untraced", mutates_args=())
def untraced(x: Tensor) -> Tensor:
    return x * 2


@untraced.register_fake
def _untraced(_: Tensor) -> Tensor:
    raise RuntimeError("fakes do not match")


untraced.register_autograd(lambda _, gradient: gradient * 2)


class Doubled(Layers):
    """torch cannot trace it, but plain PyTorch runs it."""

    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = untraced(super().forward(x))
        return doubled


def test_what_torch_fails_to_trace_runs_as_plain_pytorch() -> None:
    """What it calls is planned, from the first step on."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Doubled(breaks=False)
    module = outcore.wrap(copy.deepcopy(plain), budget=4 * MIB, policy="swap-all")
    with pytest.warns(UserWarning, match="fails to trace code of Doubled: fakes do not match"):
        found = train(module, 1)
    before = counters["frames"]["total"]
    found += train(module, PLANNED)
    assert same(list(map(back, found)), list(map(back, train(plain, 1) + train(plain, PLANNED))))
    assert counters["frames"]["total"] == before, "torch tries again"
    report = outcore.handle(module).report()
    assert report.state == "planned"
    assert outcore.handle(module).engine.steps.calls == 1 + PLANNED


class Mixed(nn.Module):
    """What torch fails to trace calls torch's own layers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), Layers(breaks=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.last(untraced(self.first(x)))
        return mixed


def test_torchs_own_layers_in_it_are_compiled_too() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Mixed()
    module = outcore.wrap(copy.deepcopy(plain), budget="1GiB")
    with pytest.warns(UserWarning, match="fails to trace code of Mixed"):
        found = train(module, PLANNED)
    assert same(list(map(back, found)), list(map(back, train(plain, PLANNED))))
    report = outcore.handle(module).report()
    assert any("compiled separately" in note and "first" in note for note in report.notes)
    assert len(outcore.handle(module).engine.registry.active()) == 2


class Apart(nn.Module):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Normalized(nn.Module):
    """What torch fails to trace comes after code that has run by then."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.apart = nn.BatchNorm1d(64), Apart()

    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = untraced(self.apart(self.norm(x)))
        return doubled


def test_what_has_run_does_not_run_again() -> None:
    torch._dynamo.reset()
    plain = Normalized()
    module = outcore.wrap(copy.deepcopy(plain), budget="1GiB")
    x = torch.rand(8, 64)
    with pytest.warns(UserWarning, match="fails to trace code of Normalized"):
        found = module(x)
    assert torch.equal(found, plain(x))
    assert module.norm.num_batches_tracked == 1


def test_what_torch_fails_to_trace_again_and_again_is_left_alone() -> None:
    """After a graph was planned, too. It is told once, whatever the reason says each time."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    fickle = Fickle()
    module = outcore.wrap(nn.Sequential(Layers(breaks=False), fickle), budget="1GiB")
    train(module, 2)
    fickle.fails = True
    with pytest.warns(UserWarning, match="fails to trace code of Sequential") as told:
        train(module, MOST_FAILURES + 1)
    assert len([each for each in told if "fails to trace" in str(each.message)]) == 1
    train(module, PLANNED)
    before = counters["frames"]["total"]
    train(module, 2)
    assert counters["frames"]["total"] == before
    report = outcore.handle(module).report()
    assert len([note for note in report.notes if "fails to trace" in note]) == 1


class Fickle(nn.Module):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            doubled: Tensor = untraced(x)
            return doubled
        return x * 2


def test_with_strict_it_is_an_error_each_time() -> None:
    torch._dynamo.reset()
    module = outcore.wrap(Doubled(breaks=False), budget="1GiB", strict=True)
    for _ in range(3):
        with pytest.raises(NotEngagedError, match="fails to trace code of Doubled"):
            train(module, 1)


def test_a_call_that_torch_fails_to_trace_keeps_no_inputs() -> None:
    torch._dynamo.reset()
    module = outcore.wrap(Doubled(breaks=False).eval(), budget="1GiB")
    gc.collect()
    gc.disable()
    try:
        x = torch.ones(1024, 64)
        held = weakref.ref(x)
        with pytest.warns(UserWarning, match="fails to trace"):
            module(x)
        del x
        assert held() is None
    finally:
        gc.enable()


def test_an_error_that_is_being_handled_is_left_alone() -> None:
    """It is no cause of what happens within the call, and its frames are the user's."""

    def fail() -> None:
        kept = 1  # noqa: F841 - read from the frame
        raise ValueError("theirs")

    torch._dynamo.reset()
    module = outcore.wrap(Doubled(breaks=False).eval(), budget="1GiB")
    theirs: Any = None
    try:
        fail()
    except ValueError as error:
        theirs = error
        with pytest.warns(UserWarning, match="fails to trace code of Doubled: fakes do not match"):
            module(torch.ones(8, 64))
    assert theirs.__traceback__.tb_next.tb_frame.f_locals == {"kept": 1}


def test_an_error_that_was_handled_is_not_kept() -> None:
    """As in a retry after an error, whose frames hold the tensors of the first try."""

    def fail() -> weakref.ref[Tensor]:
        held = torch.ones(1024)
        try:
            int("theirs")
        except ValueError:
            module(torch.ones(8, 64))
        return weakref.ref(held)

    torch._dynamo.reset()
    module = outcore.wrap(Layers(breaks=False), budget="1GiB")
    gc.collect()
    gc.disable()
    try:
        assert fail()() is None
    finally:
        gc.enable()


def test_errors_of_outcore_are_told_once() -> None:
    """With `strict`, this one comes from within torch's compiler."""
    torch._dynamo.reset()
    module = outcore.wrap(Recast(), budget="1GiB", strict=True)
    with pytest.raises(CaptureError) as raised:
        module(torch.ones(8, 64, requires_grad=True))
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__


class Recast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).to(torch.float8_e8m0fnu).to(torch.float32)


class DoubledTwice(Doubled):
    """What it calls may fail later than itself."""

    def __init__(self) -> None:
        super().__init__(breaks=False)
        self.fickle = Fickle()

    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = super().forward(self.fickle(x))
        return doubled


def test_what_is_left_alone_stays_so_if_more_fails() -> None:
    torch._dynamo.reset()
    module = outcore.wrap(DoubledTwice(), budget="1GiB")
    with pytest.warns(UserWarning, match="fails to trace code of DoubledTwice"):
        train(module, PLANNED)
    before = counters["frames"]["total"]
    module.fickle.fails = True
    train(module, 1)
    after = counters["frames"]["total"]
    assert after > before
    train(module, 2)
    assert counters["frames"]["total"] == after


def test_with_strict_they_are_errors_in_evaluation_too() -> None:
    torch._dynamo.reset()
    module = outcore.wrap(Doubled(breaks=False).eval(), budget="1GiB", strict=True)
    for _ in range(MOST_FAILURES + 2):
        with pytest.raises(NotEngagedError, match="fails to trace code of Doubled"):
            module(torch.ones(8, 64))


def test_calls_in_evaluation_that_torch_fails_to_trace_are_left_alone() -> None:
    """The training calls between them stay as planned."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    fickle = Fickle()
    module = outcore.wrap(nn.Sequential(Layers(breaks=False), fickle), budget="1GiB")
    train(module, PLANNED)
    frames = []

    def evaluate_and_train() -> None:
        for _ in range(MOST_FAILURES + 2):
            fickle.fails = True
            module.eval()(torch.ones(8, 64))
            fickle.fails = False
            train(module.train(), 1)
            frames.append(counters["frames"]["total"])

    with pytest.warns(UserWarning, match="fails to trace code of Sequential"):
        evaluate_and_train()
    assert frames[-3] == frames[-2] == frames[-1]
    assert frames[0] < frames[1]
    assert outcore.handle(module).report().state == "in-core"


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum(2)


def test_errors_that_torch_passes_on_are_those_of_plain_pytorch_too() -> None:
    torch._dynamo.reset()
    with pytest.raises(IndexError) as plain:
        Summed()(torch.ones(2, 64))
    with pytest.raises(IndexError) as ours:
        outcore.wrap(Summed(), budget="1GiB")(torch.ones(2, 64))
    assert str(ours.value) == str(plain.value)


def test_without_torchs_warnings_there_is_no_reason() -> None:
    """What runs as plain PyTorch is told as what torch leaves uncompiled for other reasons is."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Mixed()
    module = outcore.wrap(copy.deepcopy(plain), budget="1GiB")
    level = convert_frame.log.level
    convert_frame.log.setLevel(logging.ERROR)
    try:
        found = train(module, PLANNED)
    finally:
        convert_frame.log.setLevel(level)
    assert same(list(map(back, found)), list(map(back, train(plain, PLANNED))))
    report = outcore.handle(module).report()
    assert any("compiled separately" in note and "first" in note for note in report.notes)
