"""Reports: figures, levels of memory, tracks, and the files for Perfetto and the memory viewer."""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import pairwise
from pickletools import genops

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

import outcore
from outcore.errors import MissingPackageError, OptionValueError, VerifyError
from outcore.ir.hardware import Tier
from outcore.ir.memory import extent_bytes, peak
from outcore.ir.plan import KEEP_ALL
from outcore.ir.profile import Source
from outcore.ir.program import Copy, Run
from outcore.lower import lower
from outcore.policies import resolve
from outcore.report import Report, count_choices, count_held, planned, report, style, with_steps
from outcore.report.chrome import _us, chrome_events
from outcore.report.levels import Level, levels, thinned
from outcore.report.page import page
from outcore.report.page.account import Account
from outcore.report.page.figures import facts
from outcore.report.page.graphs import graph_views
from outcore.report.page.moved import explain_most
from outcore.report.page.reruns import reruns
from outcore.report.page.view import view_of
from outcore.report.snapshot import memory_snapshot, memory_snapshot_file
from outcore.report.tracks import Track, pauses, short, slices
from outcore.simulate import simulate
from tests.pure.building import dense_plan, dense_problem, small_problem
from tests.pure.reports import (
    SWAP,
    long_report,
    measured_report,
    slower,
    small_report,
    two_graphs,
)
from tests.pure.strategies import plans, problems

OUT = Tier.DEVICE, Tier.HOST
drawn = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def reports(draw):
    problem = draw(problems())
    try:
        return report(problem, draw(plans(problem)))
    except VerifyError:  # some drawn plans recompute from a buffer that is lost
        reject()


# ---- figures ------------------------------------------------------------------------------------


def test_what_is_held_for_reruns_is_counted_apart():
    problem = dense_problem()
    plan = dense_plan(problem)
    found = report(problem, plan)
    crossing = found.counts.keep + found.counts.offload + found.counts.recompute
    assert (found.counts.recompute, crossing) == (4, 4)
    assert count_held(plan) == 3
    assert "held for reruns" in str(found)
    assert "held for reruns" not in str(small_report())
    assert found.offloaded_bytes == 1024, "it leaves all the same"
    told = page(found)
    assert "keep for reruns" in told
    assert "3 times one that no op needs any more" in told


def test_figures_are_those_of_the_simulator():
    found = small_report()
    problem = small_problem(8192)
    plan = outcore.plan(problem, "swap-all{min_bytes=1B}")
    timeline = outcore.simulate(problem, outcore.lower(problem, plan))
    kept = simulate(problem, lower(problem, KEEP_ALL))
    assert (found.state, found.graphs, found.budget_bytes) == ("planned", 1, 8192)
    assert found.predicted_seconds == timeline.seconds
    assert found.predicted_peak_bytes == timeline.peak(Tier.DEVICE)
    assert (found.in_core_seconds, found.in_core_peak_bytes) == (
        kept.seconds,
        kept.peak(Tier.DEVICE),
    )
    assert found.counts == count_choices(problem.trace, plan)
    assert found.stall_seconds == timeline.stall_seconds()
    assert found.measured_seconds is None
    assert outcore.report(problem, plan, title="a small step") == found


def test_what_is_kept_is_in_core():
    found = small_report(16384, "keep-all")
    assert found.state == "in-core"
    assert found.offloaded_bytes == found.stall_seconds == 0


def test_plain_values_and_text_leave_the_steps_out():
    found = small_report()
    values = found.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert not {"steps", "sweep"} & set(values)
    assert values["title"] == "a small step"
    assert "PlannedStep" not in repr(found)
    assert "a small step" in str(found)
    assert "step" not in str(replace(found, title="")).split()


def test_several_graphs_are_summed_up():
    one, other = measured_report(), small_report(policy="recompute-all")
    both = two_graphs()
    pair = [one.steps[0], other.steps[0]]
    assert both.predicted_seconds == pytest.approx(sum(s.predicted.seconds for s in pair))
    assert both.predicted_peak_bytes == max(s.peak_bytes for s in pair)
    for name, number in asdict(both.counts).items():
        assert number == getattr(one.counts, name) + getattr(other.counts, name)


