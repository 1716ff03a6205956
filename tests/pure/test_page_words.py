"""The wording of a report's HTML page: headline, costs, waits and figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outcore.explain import Late, WaitsFor, explain
from outcore.report import Report, report, with_steps
from outcore.report.page import page
from outcore.report.page.account import Account, times_text
from outcore.report.page.figures import facts, figures, tiles
from outcore.report.page.view import view_of
from outcore.report.page.waits import advice, causes, totals
from outcore.report.page.words import headline, is_over, summary
from tests.pure.reports import measured_report, small_report, two_graphs
from tests.pure.test_page import Page, check

AGAIN = "recompute-all{min_bytes=1B}"


def said_below(found: Report) -> str:
    accounts = [Account(explain(s.problem, s.plan)) for s in found.steps]
    return " ".join(summary(found, accounts))


# ---- whether it fits ----------------------------------------------------------------------------


def test_a_measured_peak_above_the_budget_comes_first():
    found = replace(measured_report(), measured_peak_bytes=10240)
    assert headline(found) == "Over the budget of 8 KiB: a step was measured to hold 2.00 KiB more."
    assert "Fits" not in check(found).said
    below = said_below(found)
    assert "It held 10.0 KiB at most. The prediction was 6.12 KiB." in below
    assert "A budget that is lower" in below
    assert is_over(found)
    assert not is_over(measured_report())


def test_so_it_does_where_nothing_is_planned():
    found = Report("search", "in-core", 4096, measured_peak_bytes=5120)
    assert headline(found).startswith("Over the budget of 4 KiB")
    assert 'class="over"' in page(found)


def test_a_plan_that_needs_more_outside_than_there_is_does_not_fit():
    (step,) = small_report().steps
    problem = replace(step.problem, host_budget_bytes=1024)
    found = report(problem, step.plan)
    assert headline(found) == "Does not fit: the plan needs 3.00 KiB more than the host's 1 KiB."
    assert is_over(found)
    found = report(replace(problem, host_budget_bytes=0), step.plan)
    text = "Does not fit: the plan needs 4.00 KiB of the host, and may use none of it."
    assert headline(found) == text


def test_a_step_that_takes_no_time_has_a_page():
    (step,) = small_report(policy="recompute-all{min_bytes=1B}").steps
    profile = replace(step.problem.profile, seconds=(0.0,) * len(step.problem.trace.ops))
    found = report(replace(step.problem, profile=profile), step.plan)
    assert "Computing again takes 0 s, 0.0% of the step" in page(found)


def test_a_measured_time_is_not_compared_with_a_prediction_of_some_graphs():
    found = replace(measured_report(), graphs=3)
    below = said_below(found)
    assert "1 of the 3 graphs of a step have a plan" in below
    assert "the predicted" not in below


# ---- recomputation ------------------------------------------------------------------------------


def test_a_plan_that_only_recomputes_says_what_that_costs():
    found = small_report(8192, AGAIN)
    read = check(found)
    assert "Nothing is copied: what has no room is dropped, and computed again." in read.said
    (step,) = found.steps
    (longest, *_) = explain(step.problem, step.plan).reruns
    assert f"The longest: op {longest.op} {longest.target}, {longest.site}, " in read.said
    assert "try the policy search" in read.said
    assert "It never does: nothing is copied." in read.said
    assert "every copy" not in read.said
    assert "What is computed again" in read.said


def test_search_is_not_told_to_try_search():
    found = replace(small_report(8192, AGAIN), policy="search{seconds=1}")
    assert "Nothing is copied" in said_below(found)
    assert "try the policy" not in said_below(found)


def test_a_plan_that_only_copies_says_nothing_of_recomputing():
    read = check(small_report())
    assert "Nothing is copied" not in read.said
    assert "Computing again takes" not in read.said
    assert "What is computed again" not in read.said


# ---- waits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", list(Late))
def test_nobody_is_told_to_use_what_is_in_use(late):
    assert "search" not in advice(late, "search{seconds=1}").replace("search found", "")
    assert advice(late, "pooch")


def test_causes_are_summed_over_graphs():
    steps = small_report().steps
    one = [Account(explain(step.problem, step.plan)) for step in steps]
    longest = totals(one)[0]
    both = totals([*one, *one])
    assert both[0] == replace(longest, count=2 * longest.count, seconds=2 * longest.seconds)
    assert isinstance(both[0].waits_for, WaitsFor)
    found = with_steps(small_report(), [*steps, *steps])
    assert said_below(found).split(" the ")[0] == said_below(small_report()).split(" the ")[0]


def test_what_happens_less_than_once_a_step_is_told_as_such():
    (step,) = small_report().steps
    found = explain(step.problem, step.plan)
    (once, *_), (third, *_) = (
        list(causes([Account(found, often)], "pooch")) for often in (1.0, 1 / 3)
    )
    assert third.percent == once.percent
    assert float(third.count) == pytest.approx(float(once.count) / 3, rel=0.05)
    assert [times_text(count) for count in (0.25, 2.999999, 3.66, 12.4)] == [
        "0.25",
        "3",
        "3.7",
        "12",
    ]


# ---- figures ------------------------------------------------------------------------------------


def test_figures_stand_under_what_they_are_of():
    found = replace(measured_report(), planning_seconds=2.0, replans=1, disk_bytes_written=4096)
    rows = list(figures(found))
    names = [name for name, _, _ in rows]
    assert names.index("of that, held through the step") == names.index("peak memory") + 1
    assert not {"planning", "policy", "budget"} & set(names), "they are not predicted"
    told = dict(facts(found))
    assert told["planning took"] == "2.00 s"
    assert told["written to disk so far"] == "4.00 KiB"
    assert told["planned again"].startswith("1 of")


def test_tiles_show_what_was_measured_where_it_was():
    peak = {tile.name: tile for tile in tiles(measured_report())}["peak of a budget of 8 KiB"]
    assert (peak.value, peak.note, peak.look) == ("6.06 KiB", "measured", "")
    over = replace(measured_report(), measured_peak_bytes=10240)
    assert any(tile.look == "over" for tile in tiles(over))
    assert not list(tiles(Report("search", "profiling", 4096)))


def test_a_measured_peak_is_drawn_only_where_it_is_that_of_the_graph():
    one, two = check(measured_report()).said, replace(two_graphs(), graphs=2)
    assert "measured peak 6.06 KiB" in one
    assert "The peak as measured is" not in one
    both = replace(two, measured_peak_bytes=6208)
    assert "measured peak" not in check(both).said
    assert "The peak as measured is 6.06 KiB, over the whole step" in check(both).said


def test_a_legend_names_what_is_drawn():
    looks = dict(view_of(small_report()).legend)
    assert {"forward", "backward", "out", "in"} <= set(looks)
    assert "rerun" not in looks
    assert dict(view_of(small_report(8192, AGAIN)).legend)["rerun"] == "computed again"
    assert "computing again" not in check(small_report()).said
    assert "copied out" not in Page(page(small_report(16384, "keep-all"))).said


def test_a_peak_between_the_two_calls_is_no_ops():
    (step,) = small_report().steps
    assert ", at op " in page(report(step.problem, step.plan))
    outside = replace(step.problem, between_bytes=1 << 30, budget_bytes=1 << 40)
    words = page(report(outside, step.plan))
    assert ", between the forward call and the backward call" in words
