"""The GPU benchmarks, run on a CPU: rows, files, and what they print without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks.gpu import processes, questions, trainer
from benchmarks.gpu.command import KIT, main
from benchmarks.gpu.compare import (
    OUT_OF_MEMORY,
    SAMPLES,
    Comparison,
    Contender,
    _repeatable,
    compare,
    reason,
)
from benchmarks.gpu.instruments import Memory, Peaks
from benchmarks.gpu.peers import SaveOnCpu, StreamOffload
from benchmarks.gpu.plots import plot
from benchmarks.gpu.processes import close_spares
from benchmarks.gpu.scale import FULL, SMALL
from benchmarks.gpu.table import BENCHMARKS
from benchmarks.gpu.trainer import (
    FEWEST_WARM_UPS,
    LAST_WARM_UPS,
    MOST_WARM_UPS,
    PROBE_SEED,
    Result,
    Trainer,
    Turn,
)
from benchmarks.gpu.training import (
    Training,
    at_least,
    compared,
    failed,
    judged,
    key,
    near,
    recorded,
    reported,
    timed,
)
from benchmarks.gpu.workloads import Step, Workload
from benchmarks.kit.benchmark import Patience
from benchmarks.kit.digests import digests
from benchmarks.kit.markdown import markdown
from benchmarks.kit.modes import Eager, Outcore
from benchmarks.kit.results import saved
from benchmarks.kit.rounds import FEWEST_ROUNDS
from benchmarks.kit.worker import WorkerError
from outcore.errors import InfeasibleError
from outcore.ir.problem import Problem
from outcore.ir.store import load
from outcore.networks import NETWORKS
from outcore.networks.spec import Batch
from outcore.planfile import load_plans
from outcore.report import Recorded, Report
from outcore.report.links import LinkUse

TINY = Workload(network="two-heads", batch=4, small=True)
ON_CPU = replace(SMALL, device="cpu", rounds=2)
ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG"
PEAK, WEIGHTS = 29_463_233_536, 774_030_080
"""Bytes of a step of GPT-2 large with AdamW in-core, by torch's allocator, and its weights."""


@pytest.fixture(autouse=True, scope="module")
def _no_process_is_left() -> Iterator[None]:
    yield
    close_spares()


def row(**more) -> Training:
    return replace(Training(workload="net b1", mode="outcore pooch"), **more)


def turns(*seconds: float, allocated: int | None = None):
    return tuple(Turn(each, Peaks(allocated, allocated, 0)) for each in seconds)


