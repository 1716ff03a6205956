"""Reports of training, with a recorded step and the prediction, and `outcore report`."""

from __future__ import annotations

import json
import pickle
import time
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from outcore import Backend
from outcore.execute.queued import QueuedDriver
from outcore.ir.hardware import Tier
from outcore.ir.profile import Source
from outcore.ir.program import Copy, Run, Stream
from outcore.ir.timeline import Cause, Span, Stall, Timeline
from outcore.report import Report
from outcore.report.recorded import recorded
from outcore.runtime.budget import engine as engines
from tests.cpu.test_drift import TickingDevice
from tests.cpu.training import Small, batch, mean_square, same, tight_budget, train

STEPS = 7
REPORT = ("report", "--network", "alexnet", "--batch", "300", "--hardware", "titan-xp")
TIGHT = ("--budget", "2.6GiB", "--policy", "swap-all")


def trained(budget: str | int, steps: int = STEPS, **options: Any) -> tuple[Backend, Report]:
    """Train `Small`, with the recording requested before the first step."""
    torch.manual_seed(0)
    module = Small()
    backend = Backend(budget=budget, policy="swap-all{min_bytes=1KiB}", **options)
    backend.record_step()
    train(module, torch.compile(module, backend=backend), [batch(0)], mean_square, steps)
    return backend, backend.report()


@cache
def report_of_one() -> Report:
    """The report of one such training. Reports hold no tensors, so tests can share it."""
    return trained(tight())[1]


def tight() -> int:
    return tight_budget(Small(), [batch(0)], mean_square)


# ---- a recorded step ----------------------------------------------------------------------------


def test_a_recorded_step_has_every_run_and_every_copy() -> None:
    (step,) = report_of_one().steps
    measured = step.measured
    assert measured is not None
    assert measured.source is Source.MEASURED
    works = [
        position
        for position, instruction in enumerate(step.program.body)
        if isinstance(instruction.action, Run | Copy)
    ]
    assert [span.instruction for span in measured.spans] == works
    assert min(span.start_seconds for span in measured.spans) == 0
    assert all(span.stop_seconds > span.start_seconds for span in measured.spans)
    assert any(span.stream is Stream.OUT for span in measured.spans)
    for stream in Stream:
        mine = [span for span in measured.spans if span.stream is stream]
        for before, after in pairwise(mine):
            assert before.stop_seconds <= after.start_seconds + 1e-4, "two clocks, read in turn"


def test_where_the_time_of_a_recorded_step_went() -> None:
    report = report_of_one()
    (step,), found = report.steps, report.recorded
    assert step.measured is not None
    assert found is not None
    assert found.planned_ops_seconds == step.predicted.busy_seconds(Stream.COMPUTE)
    parts = found.ops_seconds + found.wait_seconds + found.between_seconds
    assert parts == pytest.approx(found.seconds, rel=0.05)
    assert f"({found.ops_ratio:.1%} of planned)" in str(report)


def test_the_wait_before_the_first_op_of_a_call_is_part_of_its_time() -> None:
    """Backward begins with a wait of two seconds; each op takes one."""
    (step,) = report_of_one().steps
    body = step.program.body
    ops = [at for at, instruction in enumerate(body) if isinstance(instruction.action, Run)]
    first = next(at for at in ops if at >= step.program.boundary)
    starts = {at: place + (30.0 if at >= first else 0.0) for place, at in enumerate(ops)}
    spans = tuple(Span(at, Stream.COMPUTE, start, start + 1) for at, start in starts.items())
    stalls = (Stall(first, Cause.FETCH, 2.0),)
    found = recorded([replace(step, measured=Timeline(spans, stalls, (), Source.MEASURED))])
    assert found is not None
    assert found.ops_seconds == len(ops)
    assert found.seconds == len(ops) + 2
    assert found.between_seconds == 0


def test_a_recorded_step_keeps_the_order_that_the_program_demands() -> None:
    _, report = trained(tight(), link_limit="50MiB/s")
    (step,) = report.steps
    assert step.measured is not None
    spans = {span.instruction: span for span in step.measured.spans}
    for position, span in spans.items():
        for edge in step.program.body[position].after:
            if edge in spans:
                assert spans[edge].stop_seconds <= span.start_seconds + 1e-4
    assert step.measured.stall_seconds() > 0, "a slow link is waited for"
    assert {stall.instruction for stall in step.measured.stalls} <= set(spans)
    assert step.measured.peak(Tier.DISK) == step.predicted.peak(Tier.DISK)


def test_memory_taken_once_all_was_planned_is_told() -> None:
    held: list[torch.Tensor] = []
    budget = tight()
    backend = Backend(budget=budget, policy="swap-all{min_bytes=1KiB}")

    def loss(result: torch.Tensor) -> torch.Tensor:
        if backend.report().state == "planned":
            held.append(torch.ones(budget))
        return mean_square(result)

    module = Small()
    call = torch.compile(module, backend=backend)
    with pytest.warns(UserWarning, match="no plan has room for that"):
        train(module, call, [batch(0)], loss, STEPS)
    report = backend.report()
    assert report.measured_peak_bytes is not None
    assert report.measured_peak_bytes > report.budget_bytes
    *_, note = report.notes
    assert note.startswith("a metered step held ")
    assert "more outside the graphs than when they were planned" in note


