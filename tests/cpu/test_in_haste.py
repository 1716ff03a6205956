"""If planning needs many plans, `search` finds in haste what fits, then plans once in full."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outcore import Backend
from outcore.errors import InfeasibleError
from outcore.out_of_process import plan_out_of_process
from outcore.policies.search.search import Search
from outcore.runtime.planning import solving
from outcore.runtime.planning.fitting import Fitting
from tests.cpu.training import same

MIB = 1 << 20
STEPS = 8
HASTE = Search().in_haste


class Layers(nn.Module):
    """Two results, whose backward calls may run one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean(), self.head(x).mean()


def train(backend: Any, *, calls: int = 1, retain: bool = True) -> list[list[Tensor]]:
    """Train in steps of `calls` outstanding calls; the gradients of the last step."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    module = Layers()
    call = torch.compile(module, backend=backend)
    for step in range(STEPS):
        module.zero_grad()
        rows = torch.linspace(0.0, 1.0 + step, 1024 * 64).reshape(1024, 64)
        losses = [call(rows + i) for i in range(calls)]
        for first, second in losses:
            if retain:
                first.backward(retain_graph=True)
                second.backward()
            else:
                (first + second).backward()
        del losses, first, second
    return [[p.grad for p in module.parameters() if p.grad is not None]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The policies that were asked for plans."""
    found: list[Any] = []

    def ask(policy: Any, problem: Any) -> Any:
        found.append(policy)
        return plan_out_of_process(policy, problem)

    monkeypatch.setattr(solving, "plan_out_of_process", ask)
    return found


@pytest.mark.parametrize(
    ("mebibytes", "calls", "retain"), [(3.0, 1, True), (5.0, 3, False), (4.5, 2, True)]
)
def test_much_is_looked_at_in_haste_and_little_planned(
    asked: list[Any], mebibytes: float, calls: int, *, retain: bool
) -> None:
    backend = Backend(budget=int(mebibytes * MIB), policy="search", strict=True)
    assert same(
        train(backend, calls=calls, retain=retain), train("eager", calls=calls, retain=retain)
    )
    report = backend.report()
    assert report.state == "planned"
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= report.budget_bytes
    assert set(asked) == {HASTE, Search()}
    assert asked.count(Search()) < asked.count(HASTE)
    assert asked[-1] == Search()


def test_one_call_that_retains_nothing_is_planned_at_once(asked: list[Any]) -> None:
    train(Backend(budget=5 * MIB // 2, policy="search", strict=True), retain=False)
    assert asked == [Search()]


def test_overrides_hold_in_haste_too(asked: list[Any], tmp_path: Path) -> None:
    rules = tmp_path / "rules.json"
    rules.write_text('[{"match": "tanh_1", "action": "recompute"}]', encoding="utf-8")
    backend = Backend(budget=5 * MIB, policy="search", overrides=rules, strict=True)
    assert same(train(backend, calls=3, retain=False), train("eager", calls=3, retain=False))
    report = backend.report()
    assert report.state == "planned"
    assert report.predicted_peak_bytes is not None
    assert report.predicted_peak_bytes <= report.budget_bytes
    around = [each.policy for each in asked]
    assert HASTE in around
    assert around[-1] == Search()
    (explained,) = backend.explain()
    (told,) = [move for move in explained.moves if move.name == "tanh_1"]
    assert told.choice == "recompute"
    with pytest.raises(InfeasibleError) as caught:
        train(Backend(budget=2 * MIB, policy="search", overrides=rules), calls=3, retain=False)
    assert caught.value.policy in ("", "search"), "not that in haste"


def test_planning_counts_what_was_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    within = Fitting._within
    made: list[None] = []

    def slowly(*args: Any, **options: Any) -> Any:
        made.append(None)
        time.sleep(0.1)
        return within(*args, **options)

    monkeypatch.setattr(Fitting, "_within", slowly)
    backend = Backend(budget=9 * MIB // 2, policy="pooch")
    train(backend, calls=2)
    planned = backend.report().planning_seconds
    assert len(made) > 1
    assert planned is not None
    assert planned >= 0.1 * len(made)


@pytest.mark.parametrize("retain", [False, True])
def test_an_error_never_names_what_was_refused(*, retain: bool) -> None:
    refused = []
    for quarters in range(5, 13, 2):
        budget = quarters * MIB // 4
        try:
            train(Backend(budget=budget, policy="pooch"), calls=2, retain=retain)
        except InfeasibleError as error:
            refused.append((budget, error.floor_bytes, "at least" in str(error)))
    assert len(refused) > 1
    largest = max(budget for budget, _, _ in refused)
    for budget, floor, at_least in refused:
        assert floor > (budget if at_least else largest)
