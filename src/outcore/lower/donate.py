"""Pass `donate`: write a result over an argument that is freed there.

This restores what functionalization removes: in-place ReLU and in-place gradient accumulation.
`Trace.donations` lists which pairs are allowed. What crosses from the forward to the backward call
is never overwritten, because a second backward call (`retain_graph`) reads it again.
"""

from __future__ import annotations

from dataclasses import replace

from outcore.ir.program import Alloc, Copy, Free
from outcore.ir.trace import Trace
from outcore.lower.draft import Draft, Step, crossing_slots


def donate(trace: Trace, draft: Draft) -> Draft:
    """Replace (alloc result, run, free argument) by a run that donates. Linear in actions."""
    allowed: dict[int, list[tuple[int, int]]] = {}
    for d in trace.donations:
        pair = (trace.values[d.source].buffer, trace.values[d.target].buffer)
        allowed.setdefault(d.op, []).append(pair)
    crossing = crossing_slots(draft)
    steps = [
        _donate(draft, step, allowed[step.run.op], crossing) if step.run.op in allowed else step
        for step in draft.steps
    ]
    return replace(draft, steps=steps)


def _donate(
    draft: Draft, step: Step, allowed: list[tuple[int, int]], crossing: frozenset[int]
) -> Step:
    copied = {a.source for a in step.after if isinstance(a, Copy)}  # read after the run
    frees = (a for a in step.after if isinstance(a, Free) and a.slot not in copied)
    dying = {draft.slots[a.slot].buffer: a for a in frees if a.slot not in crossing}
    made = {draft.slots[a.slot].buffer: a for a in step.before if isinstance(a, Alloc)}
    pairs: list[tuple[int, int]] = []
    for source, target in allowed:
        gone, new = dying.get(source), made.get(target)
        if gone is None or new is None or gone.slot not in step.run.reads:
            continue
        if draft.slots[gone.slot].nbytes == draft.slots[new.slot].nbytes:
            pairs.append((gone.slot, new.slot))
            del dying[source], made[target]
    gone_slots, born = {p[0] for p in pairs}, {p[1] for p in pairs}
    return Step(
        [a for a in step.before if not (isinstance(a, Alloc) and a.slot in born)],
        replace(step.run, donate=tuple(pairs)),
        [a for a in step.after if not (isinstance(a, Free) and a.slot in gone_slots)],
    )
