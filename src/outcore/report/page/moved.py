"""moved: the table of what is moved, over all graphs of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest

from outcore.explain import Explanation, Move, explain
from outcore.explain.moves import weights
from outcore.explain.words import choice_words
from outcore.report.planned import PlannedStep
from outcore.units import format_bytes, format_seconds

TIMES = "\N{MIDDLE DOT}"


@dataclass(frozen=True, slots=True)
class MovedRow:
    """A row of the table. The columns are sorted by the fields that are numbers."""

    name: str
    place: str
    nbytes: int
    size: str
    choice: str
    idle: float
    idle_text: str
    between: str
    weight: float
    weight_text: str
    reasons: tuple[str, ...]


def explain_most(steps: Sequence[PlannedStep], most: int) -> list[Explanation]:
    """An Explanation for each graph, with the `most` moves that free most over all graphs."""
    found = [
        (weight, graph)
        for graph, step in enumerate(steps)
        for weight in weights(step.problem, step.plan)
    ]
    shown = Counter(graph for _, graph in nlargest(most, found))
    return [explain(step.problem, step.plan, most=shown[graph]) for graph, step in enumerate(steps)]


def moved(explained: Sequence[Explanation]) -> list[MovedRow]:
    """The rows, those that free most first."""
    found = []
    for number, each in enumerate(explained, 1):
        graph = f"graph {number}, " if len(explained) > 1 else ""
        found += [_moved(move, graph) for move in each.moves]
    return sorted(found, key=lambda row: -row.weight)


def _moved(move: Move, graph: str) -> MovedRow:
    made = "passed in" if move.op is None else f"op {move.op} {move.target}"
    return MovedRow(
        name=f"{move.name} (buffer {move.buffer})".strip(),
        place=f"{graph}{made}" + (f", {move.site}" if move.site else ""),
        nbytes=move.nbytes,
        size=format_bytes(move.nbytes),
        choice=choice_words(move.choice, dead=move.dead),
        idle=move.idle_seconds,
        idle_text=format_seconds(move.idle_seconds),
        between=f"after op {move.after} until op {move.before}",
        weight=move.weight,
        weight_text=f"{format_bytes(move.weight)}{TIMES}s",
        reasons=move.reasons,
    )