class TestRows:
    def test_throughput_is_that_of_the_reference_over_the_same_turns(self):
        found = timed(row(), 8, turns(2.0, 4.0, 2.0, allocated=7), turns(1.0, 2.0, 1.0))
        assert (found.step_seconds, found.samples_per_second) == (2.0, 4.0)
        assert (found.of_in_core_ratio, found.quartiles) == (0.5, "0.500 to 0.500")
        assert (found.allocated_bytes, found.turns) == (7, 3)

    def test_without_a_reference_there_is_no_ratio(self):
        found = timed(row(), 8, turns(2.0), ())
        assert (found.of_in_core_ratio, found.allocated_bytes) == (None, None)

    def test_only_results_that_come_out_the_same_twice_are_compared(self):
        mine = [Result(digest, 1.0, 0.0) for digest in ("a", "x", "y")]
        found = compared(row(), {0: "a", 2: "c", 3: "d"}, mine)
        assert (found.unlike, found.compared) == (2, 3)
        assert compared(row(), {}, mine).unlike is None

    def test_results_that_vary_must_be_near(self):
        theirs = [Result("a", 10.0, 1.0)] * 4
        mine = [Result("b", 10.09, 0.91), Result("b", 10.2, 1.0), Result("b", 10.0, 1.2)]
        assert near(row(), theirs[:1], mine[:1]).far == 0
        assert near(row(), theirs, [*mine, Result("b", nan, nan)]).far == 3
        assert near(row(), theirs, mine).far == 3, "one is missing"
        assert near(row(), (), mine).far is None

    def test_goals_of_a_row_of_outcore(self):
        report = Report(
            "pooch",
            "planned",
            10,
            predicted_peak_bytes=8,
            predicted_seconds=1.2,
            measured_seconds=1.0,
        )
        one = row(step_seconds=1.0, allocated_bytes=9, unlike=1, compared=3)
        checks = judged(reported(one, report.to_dict())).checks
        assert [check.met for check in checks] == [True, False, False, False]
        assert judged(one).checks == ()
        assert [check.met for check in at_least("of in-core", 0.9, 0.9)] == [True]

    def test_steps_that_outcore_meters_reset_what_the_allocator_counts(self):
        report = Report("pooch", "planned", 10, predicted_peak_bytes=8, measured_peak_bytes=9)
        found = reported(row(allocated_bytes=5), report.to_dict())
        assert (found.allocated_bytes, found.metered_peak_bytes) == (9, 9)
        assert reported(row(allocated_bytes=11), report.to_dict()).allocated_bytes == 11
        goals = {check.goal: check.met for check in judged(found).checks}
        assert not goals["inside the predicted peak"]
        assert not any("time" in goal for goal in goals), "none was measured"

    def test_where_the_time_of_a_recorded_step_went(self):
        link = LinkUse("out to host", 1, 8, 2.0, 4.0, measured_rate=3.0)
        report = Report(
            "pooch", "planned", 10, links=(link,), recorded=Recorded(9.0, 6.0, 5.0, 2.0)
        )
        found = recorded(row(), report.to_dict())
        assert found.ops_of_planned_ratio == 1.2
        assert (found.wait_seconds, found.between_seconds) == (2.0, 1.0)
        assert (found.out_of_planned_ratio, found.in_of_planned_ratio) == (0.75, None)
        assert recorded(row(), {}) == row()
        without = Report("pooch", "planned", 10).to_dict()
        assert recorded(row(), without) == row(details={"report": without})

    def test_steps_under_a_layout_are_counted(self):
        trainer = Trainer(TINY, Eager(), "cpu", None)
        engine = SimpleNamespace(placing=SimpleNamespace(steps=4))
        report = Report("pooch", "planned", 10)
        backend: Any = SimpleNamespace(engine=engine, report=lambda: report)
        trainer.backend = backend
        assert reported(row(), trainer.report()).placed_steps == 4


class TestWarmUp:
    """Steps from which on a fake backend has another state."""

    def trained(self, monkeypatch, *states: tuple[int, str, int | None]) -> tuple[int, int]:
        trainer = Trainer(TINY, Eager(), "cpu", None)

        def report():
            known = [state for state in states if state[0] <= trainer.steps]
            return SimpleNamespace(state=known[-1][1], measured_peak_bytes=known[-1][2])

        backend = SimpleNamespace(report=report)
        monkeypatch.setattr(Eager, "apply", lambda _, module: (module, backend))
        return len(trainer.warm_up()), trainer.steps

    def test_until_there_is_a_plan_and_its_peak_is_known(self, monkeypatch):
        states = (0, "profiling", None), (5, "planned", None), (6, "planned", 7)
        assert self.trained(monkeypatch, *states) == (6, 6 + LAST_WARM_UPS)
        assert self.trained(monkeypatch, (0, "in-core", 7)) == (
            FEWEST_WARM_UPS,
            FEWEST_WARM_UPS + LAST_WARM_UPS,
        )

    def test_once_more_if_a_plan_is_left(self, monkeypatch):
        """Otherwise profiled steps would be timed."""
        states = (0, "planned", 7), (5, "profiling", 7), (20, "planned", 7)
        timed = 20 - FEWEST_WARM_UPS - LAST_WARM_UPS
        expected = FEWEST_WARM_UPS + timed, 20 + LAST_WARM_UPS
        assert self.trained(monkeypatch, *states) == expected

    def test_without_outcore_nothing_is_metered_that_would_have_to_settle(self):
        trainer = Trainer(TINY, Eager(), "cpu", None)
        assert len(trainer.warm_up()) == trainer.steps == FEWEST_WARM_UPS

    def test_it_ends(self, monkeypatch):
        assert self.trained(monkeypatch, (0, "profiling", None))[0] == 4 * MOST_WARM_UPS


