"""diff: find what differs between two plan files, figure by figure and move by move."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any

from outcore.planfile.codec import STORAGE
from outcore.planfile.nouns import Action, PlanFile, SavedPlan, Storage

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """One gap of a storage in both files.

    None stands for the default, which no file lists: kept, or dropped if the gap is dead.
    """

    before: Storage | None
    after: Storage | None

    @property
    def storage(self) -> Storage:
        """The storage, as in the later file if that lists it."""
        found = self.after or self.before
        assert found is not None  # noqa: S101 - one of them is there
        return found

    @property
    def actions(self) -> tuple[Action, Action]:
        """What is done with the storage in each of the two files."""
        usual = Action.RECOMPUTE if self.storage.dead else Action.KEEP
        before, after = self.before, self.after
        return before.action if before else usual, after.action if after else usual

    @property
    def acts_otherwise(self) -> bool:
        """Whether the action differs, or how it is done."""
        return bool({"action", "how"} & set(self.how))

    @property
    def how(self) -> tuple[str, ...]:
        """What differs: the action; else how (tier and hints), reason or cost; else the place."""
        if self.before is None or self.after is None or self.before.action != self.after.action:
            return ("action",)
        pairs = (
            ("how", self.before.choice, self.after.choice),
            ("reason", self.before.reason, self.after.reason),
            ("cost", self.before.seconds_more, self.after.seconds_more),
        )
        return tuple(name for name, one, other in pairs if one != other) or ("place",)


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """One graph in both files. `before` or `after` is None if a file has no such graph."""

    before: SavedPlan | None
    after: SavedPlan | None
    figures: tuple[tuple[str, Any, Any], ...] = ()
    """Figures that differ: (name, before, after)."""
    changes: tuple[Change, ...] = ()
    """Gaps that differ."""

    @property
    def differs(self) -> bool:
        """Whether there is a difference."""
        return bool(self.before is None or self.after is None or self.figures or self.changes)


@dataclass(frozen=True, slots=True)
class FileDiff:
    """Difference of two files. `figures` are of the files themselves: versions and overrides."""

    figures: tuple[tuple[str, Any, Any], ...]
    plans: tuple[PlanDiff, ...]

    @property
    def differs(self) -> bool:
        """Whether there is a difference."""
        return bool(self.figures) or any(plan.differs for plan in self.plans)

    def only_actions(self) -> FileDiff:
        """The same without figures, and without moves of which only reasons or costs differ."""
        plans = (
            replace(plan, figures=(), changes=tuple(c for c in plan.changes if c.acts_otherwise))
            for plan in self.plans
        )
        return FileDiff((), tuple(plans))

    def to_dict(self) -> dict[str, Any]:
        """Plain values; storages as in the files, None if a file does not list them."""
        return {"differs": self.differs, "files": _figures(self.figures), "plans": self._plans()}

    def _plans(self) -> list[dict[str, Any]]:
        return [
            {
                "traces": [p and p.digests.trace for p in (plan.before, plan.after)],
                "figures": _figures(plan.figures),
                "changes": [_change(change) for change in plan.changes],
            }
            for plan in self.plans
        ]


def diff_files(before: PlanFile, after: PlanFile) -> FileDiff:
    """What differs from `before` to `after`.

    Graphs of the same trace are paired in order, then the remaining graphs. If the traces are the
    same, moves are compared by gap. Otherwise they are paired by the storage's name and module and
    by what the ops around the gap call.
    """
    files = [
        _flat({"versions": asdict(f.versions), "overrides": _rules(f)}) for f in (before, after)
    ]
    plans = [diff_plans(one, other) for one, other in _pairs(before.plans, after.plans)]
    return FileDiff(_differing(*files), tuple(plans))


def diff_plans(before: SavedPlan | None, after: SavedPlan | None) -> PlanDiff:
    """What differs between two plans of one graph."""
    if before is None or after is None:
        return PlanDiff(before, after)
    same_trace = before.digests.trace == after.digests.trace
    one, other = (_keyed(plan.storages, by_gap=same_trace) for plan in (before, after))
    pairs = ((one.get(key), other.get(key)) for key in dict.fromkeys((*one, *other)))
    changes = (Change(*pair) for pair in pairs if pair[0] != pair[1])
    figures = _differing(_headline(before), _headline(after))
    return PlanDiff(before, after, figures, tuple(changes))


def _pairs(
    before: Sequence[SavedPlan], after: Sequence[SavedPlan]
) -> Iterator[tuple[SavedPlan | None, SavedPlan | None]]:
    alone: list[SavedPlan] = []
    known: defaultdict[str, deque[int]] = defaultdict(deque)
    for index, plan in enumerate(after):
        known[plan.digests.trace].append(index)
    for plan in before:
        alike = known[plan.digests.trace]
        if alike:
            yield plan, after[alike.popleft()]
        else:
            alone.append(plan)
    left = sorted(index for alike in known.values() for index in alike)
    yield from zip_longest(alone, (after[index] for index in left))


def _keyed(storages: Sequence[Storage], *, by_gap: bool) -> dict[Key, Storage]:
    if by_gap:
        return {(storage.gap,): storage for storage in storages}
    seen: Counter[Key] = Counter()
    found = {}
    for storage in storages:
        ops = storage.after.target, storage.before.target
        key = (storage.name, storage.module, *ops, storage.dead)
        found[*key, seen[key]] = storage
        seen[key] += 1
    return found


def _headline(plan: SavedPlan) -> dict[str, Any]:
    """All of a plan but its storages, by dotted name."""
    return _flat({name: value for name, value in asdict(plan).items() if name != "storages"})


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        dotted = ((f"{name}.{key}" if name else key, inner) for key, inner in value.items())
        return {k: v for key, inner in dotted for k, v in _flat(inner, key).items()}
    if isinstance(value, list | tuple):
        rows = enumerate(value)
        return {k: v for i, row in rows for k, v in _flat(row, f"{name}[{i}]").items()}
    return {name: value}


def _differing(before: dict[str, Any], after: dict[str, Any]) -> tuple[tuple[str, Any, Any], ...]:
    names = dict.fromkeys((*before, *after))
    pairs = ((name, before.get(name), after.get(name)) for name in names)
    return tuple(each for each in pairs if each[1] != each[2])


def _rules(file: PlanFile) -> list[dict[str, Any]]:
    return [{"match": rule.match, "action": rule.action.value} for rule in file.overrides]


def _figures(figures: Sequence[tuple[str, Any, Any]]) -> dict[str, list[Any]]:
    return {name: [_plain(one), _plain(other)] for name, one, other in figures}


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _change(change: Change) -> dict[str, Any]:
    return {
        "differs": list(change.how),
        "before": _storage(change.before),
        "after": _storage(change.after),
    }


def _storage(storage: Storage | None) -> Any:
    return None if storage is None else STORAGE.encode(storage)
