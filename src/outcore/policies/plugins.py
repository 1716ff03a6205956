"""plugins: find policies of other packages, by the entry point group `outcore.policies`.

Entry points are read only for a name that is not built in, and for lists of all policies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING

from outcore.errors import PolicyError
from outcore.policies.policy import Policy
from outcore.policies.table import POLICIES

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "outcore.policies"
"""The entry point group that a package registers its policies in."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A policy of another package, or the error that says what is wrong with it."""

    name: str
    distribution: str
    """The package that provides it, and its version."""
    kind: type[Policy] | PolicyError
    """The policy's class, or the error if it cannot be used."""


class KnownPolicies(Mapping[str, type[Policy]]):
    """The policies by name: the built-in ones, then those of other packages."""

    def __getitem__(self, name: str) -> type[Policy]:
        """Raises KeyError for an unknown name, PolicyError for a plug-in that cannot be used."""
        return POLICIES[name] if name in POLICIES else _load(name, _entries(name))

    def __iter__(self) -> Iterator[str]:
        yield from POLICIES
        yield from sorted({entry.name for entry in _entries()} - POLICIES.keys())

    def __len__(self) -> int:
        return sum(1 for _ in self)


def plugins() -> list[Plugin]:
    """Every policy of other packages, sorted by name."""
    return [_plugin(entry) for entry in _entries()]


def _plugin(entry: EntryPoint) -> Plugin:
    """The policy of an entry point, or what is wrong with it."""
    try:
        kind = _load(entry.name, _entries(entry.name))
    except PolicyError as error:
        return Plugin(entry.name, _distribution(entry), error)
    return Plugin(entry.name, _distribution(entry), kind)


def _entries(name: str | None = None) -> list[EntryPoint]:
    """The entry points of the group, with that `name` if one is given, in a fixed order."""
    from importlib.metadata import entry_points  # noqa: PLC0415 - built-in policies need none

    found = entry_points(group=GROUP)
    wanted = found if name is None else found.select(name=name)
    return sorted(wanted, key=lambda entry: (entry.name, _distribution(entry)))


def _distribution(entry: EntryPoint) -> str:
    """The name and version of the package that provides an entry point."""
    return "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def _load(name: str, entries: list[EntryPoint]) -> type[Policy]:
    """The class of the only entry point of `name`.

    Raises KeyError if there is none, PolicyError if its name is taken or it is not a policy.
    """
    if not entries:
        raise KeyError(name)
    brought_by = " and ".join(map(_distribution, entries))
    if name in POLICIES:
        reason = f"{brought_by} also has a policy of this name; outcore uses the built-in one"
        raise PolicyError(policy=name, reason=reason)
    if len(entries) > 1:
        reason = f"{brought_by} each have a policy of this name; uninstall all but one"
        raise PolicyError(policy=name, reason=reason)
    (entry,) = entries
    try:
        kind: type[Policy] = entry.load()
    except Exception as error:
        reason = f"{entry.value} of {brought_by} cannot be imported: {_said(error)}"
        raise PolicyError(policy=name, reason=reason) from error
    wrong = _wrong(kind, name)
    if wrong:
        reason = f"{entry.value} of {brought_by} is not a policy: {wrong}"
        raise PolicyError(policy=name, reason=reason)
    return kind


def _said(error: Exception) -> str:
    """The type and the message of `error`."""
    return f"{type(error).__name__}: {error}"


def _wrong(kind: object, name: str) -> str:
    """Why `kind` is not a policy; empty if it is one."""
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return "it is not a dataclass"
    if not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]  # every dataclass has it
        return "its dataclass is not frozen"
    if any(f.default is MISSING and f.default_factory is MISSING for f in fields(kind)):
        return "one of its options has no default"
    if getattr(kind, "name", None) != name:
        return f"its `name` is {getattr(kind, 'name', None)!r}, and its entry point {name!r}"
    if not isinstance(getattr(kind, "summary", None), str):
        return "it has no `summary`"
    return "" if callable(getattr(kind, "plan", None)) else "it has no method `plan`"