class TestResults:
    def test_figures_are_those_of_all_elements(self, monkeypatch):
        monkeypatch.setattr(trainer, "PIECE", 1000)
        tensor = torch.rand(60, 50).t().to(torch.bfloat16)
        exact = tensor.double().flatten()
        generator = torch.Generator().manual_seed(PROBE_SEED)
        vector = torch.cat([torch.randn(1000, generator=generator) for _ in range(3)])
        found = trainer._result(tensor, "a")
        assert found.digest == "a"
        assert found.norm == pytest.approx(float(exact.norm()), rel=1e-5)
        assert found.along == pytest.approx(float(exact @ vector.double()) / 3000**0.5, rel=1e-4)

    def test_digests_are_in_the_order_of_the_tensors(self):
        tensors = [torch.full((size,), size) for size in (1 << 16, 3, 1, 0)] * 5
        found = digests(iter(tensors))
        assert found == tuple(digests((tensor,))[0] for tensor in tensors)
        assert len({*found}) == 4

    def test_they_are_taken_in_one_step(self):
        """The other steps show only which results are the same each time."""
        asked, others = [], iter([("a", "b"), ("a", "c")])

        def ask(what):
            asked.append(what)
            return next(others)

        process: Any = SimpleNamespace(ask=ask)
        assert _repeatable(process, Trainer.digests, ["a", "b"]) == {0: "a"}
        assert asked == [Trainer.digests] * (SAMPLES - 1)


class TestProcesses:
    def test_one_is_ready_before_it_is_needed(self):
        close_spares()
        first = trainer_of(TINY, Eager())
        (ready,) = processes._spares
        waiting = ready.result()
        second = trainer_of(TINY, Eager())
        try:
            assert second is waiting
            assert len(second.ask(Trainer.warm_up)) >= FEWEST_ROUNDS
        finally:
            first.close()
            second.close()
        (ready,) = processes._spares
        close_spares()
        assert not processes._spares
        assert not ready.result()._process.is_alive()

    def test_one_that_dies_idle_is_replaced(self):
        close_spares()
        trainer_of(TINY, Eager()).close()
        (ready,) = processes._spares
        ready.result()._process.kill()
        ready.result()._process.join()
        trainer_of(TINY, Eager()).close()


def trainer_of(workload, mode):
    return processes.trainer(Patience(), workload, mode, "cpu", None, offloads_state=False)