def test_copies_have_the_rates_that_the_plan_counts_on_and_those_that_were_measured():
    planned, measured = small_report().links, measured_report().links
    hardware = small_problem(8192).hardware
    assert [link.name for link in planned] == ["out to host", "in from host"]
    for link, after, ways in zip(planned, measured, (OUT, OUT[::-1]), strict=True):
        each = link.nbytes // link.copies
        assert link.busy_seconds == pytest.approx(link.copies * hardware.link(*ways).seconds(each))
        assert link.rate == pytest.approx(link.nbytes / link.busy_seconds)
        assert link.measured_rate is None
        assert after.measured_rate == pytest.approx(link.rate / 2), "each copy took twice as long"
        assert str(link).endswith("planned")
        assert str(after).endswith("measured (50%)")
    assert small_report().offloaded_bytes == planned[0].nbytes
    assert not small_report(16384, "keep-all").links
    assert "copies out to host" in str(small_report())


def test_calls_of_a_graph_count_as_often_as_a_step_has_them():
    one = measured_report()
    thrice = with_steps(one, [replace(one.steps[0], calls=3)])
    for figure in ("predicted_seconds", "in_core_seconds", "stall_seconds", "offloaded_bytes"):
        assert getattr(thrice, figure) == pytest.approx(3 * getattr(one, figure))
    assert asdict(thrice.counts) == {name: 3 * n for name, n in asdict(one.counts).items()}
    assert thrice.predicted_peak_bytes == one.predicted_peak_bytes
    assert [link.nbytes for link in thrice.links] == [3 * link.nbytes for link in one.links]
    assert [link.rate for link in thrice.links] == pytest.approx([x.rate for x in one.links])
    problem = dense_problem()
    (explained,) = explain_most(report(problem, dense_plan(problem)).steps, 1)
    once, often = reruns([Account(explained)]), reruns([Account(explained, 3.0)])
    assert [int(each.times) for each in often] == [3 * int(each.times) for each in once]
    assert [each.percent for each in often] == [each.percent for each in once]
    assert once


def test_graphs_that_take_turns_count_for_the_steps_in_which_they_run():
    """Of four steps, three run one graph, and one runs the other graph twice."""
    one = measured_report()
    (step,) = one.steps
    mixed = with_steps(one, [replace(step, share=0.75), replace(step, share=0.25, calls=2)])
    for figure in ("predicted_seconds", "in_core_seconds", "stall_seconds"):
        assert getattr(mixed, figure) == pytest.approx(1.25 * getattr(one, figure))
    assert mixed.offloaded_bytes == round(1.25 * one.offloaded_bytes)
    assert mixed.counts.keep == round(1.25 * one.counts.keep)
    assert mixed.predicted_peak_bytes == one.predicted_peak_bytes
    for link, alone in zip(mixed.links, one.links, strict=True):
        assert (link.nbytes, link.copies) == (
            round(1.25 * alone.nbytes),
            round(1.25 * alone.copies),
        )
        assert link.rate == pytest.approx(alone.rate)
        assert link.measured_rate == pytest.approx(alone.measured_rate)
    first, second = view_of(mixed).graphs
    assert first.name == "Graph 1 of 2, run in 75% of the steps"
    assert second.name == "Graph 2 of 2, run 2 times in 25% of the steps"
    taking = dict(facts(replace(mixed, graphs=2)))
    assert taking["graphs, some of which take turns"] == "2"
    moves = sum(len(part.plan.moves) for part in mixed.steps)
    assert len(view_of(mixed).moves) == moves > 1
    assert not view_of(mixed).cut, "though a step has fewer, on average"
    assert dict(facts(replace(two_graphs(), graphs=2)))["graphs in a step"] == "2"


def test_links_of_several_graphs_are_summed_up():
    one, both = measured_report(), two_graphs()
    assert [link.nbytes for link in both.links] == [link.nbytes for link in one.links]
    twice = with_steps(one, [*one.steps, *one.steps])
    assert [link.nbytes for link in twice.links] == [2 * link.nbytes for link in one.links]
    assert [link.rate for link in twice.links] == pytest.approx([link.rate for link in one.links])


