"""The HTML page of a report, as text: its content, its size, and that it loads nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser

import pytest
from hypothesis import HealthCheck, given, settings

from outcore.compare import Compared
from outcore.ir.timeline import Timeline
from outcore.report import Report, with_steps
from outcore.report.levels import Level
from outcore.report.page import page
from outcore.report.page.charts import area, binary_steps, number, round_steps
from outcore.report.page.graph import graph_view
from outcore.report.page.marks import rows
from outcore.report.page.words import headline, spell_budget
from outcore.report.tracks import pauses, slices
from outcore.sweep import Sweep
from outcore.units import format_seconds
from tests.pure.reports import long_report, measured_report, small_report, two_graphs
from tests.pure.test_report import reports

MEGABYTE = 1_000_000
VOID = {"meta", "link", "br", "input"}


@dataclass
class Page(HTMLParser):
    """A parsed page: open tags, links, texts, and the boxes of each timeline."""

    text: str
    open: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    spans: list[int] = field(default_factory=list)
    titles: int = 0
    rects: int = 0
    words: list[str] = field(default_factory=list)

    def __post_init__(self):
        super().__init__()
        self.feed(self.text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.links += [values[name] for name in ("href", "src") if values.get(name)]
        if values.get("data-source"):
            self.sources.append(values["data-source"])
            self.spans.append(0)
        if tag == "rect":
            self.rects += 1
            self.spans[-1] += int(values.get("data-spans", 0))
            assert 0 <= float(values["x"]) <= 1000
            assert float(values["width"]) > 0
        self.titles += tag == "title"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    @property
    def said(self):
        """All text, in one line."""
        return " ".join(" ".join(self.words).split())


def swept(budgets=(4096, 6144, 8192)) -> Sweep:
    rows = []
    for index, budget in enumerate(budgets):
        for policy, seconds in (("search", 3.0 - index), ("swap-all", None if index == 0 else 3.0)):
            row = Compared(policy=policy, budget_bytes=budget, seconds=seconds)
            rows.append(replace(row, feasible=seconds is not None, lower_bound_seconds=1.0))
    return Sweep(1.0, 8192, 3000, tuple(rows))


# ---- all pages ----------------------------------------------------------------------------------


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(reports())
def test_any_plan_has_a_page_with_every_span(found):
    check(found)


@pytest.mark.parametrize("make", [small_report, measured_report, two_graphs])
def test_pages_of_one_timeline_of_two_and_of_two_graphs(make):
    check(make())


def check(found: Report) -> Page:
    read = Page(page(found))
    assert all(link.startswith("data:") for link in read.links), "nothing is loaded"
    assert "url(" not in read.text
    assert "@import" not in read.text
    timelines = [(s, t) for s in found.steps for t in s.timelines]
    assert read.spans == [len(slices(step, timeline)) for step, timeline in timelines]
    assert read.sources == [t.source.value.replace("simulated", "predicted") for _, t in timelines]
    assert read.titles == read.rects + 1, "every box has a title, and so has the page"
    assert f"budget {spell_budget(found.budget_bytes)}" in read.said
    return read


def test_a_step_of_thousands_of_ops_is_under_a_megabyte():
    found = long_report(1000)
    read = check(found)
    assert len(read.text.encode()) < MEGABYTE
    merged = re.search(r"(\d+) of (\d+) spans are shorter than a pixel or two", read.said)
    assert int(merged[2]) == sum(read.spans)
    assert "spans, busy" in read.said
    assert "Listed are the 60 that free most" in read.said


def test_names_are_text_not_markup():
    read = check(long_report(30))
    assert 'activation 5 <&> "quoted"' in read.said
    assert "<&>" not in read.text


# ---- what it says -------------------------------------------------------------------------------


def test_the_headline_says_whether_it_fits_and_what_it_costs():
    found = measured_report()
    (step,) = found.steps
    predicted = step.predicted.seconds / step.in_core.seconds
    assert headline(found) == (
        f"Fits in 8 KiB: a step is predicted to take {predicted:.2f}x as long as with everything "
        "in memory, which would need 7.38 KiB."
    )
    said = check(found).said
    assert "Measured: a step takes 26.0 ms, 2.00x the predicted 13.0 ms." in said
    assert "Compute waits for copies 30.7% of the step. 63% of that is for one cause." in said
    assert "Measured:" not in check(small_report()).said
    assert "nothing is moved" in headline(small_report(16384, "keep-all"))
    over = replace(found, budget_bytes=4096, measured_peak_bytes=None)
    assert headline(over).startswith("Does not fit in 4 KiB: the plan needs ")
    assert "Not planned yet" in headline(Report("search", "profiling", 1 << 30))
    assert "as PyTorch runs it" in headline(Report("search", "unplanned", 1 << 30))


def test_a_page_before_there_is_a_plan():
    read = Page(page(Report("search", "profiling", 1 << 30, notes=("a graph <breaks>",))))
    assert "Not planned yet" in read.said
    assert "a graph <breaks>" in read.said
    assert read.rects == 0


def test_causes_of_waits_come_with_something_to_try():
    found = small_report()
    assert found.stall_seconds > 0
    said = check(found).said
    assert "Why compute waits" in said
    assert "what to try" in said
    assert "raise the budget" in said.lower()
    assert "Each wait by itself" in said
    assert "It never does" in check(small_report(16384, "keep-all")).said


def test_links_stand_below_the_waits_and_their_contention_after_a_recorded_step():
    planned, measured = page(small_report()), page(measured_report())
    assert "out to host" in planned.partition('id="links"')[2]
    assert "rate planned" in planned
    assert "lost to other work on the link" not in planned
    assert "(50%)" in measured.partition('id="links"')[2]
    assert 'id="links"' not in page(small_report(16384, "keep-all"))


def test_a_graph_that_a_step_runs_several_times_is_drawn_once_and_counted_as_often():
    one = small_report()
    twice = with_steps(one, [replace(one.steps[0], calls=2)])
    once, read = check(one), check(twice)
    assert "run 2 times in a step" in read.text
    assert "times in a step" not in once.text
    assert f"{format_seconds(twice.predicted_seconds or 0)} predicted:" in read.text


def test_what_is_moved_comes_with_where_it_was_made_and_why():
    said = check(small_report()).said
    assert "layers.0 (net.py:10)" in said
    assert "kept" in said
    assert "Nothing is: everything stays" in check(small_report(16384, "keep-all")).said


def test_other_budgets_with_what_no_plan_beats():
    found = replace(measured_report(), sweep=swept(), lower_bound_seconds=0.5)
    said = check(found).said
    assert "What other budgets would cost" in said
    assert "any plan at least" in said
    assert "6.00 KiB 2.000x 3.000x 1.000x" in said
    assert "4.00 KiB 3.000x - 1.000x" in said
    assert "this budget" in said
    assert "time that no plan can beat 500 ms" in said
    assert "No plan under this budget can take less than 500 ms" in said
    text = page(replace(found, sweep=swept((4096,))))
    assert not {"nan", "inf", "NaN"} & set(re.findall(r"[A-Za-z]+", text.split("<script>")[0]))
    unbounded = [replace(row, lower_bound_seconds=None) for row in swept().rows]
    read = check(replace(found, sweep=Sweep(1.0, 8192, 3000, tuple(unbounded))))
    assert "lower bound" not in read.said


def test_budgets_are_said_as_they_were_given():
    assert spell_budget(4 << 30) == "4 GiB"
    assert spell_budget(4_500_000_000) == "4.19 GiB"
    assert spell_budget(128_361_000) == "122 MiB"
    assert spell_budget(100) == "100B"


# ---- drawing ------------------------------------------------------------------------------------


def test_short_neighbors_are_drawn_together_and_counted():
    (step,) = long_report(300).steps
    timeline: Timeline = step.predicted
    found, waits = slices(step, timeline), pauses(timeline)
    all_drawn = rows(found, waits, 0.0, 10**9)
    assert sum(len(row.marks) for row in all_drawn) == len(found)
    few = rows(found, waits, timeline.seconds, 150)
    assert sum(len(row.marks) + len(row.waits) for row in few) <= 150
    for before, after in zip(all_drawn, few, strict=True):
        assert sum(mark.spans for mark in after.marks) == before.slices
        assert before.busy_seconds == after.busy_seconds
    merged = [mark for row in few for mark in row.marks if mark.spans > 1]
    assert any(" ops, forward: " in mark.words for mark in merged)
    view = graph_view(long_report(10), step, "", 150, 100)
    assert view.merged <= view.shown


def test_round_numbers_along_an_axis():
    assert round_steps(1.0, 5) == [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]
    assert round_steps(0.0, 5) == [0.0]
    assert binary_steps(5 << 30, 5) == [i << 30 for i in range(6)]
    assert binary_steps(1, 5) == [0, 1]
    assert [number(v) for v in (0.0, 1.5, 2.0, 0.004)] == ["0", "1.5", "2", "0"]


def test_an_area_steps_from_level_to_level():
    found = [Level(0.0, 50), Level(1.0, 100), Level(2.0, 0)]
    assert area(found, 0.0, 2.0, 100) == "M0 100V50H500V0H1000V100V100Z"
    assert area([], 0.0, 1.0, 1) == ""
