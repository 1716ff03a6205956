"""wrap and session: the same object, the same results, one budget, and all given back."""

from __future__ import annotations

import copy
import gc
import io
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outcore
from outcore.errors import NotEngagedError, OptionError, WrapError
from tests.cpu.training import (
    PROFILED_STEPS,
    Small,
    batch,
    mean_square,
    same,
    small_reference,
    snapshot,
    train,
)

STEPS = PROFILED_STEPS + 2
TIGHT: dict[str, Any] = {"budget": "2MiB", "policy": "swap-all"}
"""A budget that `Small` does not fit in with everything kept."""


def small() -> Small:
    torch.manual_seed(0)
    return Small()


def trained(module: nn.Module, steps: int = STEPS) -> list[list[Tensor]]:
    return train(module, module, (batch(0),), mean_square, steps)


class TestWrap:
    def test_it_is_the_same_object_with_the_same_names(self) -> None:
        module = small()
        names, parameters = list(module.state_dict()), list(module.parameters())
        assert outcore.wrap(module, **TIGHT) is module
        trained(module, 1)
        assert list(module.state_dict()) == names
        assert [*map(id, module.parameters())] == [*map(id, parameters)]

    def test_results_are_those_of_plain_pytorch(self) -> None:
        module = outcore.wrap(small(), **TIGHT)
        seen = trained(module)
        report = outcore.handle(module).report()
        assert report.state == "planned"
        assert report.counts.offload
        assert same(seen, small_reference(STEPS, eager=True))

    def test_options_are_read_at_once(self) -> None:
        with pytest.raises(OptionError, match="did you mean 'policy'"):
            outcore.wrap(small(), budget="2MiB", polcy="pooch")

    def test_the_budget_may_come_from_the_environment(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OUTCORE_BUDGET", "3MiB")
        assert outcore.handle(outcore.wrap(small())).options.budget == "3MiB"
        assert outcore.handle(outcore.wrap(small(), "2MiB")).options.budget == "2MiB"

    def test_two_models_have_budgets_of_their_own(self) -> None:
        first, second = (outcore.wrap(small(), budget=b) for b in ("1GiB", "2GiB"))
        trained(first, 1)
        trained(second, 1)
        assert outcore.handle(first).report().budget_bytes == 1 << 30
        assert outcore.handle(second).report().budget_bytes == 2 << 30
        assert outcore.handle(second).engaged

    def test_wrapping_again_replaces_the_budget(self) -> None:
        module = outcore.wrap(small(), budget="1GiB")
        trained(module, 1)
        outcore.wrap(module, **TIGHT)
        assert same(trained(module), small_reference(STEPS, eager=True)) or module.training
        assert outcore.handle(module).report().budget_bytes == 2 << 20

    def test_unwrapped_it_is_plain(self) -> None:
        module = outcore.wrap(small(), **TIGHT)
        assert outcore.unwrap(module) is module
        assert same(trained(module), small_reference(STEPS, eager=True))
        with pytest.raises(WrapError, match="Small: nothing in it is wrapped"):
            outcore.handle(module)

    def test_copies_and_pickles_are_plain(self) -> None:
        module = outcore.wrap(small(), **TIGHT)
        trained(module, 1)
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
            assert other._compiled_call_impl is None
            with pytest.raises(WrapError):
                outcore.handle(other)
            assert torch.equal(other.head.weight, module.head.weight)

    def test_the_handle_is_found_from_outside(self) -> None:
        inner = outcore.wrap(small(), **TIGHT)
        whole = nn.Sequential(inner)
        assert outcore.handle(whole) is outcore.handle(inner)
        whole.append(outcore.wrap(small(), **TIGHT))
        with pytest.raises(WrapError, match="different budgets"):
            outcore.handle(whole)

    @pytest.mark.parametrize("thing", [torch.nn.functional.relu, torch.compile(nn.Linear(2, 2))])
    def test_what_cannot_be_wrapped(self, thing: Any) -> None:
        with pytest.raises(WrapError, match="wrap the model"):
            outcore.wrap(thing, budget="1GiB")

    def test_what_is_compiled_in_place_already(self) -> None:
        module = small()
        module.compile(backend="eager")
        with pytest.raises(WrapError, match="compiled already"):
            outcore.wrap(module, budget="1GiB")

    def test_a_module_of_torch_s_own(self) -> None:
        """Torch compiles nothing of these where they are what is called."""
        module = outcore.wrap(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), budget="1GiB", strict=True)
        module(torch.ones(2, 4)).sum().backward()
        assert outcore.handle(module).report().graphs == 1

    def test_more_models_than_torch_compiles_of_one_kind(self) -> None:
        modules = [outcore.wrap(nn.Linear(4, 4 + n), "1GiB", strict=True) for n in range(10)]
        for module in modules:
            module(torch.ones(2, 4)).sum().backward()
        assert all(outcore.handle(module).engaged for module in modules)

    def test_each_shape_has_a_plan_of_its_own(self) -> None:
        module = outcore.wrap(nn.Linear(4, 4), "1GiB", strict=True)
        for n in range(1, 11):
            module(torch.ones(n, 4)).sum().backward()
        report = outcore.handle(module).report()
        assert report.graphs == 10
        assert not report.notes

    def test_it_dies_with_the_model(self) -> None:
        module = outcore.wrap(small(), **TIGHT)
        trained(module, 1)
        before = len(outcore.doors._backends)
        del module
        torch._dynamo.reset()
        gc.collect()
        assert len(outcore.doors._backends) == before - 1