def test_a_disk_behind_the_host_is_measured_by_half_and_so_not_at_all():
    problem = small_problem(8192)
    whole = problem.hardware
    alone = replace(whole, capacity_bytes=((Tier.DEVICE, 16384), (Tier.DISK, 1 << 20)))
    found = report(p := replace(problem, hardware=alone), resolve(SWAP).plan(p))
    (step,) = found.steps
    step = replace(step, measured=slower(step.predicted, 2.0))
    assert all(link.measured_rate for link in with_steps(found, [step]).links)
    behind = replace(step, problem=replace(p, hardware=whole))
    links = with_steps(found, [behind]).links
    assert [link.name for link in links] == ["out to disk", "in from disk"]
    assert all(link.measured_rate is None for link in links)


# ---- memory over time ---------------------------------------------------------------------------


@drawn
@given(reports())
def test_the_highest_level_is_the_peak(found):
    (step,) = found.steps
    device = levels(step, step.predicted, Tier.DEVICE)
    assert (
        max(level.nbytes for level in device)
        == peak(step.problem, step.program, Tier.DEVICE).nbytes
    )
    for tier in (Tier.HOST, Tier.DISK):
        outer = levels(step, step.predicted, tier)
        assert max(level.nbytes for level in outer) <= extent_bytes(step.program, tier)
        assert min(level.nbytes for level in outer) >= 0
    for tier in Tier:
        times = [level.seconds for level in levels(step, step.predicted, tier)]
        assert times == sorted(times)


def test_thinned_levels_keep_the_highest_and_the_last():
    found = [Level(i / 10, (i * 7919) % 1000) for i in range(10_000)]
    few = thinned(found, 100)
    assert len(few) <= 110
    assert max(few, key=lambda level: level.nbytes).nbytes == 999
    assert few[-1] == found[-1]
    assert all(level in found for level in few)
    assert thinned(few, 1000) is few


# ---- tracks -------------------------------------------------------------------------------------


@drawn
@given(reports())
def test_every_run_and_copy_is_on_one_track_and_none_overlap(found):
    (step,) = found.steps
    shown = slices(step, step.predicted)
    works = [i for i, x in enumerate(step.program.body) if isinstance(x.action, Run | Copy)]
    assert [each.position for each in shown] == works
    for track in Track:
        mine = sorted(
            (each for each in shown if each.track is track),
            key=lambda each: (each.start_seconds, each.position),
        )
        assert all(a.stop_seconds <= b.start_seconds for a, b in pairwise(mine))
    assert sum(p.stop_seconds - p.start_seconds for p in pauses(step.predicted)) == pytest.approx(
        found.stall_seconds
    )


def test_slices_say_what_they_are():
    (step,) = small_report().steps
    shown = slices(step, step.predicted)
    run = next(each for each in shown if each.op == 1)
    assert run.words.startswith("op 1 ")
    assert "layers.1 (net.py:11)" in run.words
    assert "1.00 ms from" in run.words
    copy = next(each for each in shown if each.track is Track.OUT)
    assert "out to host" in copy.words
    assert f"(buffer {copy.buffer})" in copy.words
    assert copy.nbytes == step.problem.trace.buffers[copy.buffer].nbytes
    assert short("aten.convolution.default") == "convolution"
    assert short("kernel") == "kernel"


# ---- Perfetto -----------------------------------------------------------------------------------


@drawn
@given(reports())
def test_a_chrome_trace_is_in_order_nests_and_pairs_its_arrows(found):
    check_chrome(json.loads(json.dumps(chrome_events(found))), found)


@pytest.mark.parametrize("make", [measured_report, two_graphs, lambda: long_report(100)])
def test_a_chrome_trace_of_several_timelines(make, tmp_path):
    found = make()
    file = tmp_path / "trace.json"
    found.to_chrome_trace(file)
    read = json.loads(file.read_text(encoding="utf-8"))
    assert read["otherData"] == {"policy": found.policy, "budget_bytes": found.budget_bytes}
    check_chrome(read["traceEvents"], found)
    names = {e["args"]["name"] for e in read["traceEvents"] if e["name"] == "process_name"}
    assert any("measured" in name for name in names)
    assert len(names) == sum(len(step.timelines) for step in found.steps)


