"""Where an op comes from: the module path as the user has it, and a line of the user's code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import outcore
from outcore.capture import trace_network
from outcore.capture.nodes.sites import module_path, source_line
from outcore.ir.trace import Trace
from outcore.networks import network
from outcore.preflight.step import Step, traced


class Block(nn.Module):
    """One layer in a list, one in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.named = nn.ModuleDict({"last": nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.named["last"](self.layers[0](x))
        return torch.relu(y)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Block())


def line(offset: int) -> str:
    """A line of `Block.forward`."""
    return f"(test_sites.py:{Block.forward.__code__.co_firstlineno + offset})"


OF_LAYERS = ["0", f"1.layers.0 {line(1)}", f"1.named.last {line(1)}", f"1 {line(2)}"]


def forward_sites(trace: Trace) -> list[str]:
    """The sites of the forward ops in order, each once."""
    sites = [op.site for op in trace.ops[: trace.boundary] if "t.default" not in op.target]
    return list(dict.fromkeys(sites))


def wrapped(model: nn.Module) -> Trace:
    """The trace that `outcore.wrap` captures."""
    outcore.wrap(model, budget="1GiB", strict=True)
    model(torch.ones(2, 4)).sum().backward()
    engine = outcore.handle(model).engine
    assert engine is not None
    (graph,) = engine.graphs
    return graph.captured.trace


def test_wrap_names_no_line_of_ours() -> None:
    assert forward_sites(wrapped(layers())) == OF_LAYERS
    assert forward_sites(wrapped(nn.Linear(4, 4))) == [""]


def test_a_trace_names_the_same_places() -> None:
    assert forward_sites(outcore.trace(layers(), torch.ones(2, 4))) == OF_LAYERS
    assert forward_sites(outcore.trace(Block(), torch.ones(2, 4)))[0] == f"layers.0 {line(1)}"


def test_a_function_s_variables_name_what_is_not_the_whole() -> None:
    model, critic = layers(), nn.Sequential(nn.Linear(4, 4))

    def step(x: Tensor) -> Tensor:
        result: Tensor = critic(model(x))
        return result

    here = step.__code__.co_firstlineno + 1
    expected = [f"0 (test_sites.py:{here})", *OF_LAYERS[1:], f"critic.0 (test_sites.py:{here})"]
    assert forward_sites(outcore.trace(step, torch.ones(2, 4))) == expected


class Redirecting(Block):
    """Looks attributes up by itself first, as models of diffusers do."""

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


def test_a_model_with_a_getattr_of_its_own_is_named_as_any_other() -> None:
    assert forward_sites(wrapped(Redirecting())) == forward_sites(wrapped(Block()))


class Trainer:
    """Has a method that calls the model that it holds."""

    def __init__(self) -> None:
        self.net = layers()

    def step(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result


@pytest.mark.parametrize("make", [layers, Block, lambda: torch.compile(Block(), backend="eager")])
def test_estimates_name_the_same_places(make: Callable[[], Any]) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    found = forward_sites(traced(Step(make(), (torch.ones(2, 4),)), mode).trace)
    assert f"layers.0 {line(1)}" in [site.removeprefix("1.") for site in found]
    assert not [site for site in found if "[" in site or "step.py" in site or "_orig" in site]


def test_a_method_names_its_attributes() -> None:
    found = forward_sites(outcore.trace(Trainer().step, torch.ones(2, 4)))
    assert f"net.1.layers.0 {line(1)}" in found


def test_lines_of_the_networks_that_come_with_it_are_named() -> None:
    sites = forward_sites(trace_network(network("two-heads"), 1))
    assert sites[0].startswith("trunk.0 (two_heads.py:")
    assert not [site for site in sites if "offline.py" in site]


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("L['self'].layers.3.conv2", "layers.3.conv2"),
        ("L['self']", ""),
        ("L['fn'].0", "0"),
        ("L['self'].model.head", "model.head"),
        ("L['modeling'].head", "modeling.head"),
        ("G['model'].head", "head"),
        ("G['nets'][0].head", "nets.0.head"),
        ("L['nets']['a'].head", "nets.a.head"),
        ("G['criterion']", "criterion"),
        ("G['__import___main__'].critic.0", "critic.0"),
        ("G['__import_train_dot_net'].model.0", "0"),
        ("L['call'].__closure__[0].cell_contents.0.layers.1", "0.layers.1"),
        ("L['call'].__self__.net", "net"),
        ("L['call']._orig_mod", ""),
        ("L['self']._modules['layers']._modules['0']", "layers.0"),
        ("L['self'].__dict__['_modules']['layers'].0", "layers.0"),
        ("L['self'].__dict__['_modules']['layers'].__dict__['_modules']['0']", "layers.0"),
        ("layers.0", "layers.0"),
    ],
)
def test_paths(source: str, path: str) -> None:
    assert module_path(source) == path


def test_a_script_that_was_started_by_a_relative_path() -> None:
    stack = '  File "train.py", line 8, in main\n    f()\n  File "net, old.py", line 12, in f\n'
    assert source_line(stack) == "net, old.py:12"
    assert source_line(stack.splitlines()[0]) == "train.py:8"
    assert source_line(f'  File "{outcore.__file__}", line 3, in call\n') == ""
    assert source_line("") == ""
