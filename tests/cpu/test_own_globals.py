"""Models whose code has its globals in no module of `sys.modules`, or in another of that name."""

from __future__ import annotations

import copy
import importlib.util
import sys
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import symbolic_convert

import outcore
from outcore.capture.compiler.own_globals import is_elsewhere
from tests.cpu.training import same, snapshot, train

NUMBERS = count()
SOURCE = """
import torch
from torch import nn

SCALE = 2.0
MEAN = torch.full((16,), 0.5)
CALLS = 0

def scaled(x):
    return SCALE * torch.sin(x - MEAN)

def counted(x):
    global CALLS
    CALLS += 1
    return scaled(x)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return torch.relu(self.linear(x - MEAN)) * SCALE + x

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.sin(layer(x)) * SCALE + MEAN
        return x
"""
OTHER = SOURCE.replace("SCALE = 2.0", "SCALE = 3.0").replace("0.5)", "-1.0)")
STEPS = 12


class Around(nn.Module):
    """Has parts of the other project."""

    def __init__(self, module: ModuleType, function: str = "scaled") -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(16, 16), module.Net().layers
        self.function = getattr(module, function)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.function(self.first(x))
        for layer in self.layers:
            x = torch.cos(layer(x))
        return x


def loaded(folder: Path, source: str, name: str) -> ModuleType:
    """The module of `source`, which is not in `sys.modules`."""
    folder.mkdir()
    file = folder / f"{name}.py"
    file.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def name() -> str:
    """A name that dynamo has not met yet."""
    return f"a_model_of_two_projects_{next(NUMBERS)}"


@pytest.fixture(params=["another", "none", "an earlier one"])
def module(
    request: pytest.FixtureRequest, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    found = loaded(tmp_path / "one", SOURCE, name)
    if request.param != "none":
        other = loaded(tmp_path / "two", OTHER, name)
        monkeypatch.setitem(sys.modules, name, other)
        if request.param != "another":
            trained(outcore.wrap(other.Net(), budget="1GiB"), other)
            monkeypatch.setitem(sys.modules, name, found)
    return found


def trained(model: nn.Module, module: ModuleType) -> list[Any]:
    """What training gives, while a variable of the module changes."""

    def call(x: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        module.SCALE = 1.5 if len(calls) > 2 else 2.0  # type: ignore[attr-defined]  # of the source
        found: torch.Tensor = model(x)
        return found

    calls: list[None] = []
    torch.manual_seed(0)
    return train(model, call, [torch.randn(2048, 16)], torch.mean, STEPS)


@pytest.mark.parametrize("kind", ["own", "parts"])
def test_results_are_those_of_plain_pytorch(module: ModuleType, kind: str) -> None:
    torch.manual_seed(0)
    plain = module.Net() if kind == "own" else Around(module)
    model = outcore.wrap(copy.deepcopy(plain), budget="1GiB")
    assert same(trained(model, module), trained(plain, module))
    report = outcore.handle(model).report()
    assert report.state == "in-core"
    assert report.counts.keep >= 12


@pytest.mark.parametrize("first", [True, False])
def test_they_are_in_one_graph(module: ModuleType, *, first: bool) -> None:
    """Also if a variable is added to them later."""
    if first:
        module.LATER = 1  # type: ignore[attr-defined]  # of the source
    model = outcore.wrap(Around(module), budget="1GiB")
    for step in range(4):
        model(torch.randn(64, 16)).sum().backward()
        setattr(module, f"LATER_{step}", step)
    engine = outcore.handle(model).engine
    assert engine is not None
    assert len(engine.graphs) == 1


def test_a_global_that_is_set(module: ModuleType) -> None:
    model = outcore.wrap(Around(module, "counted"), budget="1GiB")
    before, steps = module.CALLS, 5  # torch compiles each value of it
    for _ in range(steps):
        model(torch.randn(64, 16)).sum().backward()
    assert before + steps == module.CALLS


class Conditional(nn.Module):
    """Its branch is a function of the other project, and no graph may end there."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__()
        self.first, self.function = nn.Linear(16, 16), module.scaled
        self.plain = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.plain:  # torch compiles `cond` there, too
            return self.function(x) if x.sum() > 0 else torch.cos(x)
        found: torch.Tensor = torch.cond(x.sum() > 0, self.function, torch.cos, (x,))
        return found


def test_where_no_graph_may_end(module: ModuleType) -> None:
    plain = Conditional(module)
    model = outcore.wrap(copy.deepcopy(plain), budget="1GiB")
    plain.plain = True
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(64, 16)
        for each in (plain, model):
            each.zero_grad()
            each(x).sum().backward()
        assert same([list(snapshot(plain, x.sum()))], [list(snapshot(model, x.sum()))])


def test_which_globals_are_elsewhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, again = (loaded(tmp_path / each, SOURCE, name) for each in ("one", "two"))
    assert is_elsewhere(vars(found))
    monkeypatch.setitem(sys.modules, name, found)
    assert not is_elsewhere(vars(found))
    assert is_elsewhere(vars(again))
    monkeypatch.setitem(sys.modules, name, again)
    assert is_elsewhere(vars(again)), "dynamo has imported the other one"
    assert not is_elsewhere({"MEAN": 1})
    assert not is_elsewhere({"__name__": "namedtuple_Pair"})


@pytest.mark.skipif(
    hasattr(symbolic_convert, "_registered_module_for_globals"), reason="torch 2.14 is right here"
)
@pytest.mark.parametrize("module", ["another"], indirect=True)
def test_what_others_compile_is_as_ever(module: ModuleType) -> None:
    """The patch of torch applies to wrapped models alone."""
    outcore.wrap(module.Net(), budget="1GiB")(torch.randn(4, 16))
    torch._dynamo.reset()

    def call(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = module.scaled(x)
        return found

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert not torch.equal(compiled(torch.ones(16)), call(torch.ones(16)))
