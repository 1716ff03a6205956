"""Plans that are saved in training and reused, and overrides that hold in training."""

from __future__ import annotations

import gc
import json
import logging
from collections import OrderedDict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import nn

from outcore import Backend
from outcore.errors import DigestError, FormatError, InfeasibleError, OptionValueError
from outcore.execute.queued import QueuedDriver
from outcore.ir.plan import Keep, Recompute
from outcore.ir.store import digest
from outcore.out_of_process import plan_out_of_process
from outcore.planfile import load_plans, schema_text
from outcore.runtime.budget import engine
from outcore.runtime.graphs.planned import Planned
from outcore.runtime.settings.options import Keywords
from outcore.runtime.settings.reuse import read_given
from tests.cpu.queues import LateDevice
from tests.cpu.test_retained import Heads, one_by_one
from tests.cpu.training import (
    PROFILED_STEPS,
    Small,
    batch,
    mean_square,
    same,
    small_planned,
    small_reference,
    train,
)

STEPS = PROFILED_STEPS + 1
TIGHT = "2MiB"
"""A budget that is too small for `Small` in-core."""
MOVING: dict[str, Any] = {"budget": TIGHT, "policy": "swap-all"}


def the_plan(backend: Backend) -> Planned:
    assert backend.engine is not None
    (graph,) = backend.engine.registry.active()
    assert graph.planned is not None
    return graph.planned


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the plan of `Small` by a policy other than the default."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    _, backend = small_planned(STEPS, **MOVING)
    backend.save_plans(path)
    assert load_plans(path).plans[0].plan().choices == the_plan(backend).plan.choices
    return path


def refuse(*_: Any) -> Any:
    raise AssertionError("nothing is to be planned")


class TestSaving:
    def test_a_file_tells_what_runs(self, saved: Path) -> None:
        file = load_plans(saved)
        (plan,) = file.plans
        assert file.versions.torch == version("torch")  # CUDA wheels append to __version__
        assert plan.policy == "swap-all"
        assert plan.times.value == "measured"
        assert plan.machine.device.startswith("CPU, ")
        assert {link.source.value for link in plan.machine.links} == {"device", "disk"}
        assert any("training.py" in storage.source for storage in plan.storages)
        assert any(storage.module == "first" for storage in plan.storages)
        jsonschema.validate(json.loads(saved.read_text()), json.loads(schema_text()))

    def test_before_there_is_a_plan_there_is_nothing_to_save(self, tmp_path: Path) -> None:
        with pytest.raises(OptionValueError, match="no graph has a plan yet"):
            Backend(budget=TIGHT).save_plans(tmp_path / "plan.json")
        assert not list(tmp_path.iterdir())

    def test_several_graphs_are_several_plans_in_one_file(self, tmp_path: Path) -> None:
        backend, module = Backend(budget="1GiB"), Broken()
        train(module, torch.compile(module, backend=backend), [batch(0)], mean_square, STEPS)
        backend.save_plans(tmp_path / "plan.json")
        first, second = load_plans(tmp_path / "plan.json").plans
        assert first.digests.trace != second.digests.trace
        assert not first.storages, "everything fits"

    def test_a_graph_that_has_not_run_for_a_while_is_saved_too(self, tmp_path: Path) -> None:
        backend, first, second = Backend(budget="1GiB"), Small(), Broken().first
        for module, x in ((first, batch(0)), (second, batch(1))):
            train(module, torch.compile(module, backend=backend), [x], mean_square, 2 * STEPS)
        assert backend.report().graphs == 1
        backend.save_plans(tmp_path / "plan.json")
        assert len(load_plans(tmp_path / "plan.json").plans) == 2