class Opaque(nn.Module):
    """Dynamo compiles nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


class TestNothingToDo:
    def test_a_warning_says_so_once(self) -> None:
        module = outcore.wrap(Opaque(), budget="1GiB")
        with pytest.warns(UserWarning, match="got nothing to plan from Opaque"):
            module(torch.ones(2, 4)).sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            module(torch.ones(2, 4)).sum().backward()

    def test_strict_raises(self) -> None:
        module = outcore.wrap(Opaque(), budget="1GiB", strict=True)
        with pytest.raises(NotEngagedError, match="Opaque"):
            module(torch.ones(2, 4))

    def test_calls_without_a_backward_prove_nothing(self) -> None:
        module = outcore.wrap(small(), **TIGHT)
        with torch.no_grad():
            module(batch(0))
        module.eval()
        module(batch(0))
        module.train()
        trained(module, 1)
        assert outcore.handle(module).engaged

    def test_a_strict_session(self) -> None:
        with pytest.raises(NotEngagedError), outcore.session("1GiB", strict=True) as ooc:
            ooc.wrap(small())


class TestSession:
    def test_one_budget_for_what_is_wrapped_in_it(self, tmp_path: Path) -> None:
        with outcore.session(**TIGHT, spill_dir=tmp_path) as ooc:
            module = ooc.wrap(small())
            seen = trained(module)
            assert ooc.report().state == "planned"
            assert ooc.explain(most=1)
        assert same(seen, small_reference(STEPS, eager=True))
        with pytest.raises(WrapError):
            outcore.handle(module)

    def test_what_goes_on_after_it_runs_in_core(self) -> None:
        with outcore.session(**TIGHT) as ooc:
            module = small()
            compiled = torch.compile(module, backend=ooc.backend)
            train(module, compiled, (batch(0),), mean_square, STEPS)
        report = ooc.report()
        more = train(module, compiled, (batch(0),), mean_square, 1)
        assert len(more) == 1
        assert report.state == ooc.report().state == "in-core"
        assert "closed" in report.notes[0]

    def test_a_backward_after_the_end(self) -> None:
        module = small()
        with outcore.session(**TIGHT) as ooc:
            ooc.wrap(module)
            seen = trained(module, STEPS - 1)
            torch.manual_seed(STEPS - 1)
            module.zero_grad()
            loss = mean_square(module(batch(0)))
        loss.backward()
        assert same([*seen, snapshot(module, loss)], small_reference(STEPS, eager=True))

    def test_an_error_inside_is_the_error_outside(self) -> None:
        ooc = outcore.session("1GiB", strict=True)
        ooc.wrap(small())
        with pytest.raises(ZeroDivisionError), ooc:
            raise ZeroDivisionError


class TestLog:
    def test_one_block_when_a_plan_is_made(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "outcore"):
            trained(outcore.wrap(small(), **TIGHT))
        (message,) = (r.getMessage() for r in caplog.records if r.levelno == logging.INFO)
        assert "graph 1 does not fit a budget of 2.00 MiB" in message
        for word in ("in-core ", "planned ", "moved ", "planning "):
            assert f"\n    {word}" in message

    def test_what_fits_says_so(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "outcore"):
            trained(outcore.wrap(small(), budget="1GiB"))
        (message,) = (r.getMessage() for r in caplog.records if r.levelno == logging.INFO)
        assert "graph 1 fits: nothing is moved" in message

    def test_torch_logs_shows_it(self) -> None:
        code = (
            "import outcore; from tests.cpu.test_doors import *;"
            "trained(outcore.wrap(small(), **TIGHT))"
        )
        environment = {**os.environ, "TORCH_LOGS": "+outcore"}
        found = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        assert "graph 1 does not fit" in found.stderr
