"""spec: choices by name and options, as text: `pooch` or `pooch{min_bytes=128KiB,early=true}`.

A spec is a name, and in braces the options that differ from their defaults. What is chosen is a
dataclass with a name, whose fields are the options. Options are typed: sizes (`..._bytes`) have a
unit, switches are `true` or `false`, and a `StrEnum` is written as its value. An option that is one
of these or None may be `none`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from enum import StrEnum
from types import NoneType
from typing import ClassVar, Generic, Protocol, TypeVar, get_args, get_type_hints

from outcore.errors import did_you_mean
from outcore.units import exact_size, parse_size

_SPEC = re.compile(r"\s*(?P<name>[^{}\s]*)\s*(\{(?P<options>[^{}]*)\})?\s*")
_SWITCH = {"true": True, "false": False}
_NONE = "none"


class Named(Protocol):
    """What can be chosen: a dataclass with a name, whose fields are its options."""

    name: ClassVar[str]
    """The name by which a spec chooses it."""


T = TypeVar("T", bound=Named)


def options(named: Named | type[Named]) -> tuple[Field[object], ...]:
    """Return the options of a choice, in order of declaration."""
    if not is_dataclass(named):
        raise TypeError(f"{named!r} cannot be chosen: only a dataclass with a name can")
    return fields(named)


def spec_text(named: Named) -> str:
    """Return the spec that `SpecParser.parse` turns back into `named`: `pooch{min_bytes=128KiB}`.

    Options that have their default value are left out.
    """
    given = ((f.name, getattr(named, f.name), f.default) for f in options(named))
    written = [
        f"{name}={value_text(name, value)}" for name, value, usual in given if value != usual
    ]
    return f"{named.name}{{{','.join(written)}}}" if written else named.name


def value_text(name: str, value: object) -> str:
    """Return the value of the option `name`, as a spec spells it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return _NONE
    if isinstance(value, int) and name.endswith("_bytes"):
        return exact_size(value)
    return repr(value) if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class SpecParser(Generic[T]):
    """Reads specs of one kind of choice."""

    noun: str
    """What is chosen, for messages."""
    example: str
    """A spec with an option, for messages."""
    known: Mapping[str, type[T]]
    """The choices by name."""
    wrong: Callable[[str, str], Exception]
    """`wrong(spec, reason)` makes the error that is raised."""

    def parse(self, spec: str) -> T:
        """Return the choice that `spec` describes.

        Raises what `wrong` makes for a text that is not a spec, for an unknown name or option (with
        the nearest known one), and for a value that an option cannot have.
        """
        match = _SPEC.fullmatch(spec)
        if match is None:
            reason = f"it is not a spec: write a name, or a name and options as in {self.example}"
            raise self.wrong(spec, reason)
        kind = self.known.get(match["name"])
        if kind is None:
            hint = did_you_mean(match["name"], self.known)
            raise self.wrong(spec, f"unknown {self.noun} {match['name']!r}: {hint}")
        return kind(**self._options(spec, kind, match["options"] or ""))

    def _options(self, spec: str, kind: type[T], text: str) -> dict[str, object]:
        """Return the options in the text between braces, by name."""
        known = {field.name for field in options(kind)}
        types = get_type_hints(kind)
        values: dict[str, object] = {}
        for item in text.split(",") if text.strip() else ():
            name, equals, value = (part.strip() for part in item.partition("="))
            if not equals or not value:
                raise self.wrong(spec, f"cannot read {item.strip()!r}: write option=value")
            if name not in known:
                hint = did_you_mean(name, known) if known else "it has none"
                raise self.wrong(spec, f"unknown option {name!r}: {hint}")
            if name in values:
                raise self.wrong(spec, f"option {name} is given twice")
            values[name] = self._value(spec, name, types[name], value)
        return values

    def _value(self, spec: str, name: str, kind: type, text: str) -> object:
        """Return one option's value, converted to its type."""
        if NoneType in get_args(kind):
            if text == _NONE:
                return None
            (kind,) = (each for each in get_args(kind) if each is not NoneType)
        try:
            if kind is bool:
                return _SWITCH[text]
            if kind is int and name.endswith("_bytes"):
                return parse_size(text, None)
            return kind(text)
        except (KeyError, ValueError) as error:
            wanted = _wanted(name, kind, error)
            raise self.wrong(spec, f"{name}={text}: {wanted}") from error


def _wanted(name: str, kind: type, error: Exception) -> str:
    """Return what an option accepts, or what the parser of sizes says about it."""
    if kind is int and name.endswith("_bytes"):
        return str(error)
    if issubclass(kind, StrEnum):
        return f"write one of {', '.join(kind)}"
    return {bool: "write true or false", int: "write a whole number", float: "write a number"}.get(
        kind, str(error)
    )