class TestComparison:
    def test_a_peer_and_one_that_is_not_there(self):
        peers = [Contender(SaveOnCpu()), Contender(StreamOffload())]
        reference, there, missing = compare(TINY, Eager(), lambda _: peers, ON_CPU, Patience())
        assert reference.allocated_bytes
        assert (there.unlike, there.compared, there.note) == (0, 15, "")
        assert there.of_in_core_ratio is not None
        assert (missing.step_seconds, missing.note) == (None, "not installed")

    def test_a_row_that_cannot_be_made_takes_no_other_with_it(self, monkeypatch, capsys):
        whole, begun = Comparison._row, []

        def broken(self, contender, process):
            begun.append(contender)
            return whole(self, contender, process) if len(begun) > 1 else {}[contender.mode.name]

        monkeypatch.setattr(Comparison, "_row", broken)
        peers = [Contender(SaveOnCpu()), Contender(SaveOnCpu())]
        _, first, second = compare(TINY, Eager(), lambda _: peers, ON_CPU, Patience())
        assert (first.step_seconds, first.note) == (None, "failed: KeyError")
        assert (second.step_seconds is not None, second.note) == (True, "")
        assert "KeyError: 'save_on_cpu'" in capsys.readouterr().err

    def test_rows_of_an_earlier_run_are_left_out(self):
        def contenders(in_core_bytes):
            return [Contender(SaveOnCpu(), in_core_bytes), Contender(Eager("eager, capped"))]

        reference = row(workload=TINY.name, mode="eager", allocated_bytes=1 << 30)
        there = row(workload=TINY.name, mode="save_on_cpu", cap_bytes=(1 << 30) + 9)
        other = row(workload=TINY.name, mode="eager, capped")
        known = {key(each): each for each in map(saved, (reference, there, other))}
        assert not list(compare(TINY, Eager(), contenders, ON_CPU, Patience(known=known)))
        del known[key(saved(other))]
        first, found = compare(
            TINY, Eager(), lambda _: contenders(1 << 30), ON_CPU, Patience(known=known)
        )
        assert (first.mode, found.mode) == ("eager", "eager, capped")

    def test_rows_that_failed_are_measured_again(self):
        assert not failed(saved(row(note="infeasible: needs more")))
        assert not failed(saved(row(note=OUT_OF_MEMORY)))
        assert failed(saved(row(note=reason(WorkerError("Timeout", "")))))
        assert failed(saved(row(note="failed: KeyError")))

    def test_one_whose_reference_is_gone_is_held_against_its_turns_from_before(self):
        comparison = Comparison(TINY, Eager(), replace(ON_CPU, rounds=5), Patience())
        try:
            assert not comparison.begin().note
            comparison.end()
            [found] = comparison.rows([Contender(SaveOnCpu())])
        finally:
            comparison.end()
        assert (found.note, found.turns) == ("", FEWEST_ROUNDS)
        assert found.of_in_core_ratio is not None

    def test_a_reference_that_dies_between_rows_takes_no_row_with_it(self, capsys):
        comparison = Comparison(TINY, Eager(), ON_CPU, Patience())
        try:
            assert not comparison.begin().note
            comparison._process._process.kill()
            comparison._process._process.join()
            [found] = comparison.rows([Contender(SaveOnCpu())])
        finally:
            comparison.end()
        assert found.of_in_core_ratio is not None
        assert "the reference failed" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("results", "mode", "traced"),
        [
            ({0: "a"}, Outcore("pooch"), True),
            ({}, Outcore("pooch"), False),
            ({0: "a"}, Outcore("pooch", fuse=True), False),
            ({0: "a"}, SaveOnCpu(), False),
        ],
    )
    def test_a_reference_that_has_to_go_is_traced_only_for_those_that_compare(
        self, results, mode, traced
    ):
        asked = []

        def ask(what):
            asked.append(what)
            return Memory(10, 10) if what is Trainer.memory else ()

        comparison, contender = Comparison(TINY, Eager(), ON_CPU, Patience()), Contender(mode)
        reference: Any = SimpleNamespace(ask=ask, close=lambda: None)
        comparison._process, comparison._results, comparison._left = reference, results, [contender]
        comparison._make_room(contender)
        assert (Trainer.traced_digests in asked) == traced
        assert comparison._process is None

    def test_results_unlike_eager_are_held_against_those_of_the_traced_step(self, monkeypatch):
        comparison = Comparison(TINY, Eager(), ON_CPU, Patience())
        try:
            assert not comparison.begin().note
            mine = comparison._all
            comparison._results[0] = "another"
            found = comparison._compared(row(), mine, fused=False)
        finally:
            comparison.end()
        assert (found.unlike, found.compared, found.far) == (0, 15, 0)
        assert found.note == "1 of 15 unlike eager"

    def test_what_fails_after_the_turns_takes_no_figures_with_it(self, monkeypatch):
        def fails(*_, **__):
            raise WorkerError("Timeout", "")

        monkeypatch.setattr(Comparison, "_compared", fails)
        _, found = compare(TINY, Eager(), lambda _: [Contender(SaveOnCpu())], ON_CPU, Patience())
        assert found.of_in_core_ratio is not None
        assert found.note == "it took too long"
        assert len(found.details["turns"]) == found.turns == ON_CPU.rounds

    def test_one_row_at_least_stands_beside_the_reference(self):
        patience = Patience(0.2)
        peers = [Contender(SaveOnCpu()), Contender(SaveOnCpu(), 1 << 30)]
        reference, found = compare(TINY, Eager(), lambda _: peers, ON_CPU, patience)
        assert reference.step_seconds is not None
        assert found.step_seconds is not None
        assert patience.cut

    def test_what_does_not_run_in_core_is_noted(self, capsys):
        broken = replace(TINY, sizes=(("height", 3),))
        [reference] = compare(broken, Eager(), lambda _: (), ON_CPU, Patience())
        assert reference.note == "failed: TypeError"
        assert "height" in capsys.readouterr().err

    def test_what_does_not_fit_is_said_of_which_tier(self):
        error = InfeasibleError(
            budget_bytes=1, floor_bytes=2**20, op="op 3", policy="", needed_bytes=2, tier="host"
        )
        assert reason(error) == "infeasible: needs 1.00 MiB of host memory for op 3"

    def test_where_memory_ran_out_is_printed(self, capsys):
        assert reason(WorkerError("OutOfMemoryError", "in this line")) == OUT_OF_MEMORY
        assert "in this line" in capsys.readouterr().err