def test_asking_changes_nothing_but_that_one_step_is_timed() -> None:
    outcomes, backends = [], []
    for asked in (True, False):
        torch.manual_seed(0)
        torch._dynamo.reset()
        module = Small()
        backend = Backend(budget=tight(), policy="swap-all{min_bytes=1KiB}")
        if asked:
            backend.record_step()
        call = torch.compile(module, backend=backend)
        outcomes.append(train(module, call, [batch(0)], mean_square, STEPS))
        backends.append(backend)
    assert same(*outcomes), "a recorded step gives the same gradients"
    recorded, plain = backends
    assert recorded.report().steps[0].measured is not None
    assert plain.report().steps[0].measured is None
    assert plain.engine is not None
    assert not plain.engine.recorder.busy
    before = plain.report().measured_seconds
    plain.record_step()
    train(module, call, [batch(0)], mean_square, 1)
    assert plain.report().steps[0].measured is not None
    assert not plain.engine.recorder.busy
    assert plain.report().measured_seconds == before, "a step under instruments does not count"


def test_a_forward_call_without_a_backward_is_not_the_step_that_was_asked_for() -> None:
    module = Small()
    backend = Backend(budget=tight(), policy="swap-all{min_bytes=1KiB}")
    call = torch.compile(module, backend=backend)
    train(module, call, [batch(0)], mean_square, STEPS)
    backend.record_step()
    call(batch(0))
    assert backend.report().steps[0].measured is None
    train(module, call, [batch(0)], mean_square, 2)
    measured = backend.report().steps[0].measured
    assert measured is not None
    copies = sum(isinstance(x.action, Copy) for x in backend.report().steps[0].program.body)
    assert sum(span.stream is not Stream.COMPUTE for span in measured.spans) == copies


def test_two_forward_calls_before_one_backward_are_recorded_once() -> None:
    module = Small()
    backend = Backend(budget=2 * tight(), policy="swap-all{min_bytes=1KiB}")
    call = torch.compile(module, backend=backend)
    for step in range(STEPS + 3):
        if step == STEPS:
            backend.record_step()
        torch.manual_seed(step)
        module.zero_grad()
        loss = mean_square(call(batch(0))) + mean_square(call(batch(1)))
        loss.backward()
    (step_seen,) = backend.report().steps
    measured, program = step_seen.measured, step_seen.program
    assert measured is not None
    works = [p for p, x in enumerate(program.body) if isinstance(x.action, Run | Copy)]
    assert [span.instruction for span in measured.spans] == works
    assert backend.engine is not None
    assert not backend.engine.recorder.busy


def test_a_step_is_recorded_on_a_device_with_queues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        engines, "open_driver", lambda _, folder, __: QueuedDriver(TickingDevice(), folder)
    )
    monkeypatch.setattr(TickingDevice, "notes", ("host memory cannot be pinned",))
    backend, report = trained(tight(), host_budget="1GiB", spill_dir=tmp_path)
    (step,) = report.steps
    assert "host memory cannot be pinned" in report.notes
    assert {link.name for link in report.links} == {"out to host", "in from host"}
    assert all(link.measured_rate for link in report.links)
    assert step.measured is not None
    works = [
        position
        for position, instruction in enumerate(step.program.body)
        if isinstance(instruction.action, Run | Copy)
    ]
    assert [span.instruction for span in step.measured.spans] == works
    assert all(span.stop_seconds > span.start_seconds for span in step.measured.spans)
    assert backend.engine is not None
    backend.engine.driver.close()


