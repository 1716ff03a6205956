"""wrap and session: same object, same results, one budget, and everything is released."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import logging
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import copy_context
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx import symbolic_trace
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

import outcore
from outcore.capture.compiler.compat import SETTINGS_OF_THREADS
from outcore.errors import (
    BudgetError,
    InfeasibleError,
    NotEngagedError,
    OptionError,
    OptionValueError,
    PolicyError,
    StepError,
    WrapError,
)
from outcore.runtime.budget.engine import Engine
from outcore.wrapping import call_wrapper, compiled, notes
from tests.cpu.ending import workers, workers_end
from tests.cpu.training import (
    PROFILED_STEPS,
    Broken,
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
"""A budget too small to keep everything of `Small`."""
LIMITED = pytest.mark.skipif(
    "isolate_recompiles" not in compiled._apart(),
    reason="before 2.13 torch takes no limit of one model from us",
)


def small() -> Small:
    torch.manual_seed(0)
    return Small()


def broken() -> Broken:
    torch.manual_seed(0)
    return Broken()


def trained(module: nn.Module, steps: int = STEPS) -> list[list[Tensor]]:
    return train(module, module, (batch(0),), mean_square, steps)


def gradients_of_each(module: nn.Module) -> None:
    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return mean_square(torch.func.functional_call(module, parameters, (x[None],)))

    detached = {name: p.detach() for name, p in module.named_parameters()}
    torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(detached, batch(0))


def tangents(module: nn.Module) -> None:
    with forward_ad.dual_level():
        module(forward_ad.make_dual(batch(0), batch(1)))


def counted_flops(module: nn.Module) -> None:
    with FlopCounterMode(display=False) as counter:
        mean_square(module(batch(0))).backward()
    assert counter.get_total_flops() > 0
    module.zero_grad()


def shapes(module: nn.Module) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        module(torch.empty_like(batch(0)))


def drawn(module: nn.Module) -> None:
    torch.jit.trace(module, batch(0), check_trace=False)


APART = [gradients_of_each, tangents, counted_flops, shapes, drawn]


class _CopiesItself(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made


class _GivesAll(nn.Linear):
    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))


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

    @pytest.mark.parametrize(
        "path",
        [
            "",
            pytest.param(
                "middle.3",
                marks=pytest.mark.skipif(
                    not SETTINGS_OF_THREADS, reason="not noticed before torch 2.13"
                ),
            ),
        ],
        ids=["of the model", "of a module inside"],
    )
    def test_hooks_that_come_and_go(self, path: str) -> None:
        def results(whole: nn.Module) -> list[float]:
            seen, backward = [], []
            module = whole.get_submodule(path)

            def run() -> None:
                loss = mean_square(whole(batch(0).requires_grad_()))
                loss.backward()
                seen.append(loss.item())

            run()
            for hook in (lambda _, __, y: y * 2, lambda _, __, y: y * 3):
                handle = module.register_forward_hook(hook)
                run()
                handle.remove()
                run()
            with module.register_forward_pre_hook(lambda _, given: (given[0] * 2,)):
                run()
            with module.register_full_backward_hook(lambda *_: backward.append(1)):
                run()
            return [*seen, len(backward)]

        expected = results(small().eval())
        assert len(set(expected)) == 5
        assert results(outcore.wrap(small(), "1GiB").eval()) == expected

    def test_hooks_of_all_modules_that_come_and_go(self) -> None:
        def results(module: nn.Module) -> list[float]:
            seen = []
            for comes in (False, True, False):
                with (
                    register_module_forward_hook(lambda _, __, y: y * 2) if comes else nullcontext()
                ):
                    loss = mean_square(module(batch(0)))
                    loss.backward()
                    seen.append(loss.item())
            return seen

        expected = results(small().eval())
        assert len(set(expected)) == 2
        assert results(outcore.wrap(small(), "1GiB").eval()) == expected

    def test_calls_leave_nothing_in_the_context_of_the_thread(self) -> None:
        """A variable that is set there stays, even if nothing else refers to it any more."""
        module = outcore.wrap(small(), "1GiB")
        sizes = []
        for _ in range(STEPS + 2):
            mean_square(module(batch(0))).backward()
            sizes.append(len(copy_context()))
        assert sizes[-3:] == [sizes[-1]] * 3

    @pytest.mark.parametrize("done", [2, STEPS], ids=["profiling", "planned"])
    @pytest.mark.parametrize("apart", APART)
    def test_calls_that_nothing_compiles_run_plainly(
        self, apart: Callable[[nn.Module], object], done: int
    ) -> None:
        """torch.compile never compiles a function that it first meets in such a call."""
        module, plain = outcore.wrap(small(), **TIGHT), small()
        seen, expected = trained(module, done), trained(plain, done)
        for each in module, plain:
            each.eval()
            apart(each)
            each.train()
        assert same(seen + trained(module), expected + trained(plain))
        report = outcore.handle(module).report()
        assert report.state == "planned"
        assert report.measured_peak_bytes
        assert any("ran as plain PyTorch" in note for note in report.notes)

    def test_where_nothing_ever_compiles_it_is_said(self) -> None:
        module = outcore.wrap(small(), **TIGHT)
        with (
            pytest.warns(UserWarning, match="ran as plain PyTorch") as warned,
            FlopCounterMode(display=False),
        ):
            trained(module, 2)
        assert Path(warned[0].filename).parent.parent.name == "tests"
        strict = outcore.wrap(small(), strict=True, **TIGHT)
        with pytest.raises(NotEngagedError), FlopCounterMode(display=False):
            trained(strict, 1)

    def test_options_are_read_at_once(self) -> None:
        with pytest.raises(OptionError, match="did you mean 'policy'"):
            outcore.wrap(small(), budget="2MiB", polcy="pooch")  # type: ignore[call-arg]  # refused by mypy as well

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

    def test_values_are_read_at_once_wherever_the_budget_comes_from(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(PolicyError, match="swop-all"):
            outcore.wrap(small(), policy="swop-all")
        monkeypatch.setenv("OUTCORE_BUDGET", "3 apples")
        with pytest.raises(BudgetError, match="3 apples"):
            outcore.wrap(small())

    @pytest.mark.parametrize(("word", "strict"), [("1", True), ("off", False), ("", False)])
    def test_strict_may_come_from_the_environment(
        self, monkeypatch: pytest.MonkeyPatch, word: str, *, strict: bool
    ) -> None:
        monkeypatch.setenv("OUTCORE_STRICT", word)
        assert outcore.Backend("1GiB").options.strict is strict
        assert outcore.Backend("1GiB", strict=True).options.strict
        assert not outcore.Backend("1GiB", strict=False).options.strict

    def test_strict_is_yes_or_no(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OUTCORE_STRICT", "maybe")
        with pytest.raises(OptionValueError, match=r"strict='maybe'.*one of 1, true, on, 0"):
            outcore.Backend("1GiB")

    def test_a_misspelled_variable_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OUTCORE_ELSEWHERE", "of somebody else")
        assert outcore.Backend("1GiB").options.policy is None
        monkeypatch.setenv("OUTCORE_PLAN_FOLDER", "of somebody else, too")
        monkeypatch.setenv("OUTCORE_POLICYS", "")
        outcore.Backend("1GiB")
        for name, meant in (("POLICI", "POLICY"), ("ARENAS", "ARENA")):
            monkeypatch.setenv(f"OUTCORE_{name}", "pooch")
            with pytest.warns(UserWarning, match=f"OUTCORE_{name}: did you mean OUTCORE_{meant}"):
                outcore.Backend("1GiB")
            monkeypatch.delenv(f"OUTCORE_{name}")

    def test_a_budget_beyond_the_memory_is_told_once(self) -> None:
        module = outcore.wrap(small(), budget="1PiB")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert same(trained(module), trained(small()))
        assert ["of RAM" in str(each.message) for each in told] == [True]
        (note,) = [n for n in outcore.handle(module).report().notes if "more than the" in n]
        assert 'budget="auto"' in note

    @pytest.mark.parametrize("option", ["policy", "spill_dir"])
    def test_values_of_no_kind_that_is_known(self, option: str) -> None:
        given: dict[str, Any] = {option: 3}
        with pytest.raises(OptionValueError, match=f"{option}=3: it is no"):
            outcore.Backend(budget="1GiB", **given)

    def test_wrapping_again_replaces_the_budget(self) -> None:
        plain, module = small(), outcore.wrap(small(), budget="1GiB")
        assert same(trained(module, 1), trained(plain, 1))
        first = outcore.handle(module)
        outcore.wrap(module, **TIGHT)
        assert same(trained(module), trained(plain))
        assert outcore.handle(module).report().budget_bytes == 2 << 20
        assert outcore.handle(module).report().state == "planned"
        assert first.closed

    def test_options_that_are_wrong_replace_nothing(self) -> None:
        module = outcore.wrap(small(), budget="1GiB")
        first = outcore.handle(module)
        with pytest.raises(PolicyError):
            outcore.wrap(module, budget="1GiB", policy="swop-all")
        assert outcore.handle(module) is first
        assert not first.closed

    def test_unwrapped_it_is_plain(self) -> None:
        module = outcore.wrap(small(), **TIGHT)
        backend = outcore.handle(module)
        assert outcore.unwrap(module) is module
        assert same(trained(module), small_reference(STEPS, eager=True))
        assert backend.engine is None
        assert backend.closed
        with pytest.raises(WrapError, match="Small: neither it nor a module inside it is wrapped"):
            outcore.handle(module)
        with pytest.raises(WrapError, match="Small: neither it nor a module inside it is wrapped"):
            outcore.unwrap(module)

    def test_unwrap_undoes_all_that_is_inside(self) -> None:
        parts = [outcore.wrap(nn.Linear(4, 4), budget=b) for b in ("1GiB", "2GiB", "3GiB")]
        backends = [outcore.handle(part) for part in parts]
        whole = nn.Sequential(*parts)
        assert outcore.unwrap(whole) is whole
        whole(torch.ones(2, 4)).sum().backward()
        assert [backend.closed for backend in backends] == [True] * 3
        assert not any(backend.engaged for backend in backends)
        for part in parts:
            with pytest.raises(WrapError):
                outcore.handle(part)

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

    @pytest.mark.parametrize("kind", [_CopiesItself, _GivesAll])
    def test_copies_by_the_model_s_own_code_are_plain(self, kind: type[nn.Linear]) -> None:
        module = outcore.wrap(kind(4, 4), budget="1GiB")
        module(torch.ones(2, 4)).sum().backward()
        other = copy.deepcopy(module)
        assert other._compiled_call_impl is None
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
            assert not other(torch.ones(2, 4)).any()
        assert pickle.loads(pickle.dumps(module))._compiled_call_impl is None

    @pytest.mark.skipif(
        "isolate_recompiles" not in compiled._apart(),
        reason="before 2.13 torch itself keeps weak references",
    )
    def test_torch_can_swap_parameters(self) -> None:
        """As it does for FSDP and tensor parallelism: it must find no weak references to them."""
        module = outcore.wrap(small(), **TIGHT)
        trained(module, 3)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            module.double()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert module.head.weight.dtype is torch.float64

    def test_the_handle_is_found_from_outside(self) -> None:
        inner = outcore.wrap(small(), **TIGHT)
        whole = nn.Sequential(inner)
        assert outcore.handle(whole) is outcore.handle(inner)
        whole.append(outcore.wrap(small(), **TIGHT))
        with pytest.raises(WrapError, match="different budgets"):
            outcore.handle(whole)
        outcore.wrap(whole, "1GiB")
        assert outcore.handle(whole).options.budget == "1GiB"

    @pytest.mark.parametrize("thing", [torch.nn.functional.relu, torch.compile(nn.Linear(2, 2))])
    def test_what_cannot_be_wrapped(self, thing: Any) -> None:
        with pytest.raises(WrapError, match="wrap the model"):
            outcore.wrap(thing, budget="1GiB")

    def test_what_is_compiled_in_place_already(self) -> None:
        module = small()
        module.compile(backend="eager")
        with pytest.raises(WrapError, match="already compiled"):
            outcore.wrap(module, budget="1GiB")

    def test_what_torchscript_runs(self) -> None:
        with pytest.raises(WrapError, match="wrap the model that it was made from"):
            outcore.wrap(torch.jit.script(nn.Linear(2, 2)), budget="1GiB")

    @pytest.mark.parametrize("container", [nn.ModuleList, nn.ParameterList])
    def test_what_cannot_be_called(self, container: type[nn.Module]) -> None:
        with pytest.raises(WrapError, match="it cannot be called"):
            outcore.wrap(container(), budget="1GiB")

    def test_a_container_that_can_be_called(self) -> None:
        class Chain(nn.ModuleList):
            def forward(self, x: Tensor) -> Tensor:
                for each in self:
                    x = each(x)
                return x

        chain = outcore.wrap(Chain([nn.Linear(4, 4), nn.ReLU()]), budget="1GiB", strict=True)
        chain(torch.ones(2, 4)).sum().backward()

    @pytest.mark.parametrize("in_place", [True, False])
    def test_what_is_compiled_afterwards(self, *, in_place: bool) -> None:
        module = outcore.wrap(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), budget="1GiB")
        compiled: Any = module
        if in_place:
            module.compile(backend="eager")
        else:
            compiled = torch.compile(module, backend="eager")
        mean_square(compiled(torch.ones(2, 4))).backward()
        with pytest.warns(UserWarning, match="leave that out: outcore compiles it"):
            mean_square(compiled(torch.ones(2, 4))).backward()

    def test_a_refusal_names_other_wrapped_models(self) -> None:
        first, second = nn.Linear(4, 4), small()
        outcore.wrap(first, budget="1GiB")
        first(torch.ones(2, 4)).sum().backward()
        outcore.wrap(second, budget="100KiB")
        with pytest.raises(InfeasibleError) as refused:
            second(batch(0))
        assert any("budget of its own: Linear" in note for note in refused.value.__notes__)
        outcore.unwrap(first)
        del refused
        with pytest.raises(InfeasibleError) as again:
            second(batch(0))
        assert not any("Linear" in note for note in getattr(again.value, "__notes__", ()))

    def test_the_traceback_of_a_refusal_shows_the_users_lines(self) -> None:
        """Frames of torch and of outcore would also keep the step's tensors alive."""
        module = outcore.wrap(Torn(small()), budget="100KiB")
        with pytest.raises(InfeasibleError) as refused:
            module(batch(0))
        theirs = [entry for entry in refused.traceback if Path(entry.path) == Path(__file__)]
        assert theirs[-1].name != theirs[0].name, "lines of the model's own code are there"
        raised = next(e for e in refused.traceback if e.name == "_run_noted")
        inner = refused.traceback[refused.traceback.index(raised) + 1 :]
        assert {Path(entry.path) for entry in inner} == {Path(__file__)}

    def test_a_module_of_torch_s_own(self) -> None:
        """torch.compile skips these modules if they are called directly."""
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
        engine = outcore.handle(module).engine
        assert engine is not None
        assert len(engine.graphs) == engine.steps.calls == 10
        assert not outcore.handle(module).notes

    @LIMITED
    def test_past_the_most_recompiles_it_runs_plainly(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compiled, "MOST_COMPILED", 2)
        module = outcore.wrap(Named(), "1GiB")
        for name in "ab":
            module(torch.ones(2, 4), name).sum().backward()
        with pytest.warns(UserWarning, match="reached no graph"):
            module(torch.ones(2, 4), "c").sum().backward()
        module(torch.ones(2, 4), "d").sum().backward()  # no second warning
        engine = outcore.handle(module).engine
        assert engine is not None
        assert len(engine.graphs) == engine.steps.calls == 2
        assert outcore.handle(module).notes == [notes.UNSEEN]

    @LIMITED
    def test_past_the_most_recompiles_there_is_an_error_where_that_is_strict(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compiled, "MOST_COMPILED", 1)
        module = outcore.wrap(Named(), "1GiB", strict=True)
        module(torch.ones(2, 4), "a").sum().backward()
        for name in "bc":
            with pytest.raises(NotEngagedError) as caught:
                module(torch.ones(2, 4), name)
            assert "the budget does not cover all of Named: a training call reached" in str(
                caught.value
            )
        module(torch.ones(2, 4), "a").sum().backward()

    @LIMITED
    @pytest.mark.parametrize("strict", [False, True])
    def test_past_the_most_recompiles_of_a_part_it_is_told(
        self, monkeypatch: pytest.MonkeyPatch, *, strict: bool
    ) -> None:
        class Mixed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.outer, self.expert = nn.Linear(4, 4), Named()
                self.name = ""

            def forward(self, x: Tensor) -> Tensor:
                y: Tensor = self.mixed(self.outer(x))
                return y.sum()

            @torch.compiler.disable(recursive=False)
            def mixed(self, x: Tensor) -> Tensor:
                y: Tensor = self.expert(torch.ones(2, 4), self.name)
                return y.sum() + x.sum()

        monkeypatch.setattr(compiled, "MOST_COMPILED", 3)
        module = outcore.wrap(Mixed(), "1GiB", strict=strict)
        raised: list[str] = []
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for name in "abcdef":
                module.name = name
                try:
                    module(torch.ones(2, 4)).backward()
                except NotEngagedError as error:
                    raised.append(str(error))
        warned = [str(each.message) for each in told]
        assert len(raised) == strict
        found = [text for text in (*raised, *warned) if "called in more ways" in text]
        assert len(found) == 1
        assert notes.UNSEEN not in outcore.handle(module).notes

    @LIMITED
    def test_a_limit_that_the_first_call_reaches_is_told(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Experts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.outer, self.expert = nn.Linear(4, 4), Named()

            def forward(self, x: Tensor) -> Tensor:
                y: Tensor = self.outer(x)
                for name in "abcd":
                    torch._dynamo.graph_break()
                    y = y + self.expert(x, name)
                return y.sum()

        monkeypatch.setattr(compiled, "MOST_COMPILED", 2)
        module = outcore.wrap(Experts(), "1GiB")
        with pytest.warns(UserWarning, match="a part of the model was called in more ways"):
            module(torch.ones(2, 4)).backward()

    def test_a_call_that_asks_for_no_gradient_itself_is_no_miss(self) -> None:
        class Student(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 4)

            def forward(self, x: Tensor, *, teach: bool = False) -> Tensor:
                with torch.set_grad_enabled(not teach):
                    result: Tensor = self.layer(x)
                return result

        module = outcore.wrap(Student(), "1GiB", strict=True)
        module(torch.ones(2, 4)).sum().backward()
        for _ in range(2):
            module(torch.ones(2, 4), teach=True)
        assert not outcore.handle(module).notes

    @LIMITED
    def test_steps_of_which_none_is_like_another_are_told_of_once(self) -> None:
        """A Python number in the model is a size of the graph."""
        module = Counting()
        outcore.wrap(module, "1GiB")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(24):
                module.calls -= step % 8 == 7  # a repeat now and then changes nothing
                module(torch.ones(2, 4)).sum().backward()
        (said,) = [str(w.message) for w in caught if "needs a new graph" in str(w.message)]
        assert "a counter in the model" in said
        notes = outcore.handle(module).report().notes
        assert said.removeprefix("outcore: ") in notes

    def test_evaluation_uses_up_none_of_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compiled, "MOST_COMPILED", 2)
        module = outcore.wrap(nn.Linear(4, 4), "1GiB", strict=True)
        plain = copy.deepcopy(module)
        for n in range(1, 6):
            with torch.no_grad():
                assert torch.equal(module(torch.ones(n, 4)), plain(torch.ones(n, 4)))
            with torch.inference_mode():
                assert torch.equal(module(torch.ones(n, 4)), plain(torch.ones(n, 4)))
        assert outcore.handle(module).engine is None, "nothing was compiled"
        module(torch.ones(9, 4)).sum().backward()
        assert outcore.handle(module).report().graphs == 1

    def test_torch_gets_the_options_that_it_knows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """torch 2.12 knows one of the two."""

        def known(model: Any = None, *, recompile_limit: int | None = None) -> None:
            del model, recompile_limit

        assert compiled._apart().keys() <= inspect.signature(torch.compile).parameters.keys()
        monkeypatch.setattr(torch, "compile", known)
        assert compiled._apart() == {"recompile_limit": compiled.MOST_COMPILED}

    def test_torch_that_takes_no_limit_from_us(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """torch 2.11: models do not share a limit there either."""
        monkeypatch.setattr(compiled, "_apart", dict)
        most = torch._dynamo.config.recompile_limit
        modules = [outcore.wrap(nn.Linear(4, 4), "1GiB", strict=True) for _ in range(most + 1)]
        for module in modules:
            module(torch.ones(2, 4)).sum().backward()
        assert all(outcore.handle(module).engaged for module in modules)
        shapes = range(3, most + 5)
        for n in shapes:
            module(torch.ones(n, 4)).sum().backward()
        engine = outcore.handle(module).engine
        assert engine is not None
        assert len(engine.graphs) == engine.steps.calls == 1 + len(shapes)


class Torn(nn.Module):
    """Something ends the graph in its forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        torch._dynamo.graph_break()
        return self.inner(x)


class Named(nn.Module):
    """A layer that torch compiles anew for each name that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, name: str) -> Tensor:
        y: Tensor = self.layer(x)
        return y * 2 if name == "z" else y


