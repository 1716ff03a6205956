"""graphs: choose which graphs of a step are drawn, and how finely, so that a page stays small."""

from __future__ import annotations

from collections.abc import Sequence

from outcore.report.figures import Report
from outcore.report.page.graph import GraphView, graph_view
from outcore.report.planned import PlannedStep, longest

MARKS = 2400
"""About how many boxes are drawn over all graphs, at 200 bytes each."""
POINTS = 6000
"""About how many points the memory curves have over all graphs, at 15 bytes each."""
POINTS_EACH = 1200
"""Limit of points for one graph: a reader could not see more."""


def graph_views(report: Report) -> tuple[GraphView, ...]:
    """The drawings of the graphs, in the order of the step."""
    steps = report.steps
    drawn = longest(steps)
    marks = _fair({i: _needed(steps[i]) for i in drawn}, MARKS)
    points = min(POINTS_EACH, POINTS // max(1, len(drawn)))
    return tuple(
        graph_view(
            report,
            steps[i],
            _name(i, steps),
            marks[i],
            points,
        )
        for i in drawn
    )


def _name(index: int, steps: Sequence[PlannedStep]) -> str:
    """Which graph it is, and how often a step runs it; empty for the only graph if it runs once."""
    calls, share = steps[index].calls, steps[index].share
    which = f"Graph {index + 1} of {len(steps)}" if len(steps) > 1 else ""
    where = "a step" if share == 1 else f"{share:.0%} of the steps"
    if calls > 1:
        return f"{which or 'The graph'}, run {calls} times in {where}"
    return which if share == 1 else f"{which or 'The graph'}, run in {where}"


def _needed(step: PlannedStep) -> int:
    """Boxes needed if each stood for one slice, with every timeline counted like the fullest."""
    fullest = max(len(timeline.spans) + len(timeline.stalls) for timeline in step.timelines)
    return fullest * len(step.timelines)


def _fair(needed: dict[int, int], most: int) -> dict[int, int]:
    """Split `most` fairly: each gets what it needs, or an equal part of what the others leave."""
    given, left = {}, most
    for waiting, key in enumerate(sorted(needed, key=lambda key: needed[key])):
        given[key] = min(needed[key], left // (len(needed) - waiting))
        left -= given[key]
    return given
