"""The code that runs the CPU benchmarks, and one tiny row of them."""

from __future__ import annotations

import json
import mmap
import operator
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from operator import itemgetter
from typing import Any

import pytest
import torch

from benchmarks.cpu import beyond, memory
from benchmarks.cpu.command import main
from benchmarks.cpu.exact import Comparison
from benchmarks.cpu.scale import SMALL
from benchmarks.cpu.spill import Spill
from benchmarks.cpu.table import BENCHMARKS
from benchmarks.cpu.trainer import Trainer, Turn
from benchmarks.cpu.workloads import make_step
from benchmarks.kit import results, show
from benchmarks.kit.benchmark import Benchmark, Patience
from benchmarks.kit.command import Kit, run_kit
from benchmarks.kit.digests import differing
from benchmarks.kit.earlier import Resuming
from benchmarks.kit.modes import Checkpoint, Eager
from benchmarks.kit.rounds import median_of_ratios, ratio_of_medians, steps_per_turn, take_turns
from benchmarks.kit.rows import Check, Row, at_most
from benchmarks.kit.worker import Worker, WorkerError
from outcore.errors import OptionValueError, SpillError

SMALLEST = "small-resnet-b16-64"
LARGER = replace(SMALL, rounds=SMALL.rounds + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example(Row):
    what: str
    peak_bytes: int | None = None
    step_seconds: float | None = None
    nothing: str = ""


EXAMPLES = (
    Example(what="one", peak_bytes=2**20, step_seconds=0.5, checks=at_most("time", 1.3, 1.2)),
    Example(what="other", checks=(Check("equal", met=True),)),
)


class TestRows:
    def test_a_tiny_row_of_exact(self, monkeypatch):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # training sets it otherwise
        row = Comparison("two-heads").row("pooch", 0.5)
        assert (row.policy, row.state) == ("pooch", "planned")
        assert (row.unlike_aot_eager, row.unlike_eager) == (0, 0)
        peaks = [row.measured_peak_bytes, row.predicted_peak_bytes, row.budget_bytes]
        assert peaks == sorted(filter(None, peaks))
        assert [check.met for check in row.checks] == [True, True]

    def test_a_benchmark_through_the_command(self, tmp_path, capsys):
        file = tmp_path / "out.json"
        main(["--only", "verifier", "--small", "--out", str(file)])
        assert "2 of 2 goals reached" in capsys.readouterr().out
        part = json.loads(file.read_text())["benchmarks"]["verifier"]
        assert part["complete"]
        assert [row["fault"] for row in part["rows"]] == ["lost instruction", "lost hazard edge"]
        assert str(tmp_path) not in file.read_text()

    def test_tiny_rows_of_optimizer(self):
        rows: list[Any] = [*BENCHMARKS["optimizer"].run(SMALL, Patience(60.0))]
        here, away = rows
        assert (here.state, away.state) == ("memory", "disk")
        assert away.checks[0] == Check("weights bitwise equal", met=True)
        assert 0 < away.held_bytes < here.held_bytes
        assert away.held_bytes < away.peak_bytes < here.peak_bytes

    def test_tiny_rows_of_returned(self):
        rows: list[Any] = [*BENCHMARKS["returned"].run(SMALL, Patience(60.0))]
        assert [row.by for row in rows] == ["eager"] * 2 + ["aot_eager"] * 2 + ["outcore"] * 2
        more = {row.by: row.more_bytes for row in rows if "logits" in row.results}
        assert more["outcore"] < more["aot_eager"]
        same, *_ = rows[-1].checks
        assert same == Check("gradients bitwise equal to aot_eager's", met=True)

    def test_an_unknown_name_is_refused(self, capsys):
        with pytest.raises(SystemExit):
            main(["--only", "exakt"])
        assert "did you mean exact" in capsys.readouterr().err.replace("'", "")

    def test_without_time_nothing_is_run(self):
        patience = Patience(-1.0)
        assert [row for b in BENCHMARKS.values() for row in b.run(SMALL, patience)] == []
        assert patience.cut

    def test_what_has_begun_goes_on_to_the_very_last(self):
        assert Patience(-1.0).left_seconds() == inf
        assert Patience(-1.0, 0.0).left_seconds() == 0.0
        assert 0 < Patience(-1.0, 60.0).left_seconds() <= 60.0


class TestTable:
    def test_units_and_goals(self):
        assert show.table(EXAMPLES).splitlines() == [
            "what   peak      step    goals",
            "one    1.00 MiB  500 ms  MISSED: time 1.300 at most 1.2",
            "other  -         -       reached",
        ]
        assert show.verdict(EXAMPLES) == "1 of 2 goals reached"

    def test_results_of_other_benchmarks_stay(self, tmp_path):
        file = tmp_path / "some.json"
        benchmark: Benchmark = Benchmark("x", "an example", lambda scale, patience: iter(EXAMPLES))
        for name in ("x", "y", "x"):
            rows = [*map(results.saved, EXAMPLES)]
            part = results.part(benchmark, SMALL, {}, rows, complete=True)
            results.save(file, name, part)
        found = json.loads(file.read_text())
        assert set(found["benchmarks"]) == {"x", "y"}
        assert found["benchmarks"]["x"]["rows"][1] == {
            "what": "other",
            "nothing": "",
            "note": "",
            "checks": [{"goal": "equal", "met": True}],
        }
        assert [path.name for path in tmp_path.iterdir()] == ["some.json"]


class TestGoingOn:
    """A benchmark of three rows, with time for two at first, one of which fails."""

    @pytest.fixture
    def kit(self):
        def run(_, patience):
            for name in (name for name in "abc" if name not in patience.known):
                if len(self.ran) == self.time:
                    patience.cut = True
                    return
                self.ran.append(name)
                yield Example(what=name, note="failed" * (len(self.ran) == 2 and not self.dies))
            if self.dies:
                raise KeyError

        self.ran: list[str] = []
        return Kit(
            name="some",
            description="",
            benchmarks={"x": Benchmark("x", "an example", run)},
            scale=lambda _: self.scale,
            machine=lambda _: {"gpu": self.gpu, "source": str(len(self.ran))},
            resuming=Resuming(
                key=itemgetter("what"),
                failed=lambda row: bool(row["note"]),
                machine=lambda machine: machine["gpu"],
            ),
        )

    gpu, scale, time, dies = "one", SMALL, 2, False

    def go(self, kit, file, *more):
        with suppress(SystemExit):
            run_kit(kit, ["--out", str(file), *more])
        part = json.loads(file.read_text())["benchmarks"]["x"]
        return part, [(row["what"], row["note"], "date" in row) for row in part["rows"]]

    def test_what_is_there_stays_with_its_date_and_what_failed_is_run_again(self, kit, tmp_path):
        part, rows = self.go(kit, tmp_path / "some.json")
        assert rows == [("a", "", False), ("b", "failed", False)]
        assert not part["complete"]
        self.time = 9
        part, rows = self.go(kit, tmp_path / "some.json", "--go-on")
        assert self.ran == [*"abbc"]
        assert rows == [("a", "", True), ("b", "", False), ("c", "", False)]
        assert [row.get("source") for row in part["rows"]] == ["0", None, None]
        assert part["complete"]

    def test_what_failed_stays_where_there_is_no_time_for_it(self, kit, tmp_path):
        self.go(kit, tmp_path / "some.json")
        part, rows = self.go(kit, tmp_path / "some.json", "--go-on")
        assert rows == [("a", "", True), ("b", "failed", True)]
        assert not part["complete"]

    def test_what_is_complete_is_not_run_again_but_for_what_failed(self, kit, tmp_path, capsys):
        self.time = 9
        for _ in range(3):
            self.go(kit, tmp_path / "some.json", "--go-on")
        assert self.ran == [*"abcb"]
        assert "x: complete, of 20" in capsys.readouterr().out

    def test_a_run_that_ended_after_the_last_row_is_completed(self, kit, tmp_path):
        self.time, self.dies = 9, True
        assert not self.go(kit, tmp_path / "some.json")[0]["complete"]
        self.dies = False
        assert self.go(kit, tmp_path / "some.json", "--go-on")[0]["complete"]
        assert self.ran == [*"abc"]

    @pytest.mark.parametrize("change", [{"gpu": "another"}, {"scale": LARGER}])
    def test_figures_of_another_machine_or_scale_do_not_stand_beside(
        self, change, kit, tmp_path, capsys
    ):
        before, _ = self.go(kit, tmp_path / "some.json")
        self.time = 9
        for name, value in change.items():
            setattr(self, name, value)
        after, _ = self.go(kit, tmp_path / "some.json", "--go-on")
        assert self.ran == [*"ab"]
        assert after == before
        assert "give another --out" in capsys.readouterr().err

    def test_without_the_option_all_of_it_is_run_anew(self, kit, tmp_path):
        self.go(kit, tmp_path / "some.json")
        self.time = 9
        _, rows = self.go(kit, tmp_path / "some.json")
        assert self.ran == [*"ababc"]
        assert rows == [("a", "", False), ("b", "", False), ("c", "", False)]


class Fake:
    """A worker whose turns take known times."""

    def __init__(self, name, seconds, log):
        self.name, self.seconds, self.log = name, seconds, log

    def ask(self, method, steps):
        assert method is Trainer.turn
        self.log.append(self.name)
        if self.seconds is None:
            raise WorkerError("Died", "")
        return Turn(self.seconds, 0)


def fakes(log, **seconds):
    return {name: Fake(name, each, log) for name, each in seconds.items()}


class TestRounds:
    def test_the_first_of_a_round_changes_and_slow_ones_sit_out(self):
        log: list[str] = []
        turns = take_turns(fakes(log, a=1.0, b=1.5, c=9.0), Trainer.turn, 4, 1, Patience())
        assert "".join(log) == "abc" + "bca" + "cab" + "ab"
        assert turns["c"] == (Turn(9.0, 0),) * 3 + (None,)
        assert ratio_of_medians(turns["c"], turns["a"]) == 9
        assert median_of_ratios(turns["b"], turns["a"]) == 1.5

    def test_one_that_fails_is_left_out(self, capsys):
        turns = take_turns(fakes([], a=1.0, b=None, c=2.0), Trainer.turn, 2, 1, Patience())
        assert list(turns) == ["a", "c"]
        assert "b: Died" in capsys.readouterr().err

    def test_when_time_is_over_there_are_still_some_rounds(self):
        turns = take_turns(fakes([], a=1.0), Trainer.turn, 9, 1, Patience(-1.0))
        assert len(turns["a"]) == 3

    def test_short_steps_are_repeated(self):
        assert [steps_per_turn(s, 0.5) for s in (3.0, 0.5, 0.2)] == [1, 1, 3]


class TestWorker:
    def test_answers_and_errors(self):
        worker: Worker[list[str]] = Worker(list, "abc")
        with worker:
            assert worker.ask(len) == 3
            with pytest.raises(WorkerError, match="IndexError"):
                worker.ask(operator.itemgetter(7))
            assert worker.ask(operator.itemgetter(1)) == "b"

    def test_an_error_of_outcore_arrives_as_it_is(self):
        with pytest.raises(SpillError, match="full"):
            Worker(_raise)


def _raise():
    raise SpillError(directory="somewhere", reason="full")


def end_the_process(_):
    os._exit(3)


def test_a_process_that_died_is_told_of():
    worker: Worker[list[str]] = Worker(list, "abc")
    with worker:
        for _ in range(2):
            with pytest.raises(WorkerError, match="Died") as caught:
                worker.ask(end_the_process)
            assert "exit code 3" in caught.value.details


def test_high_water_mark_begins_anew():
    before = memory.resident_bytes()
    memory.reset_high_water()
    # Not from malloc, which may still have this much from earlier.
    with mmap.mmap(-1, 64 << 20) as held:
        for _ in range(64):
            held.write(bytes(1 << 20))
    assert memory.high_water_bytes() - before >= 60 << 20
    assert memory.high_water_bytes() >= memory.resident_bytes()
    memory.reset_high_water()
    assert memory.high_water_bytes() - before < 30 << 20


@pytest.mark.parametrize("mode", [Checkpoint(), Spill(), Spill("1GiB/s")], ids=str)
def test_peers_give_the_gradients_of_eager(mode, tmp_path, monkeypatch):
    monkeypatch.setenv("OUTCORE_SPILL_DIR", str(tmp_path))
    peer, eager = Trainer(SMALLEST, mode), Trainer(SMALLEST, Eager())
    for _ in range(2):
        peer.step()
        eager.step()
    gradients = [[p.grad for p in each.module.parameters()] for each in (peer, eager)]
    assert all(map(torch.equal, *gradients))
    assert not [path for path in tmp_path.glob("*/*") if path.is_file()]


def test_a_step_beyond_the_memory_is_no_larger_than_it_must_be(monkeypatch):
    monkeypatch.setattr(beyond, "_in_core_bytes", lambda batch: 100 + 30 * batch)
    assert [beyond._batch(nbytes) for nbytes in (1, 130, 131, 160, 161, 1000)] == [
        1,
        1,
        2,
        2,
        3,
        30,
    ]


@pytest.mark.parametrize(
    ("kind", "details", "out"),
    [
        ("Died", "exit code -9", True),
        ("RuntimeError", "DefaultCPUAllocator: can't allocate memory", True),
        ("ImportError", "no module", False),
        ("Timeout", "no answer", False),
    ],
)
def test_only_running_out_of_memory_counts_as_not_to_fit(monkeypatch, kind, details, *, out):
    def worker(*_: object) -> None:
        raise WorkerError(kind, details)

    monkeypatch.setattr(beyond, "Worker", worker)
    row = beyond.Beyond(mode="eager", batch=1, memory_bytes=1, in_core_peak_bytes=2)
    found = beyond._plain(row, SMALLEST, 1 << 30)
    assert [check.met for check in found.checks] == [out]
    assert ("out of memory" in found.note) == out


def test_a_workload_names_network_batch_and_size():
    module, (images,), _ = make_step("resnet50-b2-64")
    assert images.shape == (2, 3, 64, 64)
    assert sum(p.numel() for p in module.parameters()) > 20e6
    with pytest.raises(KeyError):
        make_step("resnet-fifty")
    with pytest.raises(OptionValueError, match="resnet50"):
        make_step("resnet-b2-64")


def test_missing_results_differ():
    assert differing([("a", "b"), ("c",)], [("a", "x")]) == 2