class Scaled(nn.Module):
    """`broken`: torch compiles the part alone, because something in a loop ends the graph."""

    def __init__(self, part: type[nn.Linear], *, broken: bool) -> None:
        super().__init__()
        self.part, self.broken = part(4, 4), broken

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            if self.broken:
                torch._dynamo.graph_break()
            x = self.part(x)
        return x


@pytest.mark.parametrize("change", ["forward", "inherited", "code", "part"])
def test_a_class_that_is_given_another_forward(change: str) -> None:
    """As by a patch of a library, or by a notebook that loads code again."""

    class Part(nn.Linear):
        pass

    def turned(self: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002 - its name in torch
        return torch.cos(input @ self.weight)

    class Net(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * Scaled.forward(self, x)

    class Heir(Net):
        pass

    def changed(self: Scaled, x: Tensor) -> Tensor:
        return torch.sin(self.part(x))

    broken = change == "part"
    plain = Heir(Part, broken=broken)
    module = outcore.wrap(copy.deepcopy(plain), budget="1GiB")
    for step in range(8):
        if step == 5 and change == "forward":
            Heir.forward = Net.forward = changed  # type: ignore[method-assign]  # as patches do
        elif step == 5 and change == "inherited":
            Heir.forward = changed  # type: ignore[method-assign]  # as patches do
        elif step == 5 and change == "code":
            Net.forward.__code__ = changed.__code__
        elif step == 5:
            Part.forward = turned  # type: ignore[method-assign]  # as patches do
        x = torch.randn(2, 4)
        for each in (plain, module):
            each.zero_grad()
            each(x).sum().backward()
        assert same([snapshot(module, x.sum())], [snapshot(plain, x.sum())]), step


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_a_forward_that_is_another_object_each_time(kind: Any) -> None:
    def forward(*args: Tensor) -> Tensor:
        return torch.sin(args[-1])

    module = outcore.wrap(type("Net", (nn.Module,), {"forward": kind(forward)})(), budget="1GiB")
    for _ in range(4):
        module(torch.randn(4, requires_grad=True)).sum().backward()
    engine = outcore.handle(module).engine
    assert engine is not None
    assert len(engine.graphs) == 1


class Counting(nn.Module):
    """Counts its calls in a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.layer(x) * self.calls
        return result


class TestGivenBack:
    """The engine and its threads end with what they serve."""

    @pytest.fixture(autouse=True)
    def nothing_before(self) -> None:
        torch._dynamo.reset()
        gc.collect()

    def trained(self) -> tuple[Small, ref[Engine]]:
        module = outcore.wrap(small(), **TIGHT)
        before = workers()
        trained(module)
        assert len(workers() - before) == 2
        engine = outcore.handle(module).engine
        assert engine is not None
        return module, ref(engine)

    def test_by_unwrap(self) -> None:
        before = workers()
        module, engine = self.trained()
        outcore.unwrap(module)
        assert workers_end(before)
        gc.collect()
        assert engine() is None

    def test_by_wrapping_again(self) -> None:
        before = workers()
        module, engine = self.trained()
        outcore.wrap(module, budget="1GiB")
        assert workers_end(before)
        gc.collect()
        assert engine() is None

    def test_by_wrapping_in_a_session(self) -> None:
        before = workers()
        module, engine = self.trained()
        with outcore.session(**TIGHT) as ooc:
            ooc.wrap(module)
            assert workers_end(before)
            gc.collect()
            assert engine() is None
            trained(module)
            assert outcore.handle(module) is ooc.backend
        assert workers_end(before)
        assert module._compiled_call_impl is None

    def test_with_the_model(self) -> None:
        before, wrapped = workers(), len(call_wrapper.WRAPPERS)
        module, engine = self.trained()
        del module
        gc.collect()
        assert engine() is None
        assert workers_end(before)
        assert len(call_wrapper.WRAPPERS) == wrapped

    def test_after_the_backward_that_is_still_to_come(self) -> None:
        before, plain = workers(), small()
        module, engine = self.trained()
        trained(plain)
        torch.manual_seed(STEPS)
        loss = mean_square(module(batch(0)))
        outcore.unwrap(module)
        module.zero_grad()
        loss.backward()
        torch.manual_seed(STEPS)
        plain.zero_grad()
        expected = mean_square(plain(batch(0)))
        expected.backward()
        assert same([snapshot(module, loss)], [snapshot(plain, expected)])
        del loss
        gc.collect()
        assert engine() is None
        assert workers_end(before)

    def trained_in_parts(self) -> tuple[Broken, ref[Engine]]:
        module = outcore.wrap(broken(), **TIGHT)
        trained(module)
        engine = outcore.handle(module).engine
        assert engine is not None
        assert len(engine.graphs) == 2
        return module, ref(engine)

    def test_by_unwrap_of_a_model_in_parts(self) -> None:
        before = workers()
        module, engine = self.trained_in_parts()
        outcore.unwrap(module)
        gc.collect()
        assert engine() is None
        assert workers_end(before)

    def test_with_a_model_in_parts(self) -> None:
        before = workers()
        module, engine = self.trained_in_parts()
        kept, parameter = mean_square(module(batch(0))), ref(module.parts[0].weight)
        del module
        gc.collect()
        assert engine() is not None
        del kept
        gc.collect()
        assert engine() is None
        assert parameter() is None
        assert workers_end(before)

    def test_only_of_the_model_that_is_gone(self) -> None:
        first, gone = self.trained_in_parts()
        second, engine = self.trained_in_parts()
        plain = broken()
        trained(plain)
        frames = compiled.traced()
        del first
        gc.collect()
        assert gone() is None
        assert same(trained(second), trained(plain))
        assert compiled.traced() == frames
        assert outcore.handle(second).engine is engine()

    def test_after_the_backward_of_a_model_in_parts(self) -> None:
        before, plain = workers(), broken()
        module, engine = self.trained_in_parts()
        trained(plain)
        losses = []
        for each in (module, plain):
            torch.manual_seed(STEPS)
            each.zero_grad()
            losses.append(mean_square(each(batch(0))))
        parameters = list(module.parameters())
        outcore.unwrap(module)
        del module
        gc.collect()
        while losses:
            losses.pop().backward()
        gradients = [p.grad for p in parameters], [p.grad for p in plain.parameters()]
        assert same(*([[g for g in each if g is not None]] for each in gradients))
        gc.collect()
        assert engine() is None
        assert workers_end(before)

    @pytest.mark.parametrize("differentiated", [True, False])
    @pytest.mark.parametrize("make", [small, broken])
    def test_after_the_session(
        self, make: Callable[[], nn.Module], *, differentiated: bool
    ) -> None:
        before, module = workers(), make()
        with outcore.session(**TIGHT) as ooc:
            ooc.wrap(module)
            trained(module)
            loss = mean_square(module(batch(0)))
        assert workers() - before
        if differentiated:
            loss.backward()
        del loss
        assert workers_end(before)
        gc.collect()
        assert ooc.backend.engine is not None
        assert not ooc.backend.engine.graphs

    def test_what_torch_finds_of_it_later_is_plain(self) -> None:
        """Its graph has what a hook of all modules does already."""

        def negated(_: Any, __: Any, result: Any) -> Any:
            return -result

        lent = compiled._Lent(torch.abs, symbolic_trace(lambda x: -x))
        assert lent(torch.ones(1)) == 1
        lent.take_back()
        handle = register_module_forward_hook(negated)
        try:
            assert lent(torch.ones(1)) == -1
        finally:
            handle.remove()

    def test_where_torch_finds_nothing_of_it_no_graph_is_kept(self) -> None:
        lent = compiled._Lent(torch.abs, None)
        lent.take_back()
        with pytest.raises(StepError, match="deleted or unwrapped"):
            lent(torch.ones(1))


class Opaque(nn.Module):
    """Dynamo compiles no part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


class Sparse(nn.Module):
    """torch compiles it, but a Trace cannot express its gradient, a sum of sparse tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Embedding(4, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x.long()) - self.inner(1 + x.long())
        return result


class TestNothingToDo:
    def test_a_warning_says_so_once(self) -> None:
        module = outcore.wrap(Opaque(), budget="1GiB")
        with pytest.warns(UserWarning, match="found nothing to plan in Opaque"):
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

    def test_calls_in_eval_mode_with_a_backward_do(self) -> None:
        module = outcore.wrap(Opaque().eval(), budget="1GiB", strict=True)
        for _ in range(3):
            module(torch.ones(2, 4))
        for _ in range(2):
            module(torch.ones(2, 4)).sum().backward()
        with pytest.raises(NotEngagedError, match="found nothing to plan in Opaque"):
            module(torch.ones(2, 4))

    def test_nor_do_calls_while_it_is_frozen(self) -> None:
        ooc = outcore.session("1GiB", strict=True)
        module = ooc.wrap(nn.Linear(4, 4))
        module.requires_grad_(False)(torch.ones(2, 4))
        assert ooc.idle == [module]
        module.requires_grad_(True)(torch.ones(2, 4)).sum().backward()
        assert not ooc.idle
        ooc.close()

    def test_what_is_frozen_when_it_is_wrapped_is_a_mistake(self) -> None:
        module = outcore.wrap(nn.Linear(4, 4).requires_grad_(False), budget="1GiB", strict=True)
        with pytest.raises(NotEngagedError, match="parameters require gradients"):
            module(torch.ones(2, 4))

    def test_the_second_module_of_a_session_is_seen_too(self) -> None:
        ooc = outcore.session("1GiB")
        first, second = ooc.wrap(nn.Linear(4, 4)), ooc.wrap(Opaque())
        first(torch.ones(2, 4)).sum().backward()
        assert ooc.backend.engaged
        assert ooc.idle == [second]
        with pytest.warns(UserWarning, match="found nothing to plan in Opaque") as warned:
            second(torch.ones(2, 4)).sum().backward()
        assert Path(warned[0].filename).name == "test_entry_points.py"
        assert not ooc.idle
        ooc.close()

    def test_strict_raises_for_the_second_module_of_a_session(self) -> None:
        ooc = outcore.session("1GiB", strict=True)
        found = ooc.wrap(nn.Linear(4, 4))(torch.ones(2, 4))
        second = ooc.wrap(Opaque())
        with pytest.raises(NotEngagedError, match="Opaque"):
            second(found)
        ooc.close()

    def test_a_graph_that_was_refused_is_not_told_twice(self) -> None:
        """Not even by a training call that runs code compiled in an earlier call."""
        ooc = outcore.session("1GiB")
        ooc.wrap(nn.Linear(4, 4))(torch.ones(2, 4)).sum().backward()
        module = ooc.wrap(Sparse())
        module.eval()
        with pytest.warns(UserWarning, match="runs a graph in-core"):
            module(torch.ones(2, 4))
        module.train()
        module(torch.ones(2, 4)).sum().backward()
        ooc.close()

    def test_one_that_was_refused_before_there_was_a_plan_is_not_told_twice(self) -> None:
        module = outcore.wrap(Sparse(), "1GiB")
        with pytest.warns(UserWarning, match="runs a graph in-core"):
            module(torch.ones(2, 4)).sum().backward()
        for _ in range(2):
            module(torch.ones(2, 4)).sum().backward()
        assert len(outcore.handle(module).notes) == 1

    def test_a_strict_session(self) -> None:
        with pytest.raises(NotEngagedError), outcore.session("1GiB", strict=True) as ooc:
            ooc.wrap(small())


class TestSession:
    def test_one_budget_for_what_is_wrapped_in_it(self, tmp_path: Path) -> None:
        with outcore.session(**TIGHT, spill_dir=tmp_path) as ooc:
            module, head = ooc.wrap(small()), ooc.wrap(nn.Linear(4, 4))
            seen = trained(module)
            assert ooc.report().state == "planned"
            assert ooc.explain(most=1)
            head(torch.ones(2, 4)).sum().backward()
            assert outcore.handle(head) is outcore.handle(module) is ooc.backend
            assert ooc.report().graphs == 2
        assert same(seen, small_reference(STEPS, eager=True))
        for each in (module, head):
            with pytest.raises(WrapError):
                outcore.handle(each)

    def test_wrapping_twice_in_it_changes_nothing(self) -> None:
        with outcore.session(**TIGHT) as ooc:
            module = ooc.wrap(small())
            trained(module)
            assert ooc.wrap(module) is module
            trained(module, 1)
            assert ooc.report().state == "planned"
            assert ooc.wrapped == [module]

    def test_a_budget_of_its_own_since_then_stays(self) -> None:
        with outcore.session(**TIGHT) as ooc:
            module = ooc.wrap(small())
            outcore.wrap(module, budget="1GiB")
            assert not ooc.wrapped
            assert not ooc.backend.closed
        assert outcore.handle(module).options.budget == "1GiB"

    def test_what_goes_on_after_it_runs_in_core(self) -> None:
        with outcore.session(**TIGHT) as ooc:
            module = small()
            compiled = torch.compile(module, backend=ooc.backend)
            train(module, compiled, (batch(0),), mean_square, STEPS)
        report = ooc.report()
        plain = small()
        plain.load_state_dict(module.state_dict())
        more = train(module, compiled, (batch(0),), mean_square, 2)
        assert same(more, trained(plain, 2))
        assert report.state == ooc.report().state == "unplanned"
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
            "import outcore; from tests.cpu.test_entry_points import *;"
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


def test_what_is_compiled_around_a_wrapped_model_is_told() -> None:
    """Dynamo inlines the model and never calls outcore: without a note it would look planned."""
    torch._dynamo.reset()
    model = outcore.wrap(nn.Sequential(nn.Linear(8, 8)), budget="1GiB")
    torch.compile(model, backend="aot_eager")(torch.randn(4, 8)).sum().backward()
    report = outcore.handle(model).report()
    assert not outcore.handle(model).engaged
    assert "another torch.compile" in report.notes[0]
    model(torch.randn(4, 8)).sum().backward()
    assert not outcore.handle(model).report().notes
