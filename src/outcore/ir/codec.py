"""codec: composable, strict codecs between Python values and JSON.

`decode` raises CodecError with the path to what does not match. `encode` never fails on a value
of its type. JSON has no tuples, sets or infinities: they become lists, sorted lists and strings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeAlias, TypeVar, cast

T = TypeVar("T")
E = TypeVar("E", bound=Enum)

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

_SHOWN_CHARACTERS = 40


class CodecError(ValueError):
    """JSON is not what its codec expects. `where` is the path to it from the root."""

    def __init__(self, expected: str, found: object) -> None:
        shown = repr(found)
        if len(shown) > _SHOWN_CHARACTERS:
            shown = shown[:_SHOWN_CHARACTERS] + "..."
        super().__init__(f"expected {expected}, found {shown}")
        self.where = ""

    def inside(self, step: str) -> CodecError:
        """Prepend `step` to the path, and return this error."""
        self.where = step + self.where
        return self


@dataclass(frozen=True, slots=True)
class Codec(Generic[T]):
    """Both directions for one type."""

    encode: Callable[[T], Json]
    decode: Callable[[Json], T]


@dataclass(frozen=True, slots=True)
class Sparse(Codec[T]):
    """A codec for a field added later. Older files lack it, and keep their meaning and digest."""

    default: T


def _plain(expected: str, kind: type[T]) -> Codec[T]:
    """The codec of a type that JSON has too. A bool is not accepted as an int."""

    def decode(json: Any) -> T:
        if type(json) is not kind:
            raise CodecError(expected, json)
        return json

    return Codec(lambda value: cast("Json", value), decode)


BOOL = _plain("true or false", bool)
INT = _plain("an integer", int)
TEXT = _plain("a string", str)


def _decode_float(json: Any) -> float:
    if type(json) in (int, float) or json in ("inf", "-inf", "nan"):
        with suppress(OverflowError):  # an integer may be too large
            return float(json)
    raise CodecError("a number", json)


def encode_float(value: float) -> Json:
    """A number, or a string for what JSON lacks: inf, -inf, nan."""
    return float(value) if math.isfinite(value) else repr(float(value))


FLOAT = Codec(encode_float, _decode_float)


def optional(item: Codec[T]) -> Codec[T | None]:
    """`item` or null."""
    return Codec(
        lambda value: None if value is None else item.encode(value),
        lambda json: None if json is None else item.decode(json),
    )


def sparse(item: Codec[T], default: T) -> Sparse[T]:
    """`item`, as a field that a `record` leaves out if its value is `default`."""
    return Sparse(item.encode, item.decode, default)


def member(kind: type[E]) -> Codec[E]:
    """A member of an Enum, by its value."""
    members: dict[Json, E] = {m.value: m for m in kind}

    def decode(json: Json) -> E:
        if not isinstance(json, str) or json not in members:
            raise CodecError("one of " + ", ".join(map(str, members)), json)
        return members[json]

    return Codec(lambda value: str(value.value), decode)


def _items(json: Json, expected: str = "a list") -> list[Json]:
    if not isinstance(json, list):
        raise CodecError(expected, json)
    return json


def _inside(item: Codec[T], json: Json, step: str) -> T:
    try:
        return item.decode(json)
    except CodecError as error:
        raise error.inside(step) from None


def tuple_of(item: Codec[T]) -> Codec[tuple[T, ...]]:
    """Any number of `item`s."""
    return Codec(
        lambda values: [item.encode(value) for value in values],
        lambda json: tuple(_inside(item, j, f"[{i}]") for i, j in enumerate(_items(json))),
    )


def set_of(kind: type[E]) -> Codec[frozenset[E]]:
    """Members of an Enum, sorted by their values."""
    item = member(kind)
    items = tuple_of(item)
    return Codec(
        lambda values: [m.value for m in sorted(values, key=lambda m: str(m.value))],
        lambda json: frozenset(items.decode(json)),
    )


def fixed(*items: Codec[Any]) -> Codec[Any]:
    """A tuple with one codec per position."""

    def decode(json: Json) -> tuple[Any, ...]:
        expected = f"a list of {len(items)}"
        found = _items(json, expected)
        if len(found) != len(items):
            raise CodecError(expected, json)
        pairs = zip(items, found, strict=True)
        return tuple(_inside(item, j, f"[{i}]") for i, (item, j) in enumerate(pairs))

    return Codec(
        lambda values: [item.encode(v) for item, v in zip(items, values, strict=True)], decode
    )


def record(make: Callable[..., T], **fields: Codec[Any]) -> Codec[T]:
    """A dataclass from a JSON object with exactly these fields. A `sparse` one may be absent."""
    later = {name: field for name, field in fields.items() if isinstance(field, Sparse)}
    always = {name: field for name, field in fields.items() if name not in later}
    wanted = f"an object with {', '.join(sorted(always))}" if always else "an object"
    known = f"no fields but {', '.join(sorted(fields))}" if fields else "no fields"

    def encode(value: T) -> Json:
        json = {name: field.encode(getattr(value, name)) for name, field in always.items()}
        for name, field in later.items():
            if (given := getattr(value, name)) != field.default:
                json[name] = field.encode(given)
        return json

    def decode(json: Json) -> T:
        if not isinstance(json, dict) or not always.keys() <= json.keys():
            raise CodecError(wanted, json)
        if unknown := json.keys() - fields.keys():
            raise CodecError(known, sorted(unknown))
        found = {name: _inside(fields[name], j, f".{name}") for name, j in json.items()}
        return make(**found)

    return Codec(encode, decode)


def tagged(key: str, kinds: Mapping[str, tuple[type[Any], Codec[Any]]]) -> Codec[Any]:
    """One of several dataclasses with `record` codecs, distinguished by the word at `key`."""

    def encode(value: Any) -> Json:
        word, codec = next((w, c) for w, (kind, c) in kinds.items() if isinstance(value, kind))
        return {key: word, **cast("dict[str, Json]", codec.encode(value))}

    def decode(json: Json) -> Any:
        word = json.get(key) if isinstance(json, dict) else None
        if not isinstance(json, dict) or not isinstance(word, str) or word not in kinds:
            raise CodecError(f"an object whose {key} is one of {', '.join(kinds)}", json)
        _, codec = kinds[word]
        return codec.decode({name: j for name, j in json.items() if name != key})

    return Codec(encode, decode)