def check_chrome(events, found):
    timed = [e for e in events if e["ph"] != "M"]
    assert [e["ts"] for e in timed] == sorted(e["ts"] for e in timed)
    boxes = defaultdict(list)
    for event in timed:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            boxes[event["pid"], event["tid"]].append(event)
    check_threads(events)
    for mine in boxes.values():
        nanoseconds = [(int(e["ts"] * 1000.0), int(e["dur"] * 1000.0)) for e in mine]
        for (start, length), (following, _) in pairwise(nanoseconds):
            assert start + length <= following, "slices of one track follow each other"
    works = sum(len(slices(s, t)) for s in found.steps for t in s.timelines)
    waits = sum(len(pauses(t)) for s in found.steps for t in s.timelines)
    assert sum(map(len, boxes.values())) == works + waits
    check_arrows(timed, found)
    check_counters(timed, found)


def test_times_are_whole_nanoseconds_to_a_reader_that_cuts_them():
    for ns in (*range(3000), 10**9 + 1, 123_456_789_013, 2**50 + 1):
        assert int(_us(ns) * 1000.0) == ns


def check_threads(events):
    """As Perfetto reads them: each `tid` is one thread."""
    owners = defaultdict(set)
    for event in events:
        assert {"ph", "pid", "tid", "name"} <= set(event)
        assert event["ph"] in "MXCstf"
        owners[event["tid"]].add(event["pid"])
        if event["ph"] == "M":
            assert set(event["args"]) in ({"name"}, {"sort_index"})
        else:
            assert event["ts"] >= 0
    assert all(len(pids) == 1 for pids in owners.values()), "a thread is in one process"
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {pid: name for (pid, tid), name in names.items() if pid == tid} == dict.fromkeys(
        {pid for pid, _ in names}, "compute"
    ), "compute is the main thread of each"
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} <= set(names)


def check_arrows(timed, found):
    arrows, last = defaultdict(list), {}
    for event in timed:
        if event["ph"] == "X":
            last[event["pid"], event["tid"]] = event
        elif event["ph"] in "stf":
            arrows[event["id"]].append(event)
            box = last[event["pid"], event["tid"]]
            assert box["ts"] == event["ts"], "an arrow's end is at the last slice of its thread"
            assert event.get("bp", "e") == "e"
            assert ("bp" in event) == (event["ph"] == "f")
            assert box["args"].keys() & {"buffer", "op"}, "that is a copy or a run, not a wait"
    for arrow in arrows.values():
        order = "".join(sorted((e["ph"] for e in arrow), key="stf".index))
        assert order in ("sf", "stf"), "one beginning, one end"
        times = {e["ph"]: e["ts"] for e in arrow}
        assert times["s"] <= times.get("t", times["f"]) <= times["f"]
        assert len({e["pid"] for e in arrow}) == 1
    backs = sum(
        isinstance(x.action, Copy) and s.program.slots[x.action.target].tier is Tier.DEVICE
        for s in found.steps
        for x in s.program.body
        for _ in s.timelines
    )
    assert len(arrows) == backs, "every copy back has an arrow"


def check_counters(timed, found):
    (process, step) = min(e["pid"] for e in timed), found.steps[0]
    device = [
        e["args"]["bytes"]
        for e in timed
        if e["ph"] == "C" and e["pid"] == process and e["name"] == "device"
    ]
    assert max(device) == step.predicted.peak(Tier.DEVICE)


# ---- the memory viewer --------------------------------------------------------------------------


@drawn
@given(reports())
def test_a_memory_snapshot_replays_to_the_predicted_peak(found):
    check_snapshot(pickle.loads(pickle.dumps(memory_snapshot(found))), found)


@pytest.mark.parametrize("make", [two_graphs, lambda: long_report(100)])
def test_a_memory_snapshot_of_a_file(make, tmp_path):
    found = make()
    file = tmp_path / "memory.pickle"
    found.to_memory_snapshot(file)
    check_snapshot(pickle.loads(file.read_bytes()), found)


