"""The size of HTML pages: boxes, curves and moves are limited, and shared among graphs."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest

from outcore.ir.timeline import Cause
from outcore.policies import resolve
from outcore.report import report, with_steps
from outcore.report.page import page
from outcore.report.page.graphs import MARKS, POINTS
from outcore.report.page.marks import Row, rows
from outcore.report.page.moved import explain_most, moved
from outcore.report.page.view import MOVES, view_of
from outcore.report.planned import GRAPHS
from outcore.report.tracks import Kind, Slice, StallSpan, Track
from tests.pure.reports import long_problem, long_report, small_report, two_graphs
from tests.pure.test_page import MEGABYTE, check


def alternating(count: int) -> tuple[list[Slice], list[StallSpan]]:
    """Alternating ops of 2 s and reruns of 1 s, each followed by a wait; causes take turns."""
    kinds, causes = cycle((Kind.BACKWARD, Kind.RERUN)), cycle(Cause)
    found, waits, now = [], [], 0.0
    for position, kind, cause in zip(range(count), kinds, causes, strict=False):
        stop = now + (2.0 if kind is Kind.BACKWARD else 1.0)
        found.append(Slice(Track.COMPUTE, kind, position, now, stop, "mm", "", op=position))
        waits.append(StallSpan(position, cause, stop, stop + 0.5))
        now = stop + 0.5
    return found, waits


@pytest.mark.parametrize("most", [2400, 100, 2, 0])
def test_kinds_that_alternate_beyond_the_limit_are_drawn_together(most):
    found, waits = alternating(8_000)
    (row,) = rows(found, waits, waits[-1].stop_seconds, most)
    assert len(row.marks) + len(row.waits) <= max(2, most)
    assert sum(mark.spans for mark in row.marks) == len(found)
    mixed = next(mark for mark in row.marks if mark.spans > 1)
    assert mixed.look == "backward", "it looks as what takes most of its time"
    assert "recomputed" in mixed.words
    assert "backward" in mixed.words


def test_kinds_stay_apart_where_there_is_room():
    found, waits = alternating(100)
    (row,) = rows(found, waits, waits[-1].stop_seconds, 2400)
    assert [mark.spans for mark in row.marks] == [1] * 100
    assert isinstance(row, Row)


def test_a_chain_that_is_recomputed_has_a_small_page():
    problem = long_problem(800, budget_part=0.4)
    found = report(problem, resolve("chen-sqrt{min_bytes=1B}").plan(problem))
    assert len(check(found).text.encode()) < MEGABYTE


def test_a_page_of_many_graphs_is_small():
    (step,) = long_report(60).steps
    short = small_report().steps
    found = with_steps(long_report(20), [*short * 30, *[step] * 26, *short * 14])
    view = view_of(found)
    assert [graph.name for graph in view.graphs] == [
        f"Graph {number} of 70" for number in range(31, 31 + GRAPHS)
    ]
    assert view.undrawn == f"This page draws {GRAPHS} of 70 graphs: those that take longest."
    assert len(view.moves) == MOVES, "so many, however many graphs there are"
    charts = [chart for graph in view.graphs for chart in graph.memory]
    assert sum(chart.path.count("H") for chart in charts) <= POINTS
    tracks = [t.boxes for graph in view.graphs for line in graph.timelines for t in line.tracks]
    assert sum(map(len, tracks)) <= MARKS


def test_a_page_says_that_some_graphs_are_not_drawn():
    text = page(with_steps(long_report(20), small_report().steps * 30))
    assert f"This page draws {GRAPHS} of 30 graphs" in text
    assert len(text.encode()) < MEGABYTE


def test_boxes_go_to_the_graphs_that_have_spans():
    found = with_steps(long_report(20), [*long_report(500).steps, *small_report().steps])
    large, small = view_of(found).graphs
    assert small.merged == 0
    assert large.merged > 0


def test_moves_of_all_graphs_are_sorted_together():
    rare, often = small_report().steps[0], long_report(40).steps[0]
    explained = explain_most([rare, often], 30)
    assert sum(len(each.moves) for each in explained) == 30
    weights = [row.weight for row in moved(explained)]
    assert weights == sorted(weights, reverse=True)
    everything = moved(explain_most([rare, often], 10_000))
    assert weights == [row.weight for row in everything][:30], "those that free most of all"


def test_rows_say_which_graph_they_are_of():
    both = with_steps(two_graphs(), [*small_report().steps * 2])
    places = [row.place for row in view_of(both).moves]
    assert {place.partition(",")[0] for place in places} == {"graph 1", "graph 2"}
    assert not view_of(small_report()).moves[0].place.startswith("graph")
    assert view_of(small_report()).moves[0].weight_text == "4 B\N{MIDDLE DOT}s"


def test_labels_of_a_chart_are_inside_it():
    found = [small_report(), long_report(50), replace(two_graphs(), graphs=2)]
    charts = [chart for each in found for g in view_of(each).graphs for chart in g.memory]
    assert charts
    for chart in charts:
        assert all(9 <= tick.percent <= 100 for tick in chart.ticks)
        assert all(9 <= line.percent <= 100 for line in chart.lines)