class Broken(nn.Module):
    """Two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Small(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        return torch.relu(self.second(y))


def test_graphs_of_one_step_are_recorded_each(tmp_path) -> None:
    torch.manual_seed(0)
    module = Broken()
    backend = Backend(budget=tight() + (1 << 20), policy="swap-all{min_bytes=1B}")
    backend.record_step()
    call = torch.compile(module, backend=backend)
    start = time.perf_counter()
    train(module, call, [batch(0)], mean_square, STEPS)
    seconds = time.perf_counter() - start
    report = backend.report()
    assert len(report.steps) == 2
    assert report.recorded is not None
    assert report.recorded.ops_seconds < report.recorded.seconds < seconds
    for step in report.steps:
        assert step.measured is not None
        works = sum(isinstance(x.action, Run | Copy) for x in step.program.body)
        assert len(step.measured.spans) == works
    report.to_html(tmp_path / "page.html")
    assert "Graph 2 of 2" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_pages_of_what_trains(tmp_path) -> None:
    report = report_of_one()
    page = tmp_path / "page.html"
    report.to_html(page)
    text = page.read_text(encoding="utf-8")
    assert 'data-source="measured"' in text
    assert "measured peak" in text
    assert "training.py" in text
    report.to_chrome_trace(tmp_path / "trace.json")
    names = {
        event["args"].get("name")
        for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if event["ph"] == "M"
    }
    assert {"predicted", "measured", "compute", "out to disk", "in from disk"} <= names


def test_a_page_before_there_is_a_plan(tmp_path) -> None:
    _, report = trained("1GiB", steps=1)
    report.to_html(tmp_path / "page.html")
    assert "Not planned yet" in (tmp_path / "page.html").read_text(encoding="utf-8")


# ---- PyTorch's own readers ----------------------------------------------------------------------


def test_torch_reads_the_memory_snapshot(tmp_path) -> None:
    from torch.cuda import _memory_viz  # noqa: PLC0415 - private: only this test may lean on it

    report = report_of_one()
    file = tmp_path / "memory.pickle"
    report.to_memory_snapshot(file)
    snapshot = pickle.loads(file.read_bytes())
    events = snapshot["device_traces"][0]
    text = _memory_viz.trace(snapshot)
    assert f"{len(events)} entries" in text
    assert "MEM[" not in text, "every address is in a segment"
    assert "segments: 1" in _memory_viz.segsum(snapshot)
    assert "add_local_files" in _memory_viz.trace_plot(snapshot)
    assert "add_local_files" in _memory_viz.segment_plot(snapshot)

    def as_lines(lines: str) -> str:
        """Replaces the flame graph, which a script from the network would draw."""
        return lines

    lines = _memory_viz.memory(snapshot, format_flamegraph=as_lines).splitlines()
    assert any("training.py" in line or "outcore" in line for line in lines)
    assert sum(int(line.rsplit(maxsplit=1)[1]) for line in lines) == sum(
        segment["total_size"] for segment in snapshot["segments"]
    )
    assert "stream_0" in _memory_viz.segments(snapshot, format_flamegraph=as_lines)
    segments = snapshot["segments"]
    compared = _memory_viz.compare(segments, segments, format_flamegraph=as_lines)
    assert compared.strip() == "", "the same twice"


# ---- the command --------------------------------------------------------------------------------


def test_the_command_writes_all_files(outcore, tmp_path) -> None:
    page, trace, memory = (tmp_path / n for n in ("page.html", "trace.json", "memory.pickle"))
    files = ("--html", str(page), "--chrome-trace", str(trace), "--memory-snapshot", str(memory))
    run = outcore(*REPORT, *TIGHT, *files, "--sweep", "--steps", "3", "--json")
    assert run.exit_code == 0, run.output
    figures = json.loads(run.stdout)
    assert figures["predicted_peak_bytes"] <= figures["budget_bytes"]
    assert figures["lower_bound_seconds"] <= figures["predicted_seconds"] * (1 + 1e-9)
    text = page.read_text(encoding="utf-8")
    for said in ("alexnet, batch 300", "Fits in 2.60 GiB", "What other", "<td>2.60 GiB</td>"):
        assert said in text
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    snapshot = pickle.loads(memory.read_bytes())
    assert len(snapshot["device_traces"]) == 1
    for file in (page, trace, memory):
        assert f"written: {file}" in run.stderr


def test_the_command_for_people(outcore) -> None:
    run = outcore(*REPORT, *TIGHT, "--no-bound")
    assert run.exit_code == 0, run.output
    assert "alexnet, batch 300" in run.stdout
    assert "swap-all" in run.stdout
    assert "predicted peak" in run.stdout
    assert "lower bound" not in run.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--policy", "poch"), "did you mean 'pooch'"),
        (("--budget", "much"), "--budget"),
        (("--html", "none/such/page.html"), "--html"),
        (("--chrome-trace", "none/such/t.json"), "there is no folder"),
        (("--plot", "plot.jpg"), ".png, .pdf, .svg"),
        (("--steps", "1"), "--steps"),
    ],
)
def test_mistakes_are_answered_before_anything_is_traced(
    outcore, monkeypatch, options, said
) -> None:
    monkeypatch.setattr("outcore.capture.trace_network", None)
    run = outcore(*REPORT, *options)
    assert run.exit_code == 2
    assert said in run.stderr


def test_a_budget_that_no_plan_meets(outcore) -> None:
    run = outcore(*REPORT, "--budget", "64MiB")
    assert run.exit_code == 2
    assert "smallest feasible budget" in run.stderr


@pytest.mark.parametrize(("budget", "said"), [("1GiB", "1.00 GiB"), ("50%", "not known yet")])
def test_a_page_of_nothing(tmp_path: Path, budget: str, said: str) -> None:
    found = Backend(budget=budget).report()
    found.to_html(tmp_path / "page.html")
    assert "<html" in (tmp_path / "page.html").read_text()
    assert said in str(found).splitlines()[2]