def check_snapshot(snapshot, found):
    assert len(snapshot["device_traces"]) == len(found.steps)
    for device, (events, step) in enumerate(
        zip(snapshot["device_traces"], found.steps, strict=True)
    ):
        live, held, most = {}, 0, 0
        assert [e["time_us"] for e in events] == sorted(e["time_us"] for e in events)
        assert [e["action"] for e in events[:1]] in ([], ["segment_alloc"])
        for event in events[1:]:
            address, size = event["addr"], event["size"]
            if event["action"] == "alloc":
                assert address not in live
                live[address] = size
                held += size
            elif event["action"] == "free_completed":
                assert live.pop(address) == size
                held -= size
            else:
                assert event["action"] == "free_requested"
                assert live[address] == size
            most = max(most, held)
        assert most == step.predicted.peak(Tier.DEVICE)
        (segment,) = [s for s in snapshot["segments"] if s["device"] == device] or [None]
        if segment is None:
            assert most == 0
            continue
        check_segment(segment, live)
        check_fields(events, segment)
        for event in events:
            assert segment["address"] <= event["addr"]
            assert event["addr"] + event["size"] <= segment["address"] + segment["total_size"]


def check_fields(events, segment):
    """All that the viewer's MemoryViz.js and process_alloc_data.js read, with the right types."""
    for event in events:
        assert {"action", "addr", "size", "stream", "time_us", "frames"} <= set(event)
        assert all(type(event[name]) is int for name in ("addr", "size", "stream", "time_us"))
        check_frames(event["frames"])
    whole = ("device", "address", "total_size", "stream")
    assert all(type(segment[name]) is int for name in whole)
    assert segment["segment_pool_id"] == (0, 0), "the pool that is nobody's own"
    for block in segment["blocks"]:
        assert block["state"] in ("active_allocated", "inactive")
        assert 0 <= block["requested_size"] <= block["size"]
        check_frames(block["frames"])
    (first, *others) = events
    assert first["action"] == "segment_alloc"
    assert (first["addr"], first["size"]) == (segment["address"], segment["total_size"])
    assert not any(event["action"].startswith("segment") for event in others)


def check_frames(frames):
    """Frames without a name or file, or whose line is not an int, break the viewer."""
    for frame in frames:
        assert type(frame["name"]) is type(frame["filename"]) is str
        assert type(frame["line"]) is int
        assert frame["name"]
        assert frame["filename"]