class Broken(nn.Module):
    """Two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        torch._dynamo.graph_break()
        result: torch.Tensor = torch.relu(self.second(y))
        return result


class TestUsing:
    def test_a_plan_is_taken_from_the_file_and_nothing_is_planned(
        self, saved: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("outcore.runtime.planning.solving.plan_out_of_process", refuse)
        seen, backend = small_planned(STEPS, budget=TIGHT, plan=str(saved), strict=True)
        planned = the_plan(backend)
        assert planned.plan.choices == load_plans(saved).plans[0].plan().choices
        assert not planned.may_improve
        assert same(seen, small_reference(STEPS))
        assert backend.report().notes == (f"the plan is from {saved}",)

    def test_saved_again_it_is_the_same_plan(self, saved: Path, tmp_path: Path) -> None:
        _, backend = small_planned(STEPS, budget=TIGHT, plan=str(saved))
        backend.save_plans(tmp_path / "again.json")
        (first,), (again,) = (load_plans(p).plans for p in (saved, tmp_path / "again.json"))
        assert first.digests.plan == again.digests.plan
        assert first.digests.trace == again.digests.trace

    def test_another_shape_is_planned_as_usual_with_a_note(self, saved: Path) -> None:
        module, backend = Small(), Backend(**MOVING, plan=str(saved))
        call = torch.compile(module, backend=backend)
        train(module, call, [batch(0, n=3)], mean_square, STEPS)
        assert the_plan(backend).plan.policy == "swap-all"
        (note,) = backend.report().notes
        assert note == f"no plan for this graph in {saved}: it was planned as usual"

    def test_another_shape_is_refused_where_strict_after_the_step_that_checks_it(
        self, saved: Path
    ) -> None:
        module, backend = Small(), Backend(**MOVING, plan=str(saved), strict=True)
        loss = mean_square(torch.compile(module, backend=backend)(batch(0, n=3)))
        with pytest.raises(DigestError, match=f"the plan in {saved} was made for trace"):
            loss.backward()

    def test_another_shape_is_refused_where_strict_in_each_step(self, saved: Path) -> None:
        module, backend = Small(), Backend(**MOVING, plan=str(saved), strict=True)
        call = torch.compile(module, backend=backend)
        for _ in range(STEPS):
            with pytest.raises(DigestError):
                mean_square(call(batch(0, 2))).backward()

    def test_once_it_is_closed_nothing_is_refused(self, saved: Path) -> None:
        backend = Backend(**MOVING, plan=str(saved), strict=True)
        call = torch.compile(Small(), backend=backend)
        with pytest.raises(DigestError):
            mean_square(call(batch(0, 2))).backward()
        backend.close()
        mean_square(call(batch(0, 2))).backward()

    def test_the_path_may_begin_with_the_user_s_folder(
        self, saved: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(saved.parent))
        given = read_given(f"~/{saved.name}", None, torch.device("cpu"))
        assert given.path == str(saved)
        assert given.file is not None
        _, backend = small_planned(STEPS, budget=TIGHT, plan=str(saved))
        backend.save_plans("~/again.json")
        assert (saved.parent / "again.json").exists()

    def test_the_budget_that_is_named_is_enough_for_retain_graph(self, tmp_path: Path) -> None:
        """The plan of the file is for steps without it, so it needs more, and that is known."""
        torch.manual_seed(0)
        module, path = Heads(), tmp_path / "plan.json"
        x = torch.rand(512, 128)
        backend = Backend(budget="3MiB", policy="swap-all", strict=True)
        call = torch.compile(module, backend=backend)
        for _ in range(STEPS):
            one_by_one(module, [sum(call(x))])
        backend.save_plans(path)
        del call, backend
        budget, refused = 3 << 20, 0
        while True:
            torch._dynamo.reset()
            gc.collect()
            backend = Backend(budget=budget, plan=path, strict=True)
            call = torch.compile(module, backend=backend)
            try:
                for _ in range(STEPS):
                    one_by_one(module, call(x))
            except InfeasibleError as error:
                before, budget, refused = budget, error.floor_bytes, refused + 1
            else:
                break
            finally:
                del call
            assert budget > before
            assert refused <= 2
        assert refused

    def test_other_ops_are_refused_where_strict_before_anything_runs(self, saved: Path) -> None:
        call = torch.compile(
            Broken().first, backend=Backend(budget="1GiB", plan=saved, strict=True)
        )
        with pytest.raises(DigestError, match=f"the plan in {saved} was made for trace"):
            call(batch(0))

    def test_a_trace_that_kernels_correct_is_known_where_strict(self, tmp_path: Path) -> None:
        """Batch norm in bfloat16 saves float32 statistics, and fake tensors do not say so."""
        path = tmp_path / "plan.json"
        given: tuple[dict[str, Any], ...] = ({}, {"plan": path, "strict": True})
        for options in given:
            torch._dynamo.reset()
            module, backend = Small().bfloat16(), Backend(**MOVING, **options)
            call, x = torch.compile(module, backend=backend), batch(0).bfloat16()
            train(module, call, [x], mean_square, STEPS)
            if not options:
                assert backend.engine is not None
                (graph,) = backend.engine.graphs
                assert digest(graph.captured.trace) != graph.identity.digest
                backend.save_plans(path)
        assert backend.report().notes == (f"the plan is from {path}",)

    def test_another_device_is_noted_or_refused(
        self, saved: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("outcore.runtime.settings.reuse.device_name", lambda _: "another")
        _, backend = small_planned(STEPS, budget=TIGHT, plan=str(saved))
        (note,) = backend.report().notes
        assert "made for another device, CPU, " in note
        torch._dynamo.reset()
        strict = torch.compile(Small(), backend=Backend(budget=TIGHT, plan=saved, strict=True))
        with pytest.raises(DigestError, match="made for device CPU, "):
            strict(batch(0))

    def test_a_budget_that_it_does_not_fit_is_an_error_that_names_one_that_does(
        self, tmp_path: Path
    ) -> None:
        _, backend = small_planned(STEPS, budget=TIGHT, policy="recompute-all")
        path = tmp_path / "again.json"
        backend.save_plans(path)
        with pytest.raises(InfeasibleError) as caught:
            small_planned(STEPS, budget="1.2MiB", plan=str(path))
        enough = caught.value.floor_bytes
        del backend, caught  # the traceback holds the model
        gc.collect()
        _, again = small_planned(STEPS, budget=enough, plan=str(path))
        assert again.report().state == "planned"

    def test_a_plan_with_a_disk_beyond_the_host_finds_it_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Runs on a test device with queues, whose host memory is too small."""
        monkeypatch.setattr(
            engine, "open_driver", lambda _, folder, __: QueuedDriver(LateDevice(), folder)
        )
        path = tmp_path / "plan.json"
        _, backend = small_planned(STEPS, **MOVING, host_budget="1MiB", spill_dir=tmp_path)
        backend.save_plans(path)
        del backend  # its tensors would count as resident
        gc.collect()
        (plan,) = load_plans(path).plans
        assert {s.choice.tier.value for s in plan.storages} == {"host", "disk"}
        again: dict[str, Any] = {"budget": TIGHT, "spill_dir": tmp_path, "plan": str(path)}
        seen, backend = small_planned(STEPS, **again, host_budget="1MiB")
        assert the_plan(backend).plan.choices == plan.plan().choices
        assert same(seen, small_reference(STEPS))

    def test_files_that_cannot_be_read_are_refused_at_once(self, tmp_path: Path) -> None:
        none = str(tmp_path / "none.json")
        for options in (Keywords(plan=none), Keywords(overrides=none)):
            with pytest.raises(FormatError, match="No such file"):
                Backend(budget=TIGHT, **options)

    def test_an_empty_path_is_none(self) -> None:
        assert read_given("", "", torch.device("cpu")) == read_given(
            None, None, torch.device("cpu")
        )
        Backend(budget=TIGHT, plan="", overrides="")

    def test_what_is_no_path_is_refused_at_once(self) -> None:
        rules: Any = [{"match": "*", "action": "keep"}]
        with pytest.raises(OptionValueError, match=r"overrides.*it is not the path of a file"):
            Backend(budget=TIGHT, overrides=rules)

    def test_a_file_that_was_edited_is_refused_by_its_name(
        self, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        edited = tmp_path / "edited.json"
        edited.write_text(saved.read_text().replace('"swap-all"', '"swap-none"'))
        monkeypatch.setenv("OUTCORE_PLAN", str(edited))
        with pytest.raises(DigestError, match=f"the plan file {edited} was changed"):
            Backend(budget=TIGHT)

    def test_the_environment_names_files_too(
        self, saved: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OUTCORE_PLAN", str(saved))
        assert Backend(budget=TIGHT).options.plan == str(saved)


class TestOverrides:
    def rules(self, folder: Path, **actions: str) -> str:
        path = folder / "overrides.json"
        listed = [{"match": match, "action": action} for match, action in actions.items()]
        path.write_text(json.dumps(listed))
        return str(path)

    def test_rules_hold_in_training(self, tmp_path: Path) -> None:
        path = tmp_path / "overrides.json"
        path.write_text(
            '[{"match": "first", "action": "keep"}, {"match": "relu_3", "action": "recompute"}]'
        )
        seen, backend = small_planned(STEPS, **MOVING, overrides=str(path))
        planned = the_plan(backend)
        names = [buffer.name for buffer in planned.problem.trace.buffers]
        chosen = {names[gap.buffer]: choice for gap, choice in planned.plan.choices}
        assert chosen["relu_3"] == Recompute()
        assert all(storage.module != "first" for storage in self.saved(backend, tmp_path))
        assert len(chosen) > 4
        assert same(seen, small_reference(STEPS))

    def saved(self, backend: Backend, folder: Path) -> Any:
        backend.save_plans(folder / "saved.json")
        file = load_plans(folder / "saved.json")
        assert len(file.overrides) == 2
        return file.plans[0].storages

    def test_where_everything_fits_what_is_to_move_moves(self, tmp_path: Path) -> None:
        rules = self.rules(tmp_path, relu_3="offload")
        seen, backend = small_planned(STEPS, budget="1GiB", overrides=rules)
        moved = [c for _, c in the_plan(backend).plan.choices if not isinstance(c, Keep)]
        assert len(moved) == 1
        assert backend.report().offloaded_bytes > 0
        assert same(seen, small_reference(STEPS))

    def test_search_plans_around_rules_in_a_process_of_its_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []

        def noted(policy: Any, problem: Any) -> Any:
            asked.append(policy)
            return plan_out_of_process(policy, problem)

        monkeypatch.setattr("outcore.runtime.planning.solving.plan_out_of_process", noted)
        rules = self.rules(tmp_path, relu_3="recompute")
        policy = "search{effort=0.01,min_bytes=1KiB}"
        _, backend = small_planned(STEPS, budget=TIGHT, policy=policy, overrides=rules)
        planned = the_plan(backend)
        names = [buffer.name for buffer in planned.problem.trace.buffers]
        chosen = {names[gap.buffer]: choice for gap, choice in planned.plan.choices}
        assert isinstance(chosen["relu_3"], Recompute)
        assert [policy.name for policy in asked] == ["overridden"]

    def test_a_rule_that_matches_nothing_is_an_error(self, tmp_path: Path) -> None:
        rules = self.rules(tmp_path, relu_99="keep")
        with pytest.raises(OptionValueError, match=r"similar names are .*relu_"):
            small_planned(STEPS, **MOVING, overrides=rules)

    def test_a_rule_whose_graph_is_idle_is_noted(self, tmp_path: Path) -> None:
        rules = self.rules(tmp_path, second="keep")
        backend, first, second = Backend(budget="1GiB", overrides=rules), Broken().second, Small()
        idle = torch.compile(nn.Sequential(OrderedDict(second=first)), backend=backend)
        train(first, idle, [torch.ones(2, 4, 8, 8)], mean_square, 2)
        train(second, torch.compile(second, backend=backend), [batch(0)], mean_square, 2 * STEPS)
        (note,) = backend.report().notes
        assert note == 'overrides that match no graph that ran at planning time: "second: keep"'

    def test_the_log_says_who_moves_what_would_fit(
        self, saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        given: dict[str, dict[str, Any]] = {
            "overrides move some tensors anyway": {
                "overrides": self.rules(tmp_path, relu_3="offload")
            },
            f"its plan is from {saved}": {"plan": str(saved)},
        }
        for by, options in given.items():
            caplog.clear()
            with caplog.at_level(logging.INFO, "outcore"):
                _, backend = small_planned(STEPS, budget="1GiB", **options)
            (message,) = (r.getMessage() for r in caplog.records if r.levelno == logging.INFO)
            head, *rows = message.splitlines()
            assert head == f"outcore: graph 1 fits a budget of 1.00 GiB as it is; {by}"
            assert any(" offloaded " in row for row in rows)
            assert the_plan(backend).plan.policy == (
                "overrides" if "overrides" in by else "swap-all"
            )

    def test_a_rule_holds_beside_a_plan_from_a_file(self, saved: Path, tmp_path: Path) -> None:
        rules = self.rules(tmp_path, relu_3="keep")
        _, backend = small_planned(STEPS, budget="1GiB", plan=str(saved), overrides=rules)
        planned = the_plan(backend)
        kept = load_plans(saved).plans[0].plan().by_gap.keys() - planned.plan.by_gap.keys()
        names = {planned.problem.trace.buffers[gap.buffer].name for gap in kept}
        assert names == {"relu_3"}


@pytest.mark.parametrize("strict", [False, True])
def test_a_plan_that_offloads_where_nothing_may_go(saved: Path, strict: bool) -> None:
    with pytest.raises(OptionValueError, match="none can be used here: if disk_budget is 0") as got:
        small_planned(STEPS, budget=TIGHT, plan=saved, disk_budget=0, strict=strict)
    assert str(saved) in str(got.value)