def test_the_tests_of_a_gpu_need_pytest_and_torch_alone():
    """Collected without hypothesis and without the plugins that pyproject.toml names."""
    without = ("-p", "no:timeout", "-p", "no:xdist", "-p", "no:hypothesispytest")
    code = f"""
import sys, pytest
class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "hypothesis":
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
sys.exit(pytest.main(['tests/gpu', '--collect-only', '-q', *{without}]))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "test_cuda.py" in ran.stdout


class TestCommand:
    @pytest.fixture(autouse=True)
    def _environment(self) -> Iterator[None]:
        """The command sets up torch's allocator for its own process and those to come."""
        with mock.patch.dict(os.environ):
            yield

    def test_one_benchmark_from_end_to_end(self, tmp_path, capsys):
        file = tmp_path / "gpu.json"
        kept = tmp_path / "kept"
        where = ["--out", str(file), "--keep", str(kept)]
        main(["--device", "cpu", "--small", "--only", "links", "decoder", *where])
        for mode in ("outcore-search", "outcore-search-fused"):
            (problem,) = kept.glob(f"*-{mode}-[0-9]*-problem-0.json")
            assert load(problem, Problem).budget_bytes
            (plans,) = kept.glob(f"*-{mode}-[0-9]*-plans.json")
            assert load_plans(plans).plans
        assert len(list(kept.glob("*timelines.json"))) == 2
        found = json.loads(file.read_text())
        links, decoder = (found["benchmarks"][name] for name in ("links", "decoder"))
        assert links["complete"]
        assert decoder["complete"]
        assert any("bytes_per_second" in each for each in links["rows"])
        eager, ours, fused = decoder["rows"]
        assert eager["of_in_core_ratio"] == 1
        assert ours["unlike"] == 0
        for row in (ours, fused):
            assert row["ops_of_planned_ratio"] > 0
            assert row["allocated_bytes"] <= row["predicted_peak_bytes"] <= row["budget_bytes"]
        for what in ("throughput", "memory"):
            assert (tmp_path / f"gpu-{what}.png").read_bytes().startswith(PNG)
        text = markdown(found, ["decoder"])
        assert "| gpt2-large b32 tf32 bf16 | eager |" in text
        assert "links" not in text
        assert str(tmp_path) not in file.read_text()

    def test_rows_with_the_state_of_an_optimizer_away(self):
        rows = BENCHMARKS["optimizer"].run(ON_CPU, Patience(None))
        eager, away, ours_away, ours = (row for row in rows if isinstance(row, Training))
        assert [row.mode for row in (eager, away, ours_away, ours)] == [
            "eager",
            "eager, state offloaded",
            "outcore search, state offloaded",
            "outcore search",
        ]
        assert away.unlike == ours_away.unlike == ours.unlike == 0
        assert (away.allocated_bytes or 0) < (eager.allocated_bytes or 0)
        for row in (ours, ours_away):
            assert (row.allocated_bytes or 0) <= (row.budget_bytes or 0)

    def test_the_update_of_an_optimizer_fits_under_the_cap(self, monkeypatch):
        """Weights, gradients, two tensors of state, and the temporary ones of torch's update."""
        found: list[Contender] = []

        def compare(_, __, contenders, *___):
            found.extend(contenders(PEAK))
            return iter(())

        monkeypatch.setattr(questions, "compare", compare)
        assert not [*BENCHMARKS["optimizer"].run(FULL, Patience())]
        modes = [each.mode for each in found]
        budgets = [int(mode.budget) for mode in modes if isinstance(mode, Outcore)]
        assert len(budgets) == 2
        assert min(budgets) > 5 * 4 * WEIGHTS

    @pytest.mark.parametrize(("device", "batch"), [("cpu", 32), ("cuda", 256)])
    def test_tiny_networks_need_more_than_a_few_pages_of_a_gpu(self, device, batch, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        given = Namespace(device=device, small=True, keep=None, host_budget=None)
        scale = KIT.scale(given)
        assert (scale.device, scale.batches[0]) == (device, batch)
        monkeypatch.setattr(questions, "compare", lambda workload, *_: [workload])
        rows: list[Any] = [*BENCHMARKS["decoder"].run(scale, Patience())]
        assert {each.batch for each in rows} == {batch}

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_without_a_gpu_it_says_what_to_do(self, capsys):
        with pytest.raises(SystemExit):
            main([])
        assert "--device cpu --small" in capsys.readouterr().err

    def test_without_time_nothing_is_run(self):
        patience = Patience(-1.0)
        assert [row for b in BENCHMARKS.values() for row in b.run(ON_CPU, patience)] == []
        assert patience.cut

    def test_what_failed_stands_in_the_plots_too(self, tmp_path):
        file = tmp_path / "one.json"
        failed = {"workload": "net b1", "mode": "eager", "note": "out of memory"}
        alone = {"workload": "net b1", "mode": "outcore", "note": "", "samples_per_second": 3.0}
        file.write_text(json.dumps({"benchmarks": {"x": {"rows": [failed, alone]}}}))
        assert len(plot(file)) == 2

    def test_no_plots_without_trained_rows(self, tmp_path):
        file = tmp_path / "none.json"
        file.write_text(json.dumps({"benchmarks": {"links": {"rows": [{"what": "x"}]}}}))
        assert plot(file) == ()


class TestLengths:
    """A workload whose samples differ in length from step to step."""

    def test_none_returns_soon(self):
        batch = Batch((torch.zeros(4, 1024), torch.zeros(4, 1024)))
        step = Step(nn.Identity(), batch, lambda made, _: made, bf16=False, lengths=20)
        seen = []

        def call(*inputs):
            seen.append([each.shape[1] for each in inputs])
            return inputs[0]

        for number in range(200):
            step.loss(call, number)
        assert len({length for length, _ in seen}) == 200
        assert {length for length, _ in seen} == {length for _, length in seen}
        assert min(seen)[0] > 512
        assert max(seen)[0] == 1024

    def test_outcore_trains_on_them(self):
        one = Workload(network="gpt2", lengths=20).tiny
        assert one.name == "gpt2 b32 lengths=4"
        trained, inputs = Trainer(replace(one, batch=2), Outcore("pooch"), "cpu", None), []
        trained.warm_up()
        whole = trained.call

        def call(*given):
            inputs.append(given[0].shape[1])
            return whole(*given)

        trained.call = call
        turn = trained.turn(4)
        assert len({*inputs}) == 4
        assert turn.host_seconds is not None
        assert 0 < turn.host_seconds <= turn.seconds
        assert timed(row(), 2, (turn,), ()).host_seconds == turn.host_seconds
        assert trained.metered_bytes() > 0
        assert [each.digest for each in trained.results()] == [*trained.digests()]


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_is_a_workload(name):
    workload = Workload(network=name).tiny
    assert name in workload.name
    assert (workload.batch, workload.small) == (32, True)