OPCODES = {
    *("APPEND", "APPENDS", "BINGET", "BINFLOAT", "BININT", "BININT1", "BININT2", "BINUNICODE"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LONG1", "LONG_BINGET", "MARK"),
    *("MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO", "SETITEM", "SETITEMS", "STOP"),
    *("SHORT_BINUNICODE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}
"""The pickle opcodes that the viewer's JavaScript reader knows (pytorch, 2025)."""


def test_the_viewer_can_unpickle_a_snapshot():
    for found in (small_report(), two_graphs(), long_report(300)):
        codes = {code.name: value for code, value, _ in genops(memory_snapshot_file(found))}
        assert set(codes) <= OPCODES
        assert codes["PROTO"] in (2, 3, 4)


def check_segment(segment, live):
    end = segment["address"]
    kept = {}
    for block in segment["blocks"]:
        assert block["address"] == end, "blocks cover the segment"
        end += block["size"]
        if block["state"] == "active_allocated":
            kept[block["address"]] = block["requested_size"]
    assert end == segment["address"] + segment["total_size"]
    assert kept == live


def test_no_two_live_blocks_share_an_address():
    snapshot = memory_snapshot(long_report(60))
    live: dict[int, tuple[int, int]] = {}
    for event in snapshot["device_traces"][0]:
        if event["action"] == "alloc":
            start, stop = event["addr"], event["addr"] + event["size"]
            assert all(stop <= a or start >= b for a, b in live.values())
            live[event["addr"]] = start, stop
        elif event["action"] == "free_completed":
            del live[event["addr"]]


def test_blocks_say_where_they_come_from():
    events = memory_snapshot(small_report())["device_traces"][0]
    frames = [event["frames"][0] for event in events if event["action"] != "segment_alloc"]
    assert any(f["filename"] == "net.py" and f["line"] == 10 for f in frames)
    assert any("aten.tanh_backward.default" in f["name"] for f in frames)


# ---- pictures -----------------------------------------------------------------------------------


def plt_text():
    """A context in which drawings contain letters as text, not as curves."""
    from matplotlib import rc_context  # noqa: PLC0415 - an extra

    return rc_context({"svg.fonttype": "none"})


matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="an extra")


@matplotlib
@pytest.mark.parametrize("make", [small_report, two_graphs])
def test_a_picture_says_what_it_shows(make, tmp_path):
    file = tmp_path / "report.svg"
    make().to_plot(file)
    assert "<svg" in file.read_text(encoding="utf-8")
    make().to_plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_pictures_that_cannot_be_drawn(tmp_path, monkeypatch):
    with pytest.raises(OptionValueError, match=r"\.png, \.pdf, \.svg"):
        small_report().to_plot(tmp_path / "report.jpg")
    with pytest.raises(OptionValueError, match="there is no folder"):
        small_report().to_plot(tmp_path / "none" / "report.png")
    monkeypatch.setattr(style, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install matplotlib"):
        small_report().to_plot(tmp_path / "report.png")


@matplotlib
def test_nothing_to_draw(tmp_path):
    with pytest.raises(OptionValueError, match=r"nothing is planned yet, .* train some more"):
        Report("search", "profiling", 1 << 30).to_plot(tmp_path / "report.png")
    with pytest.raises(OptionValueError, match=r"nothing is planned$"):
        Report("search", "in-core", 1 << 30).to_plot(tmp_path / "report.png")
    assert not (tmp_path / "report.png").exists()


@matplotlib
def test_the_legend_of_a_picture_names_what_is_drawn(tmp_path):
    file = tmp_path / "report.svg"
    for policy, named in (("swap-all{min_bytes=1B}", True), ("keep-all", False)):
        with plt_text():
            small_report(16384 if policy == "keep-all" else 8192, policy).to_plot(file)
        text = file.read_text(encoding="utf-8")
        assert "forward" in text
        assert "device, KiB" in text
        assert ("copied out" in text, "waiting" in text) == (named, named)
        assert "recomputed" not in text


@matplotlib
def test_a_budget_far_above_the_peak_is_in_words(tmp_path):
    file = tmp_path / "report.svg"
    for budget in (16384, 1 << 30):
        with plt_text():
            small_report(budget).to_plot(file)
        assert "budget" in file.read_text(encoding="utf-8")
    charts = graph_views(small_report(1 << 30))[0].memory
    (chart,) = (chart for chart in charts if chart.tier == "device")
    assert not chart.lines
    assert "of a budget of 1 GiB" in chart.text


@matplotlib
def test_a_picture_may_have_any_title(tmp_path):
    for title in ("a $x^$ b $", "half a pair: \ud800"):
        replace(small_report(), title=title).to_plot(tmp_path / "report.svg")


@matplotlib
def test_a_picture_has_the_graphs_that_take_longest(tmp_path, monkeypatch):
    monkeypatch.setattr(planned, "GRAPHS", 1)
    with plt_text():
        two_graphs().to_plot(tmp_path / "report.svg")
    assert "(1 of 2 graphs)" in (tmp_path / "report.svg").read_text(encoding="utf-8")


@matplotlib
def test_a_picture_has_the_measured_peak_only_of_one_graph(tmp_path):
    file = tmp_path / "report.svg"
    for make, drawn in ((measured_report, True), (two_graphs, False)):
        found = replace(make(), measured_peak_bytes=6208)
        with plt_text():
            found.to_plot(file)
        assert ("measured peak" in file.read_text(encoding="utf-8")) is drawn


def test_the_measured_timeline_is_marked_as_such():
    (step,) = measured_report().steps
    assert [t.source for t in step.timelines] == [Source.SIMULATED, Source.MEASURED]
