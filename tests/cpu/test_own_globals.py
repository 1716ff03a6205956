"""Models whose code has its globals in no module of `sys.modules`, or in another of that name."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.capture.compiler.own_globals import FIXED, is_elsewhere
from tests.cpu.training import same, train

NAME = "a_model_of_two_projects"
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


def loaded(folder: Path, source: str) -> ModuleType:
    """The module of `source`, which is not in `sys.modules`."""
    folder.mkdir()
    file = folder / f"{NAME}.py"
    file.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(NAME, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["another", "none"])
def module(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    found = loaded(tmp_path / "one", SOURCE)
    if request.param == "another":
        monkeypatch.setitem(sys.modules, NAME, loaded(tmp_path / "two", OTHER))
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


def test_a_global_that_is_set(module: ModuleType) -> None:
    model = outcore.wrap(Around(module, "counted"), budget="1GiB")
    before = module.CALLS
    trained(model, module)
    assert before + STEPS == module.CALLS


def test_what_stands_for_a_module_is_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = loaded(tmp_path / "one", SOURCE)
    stale = vars(loaded(tmp_path / "two", SOURCE))

    class Standing(ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(found, name)

    for stands in (found, Standing(NAME)):
        monkeypatch.setitem(sys.modules, NAME, stands)
        assert not is_elsewhere(vars(found), "MEAN")
        assert is_elsewhere(stale, "MEAN")
    assert is_elsewhere(vars(found), "not there yet")
    monkeypatch.delitem(sys.modules, NAME)
    assert is_elsewhere(vars(found), "MEAN")
    assert not is_elsewhere({"MEAN": 1}, "MEAN")
    assert not is_elsewhere({"__name__": "namedtuple_Pair"}, "_tuple_new")


@pytest.mark.skipif(FIXED, reason="torch reads no globals in other modules")
def test_what_others_compile_is_as_ever(module: ModuleType) -> None:
    """The patch of torch applies to wrapped models alone."""
    outcore.wrap(module.Net(), budget="1GiB")(torch.randn(4, 16))
    torch._dynamo.reset()

    def call(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = module.scaled(x)
        return found

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    if NAME in sys.modules:
        assert not torch.equal(compiled(torch.ones(16)), call(torch.ones(16)))
