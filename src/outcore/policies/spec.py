"""Policies as text: `pooch` or `pooch{min_bytes=128KiB,early=true}`.

A spec is a name, and options in braces where they differ from their defaults. Options are typed by
the policy's fields: sizes (`..._bytes`) take a unit, switches are `true` or `false`.
"""

from __future__ import annotations

import re
from typing import get_type_hints

from outcore.errors import PolicyError, did_you_mean
from outcore.policies.policy import Policy, options, spec_text
from outcore.policies.table import POLICIES
from outcore.units import parse_size

__all__ = ["parse_policy", "resolve", "spec_text"]

_SPEC = re.compile(r"\s*(?P<name>[^{}\s]*)\s*(\{(?P<options>[^{}]*)\})?\s*")
_SWITCH = {"true": True, "false": False}


def parse_policy(spec: str) -> Policy:
    """The policy that `spec` describes.

    Raises PolicyError for a text of another form, an unknown name or option (with the nearest known
    one), and a value that an option cannot take.
    """
    match = _SPEC.fullmatch(spec)
    if match is None:
        reason = "it is no spec: write a name, or a name and options as in pooch{min_bytes=128KiB}"
        raise PolicyError(policy=spec, reason=reason)
    kind = POLICIES.get(match["name"])
    if kind is None:
        reason = f"unknown policy {match['name']!r}: {did_you_mean(match['name'], POLICIES)}"
        raise PolicyError(policy=spec, reason=reason)
    return kind(**_parse_options(spec, kind, match["options"] or ""))


def resolve(policy: str | Policy) -> Policy:
    """The policy itself, or the one that a spec describes. Raises as `parse_policy`."""
    return parse_policy(policy) if isinstance(policy, str) else policy


def _parse_options(spec: str, kind: type[Policy], text: str) -> dict[str, object]:
    known = {field.name for field in options(kind)}
    types = get_type_hints(kind)
    values: dict[str, object] = {}
    for item in text.split(",") if text.strip() else ():
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not value:
            raise PolicyError(
                policy=spec, reason=f"cannot read {item.strip()!r}: write option=value"
            )
        if name not in known:
            hint = did_you_mean(name, known) if known else "it has none"
            raise PolicyError(policy=spec, reason=f"unknown option {name!r}: {hint}")
        if name in values:
            raise PolicyError(policy=spec, reason=f"option {name} is given twice")
        values[name] = _parse_value(spec, name, types[name], value)
    return values


def _parse_value(spec: str, name: str, kind: type, text: str) -> object:
    try:
        if kind is bool:
            return _SWITCH[text]
        if kind is int and name.endswith("_bytes"):
            return parse_size(text, None)
        return kind(text)
    except (KeyError, ValueError) as error:
        wanted = _wanted(name, kind, error)
        raise PolicyError(policy=spec, reason=f"{name}={text}: {wanted}") from error


def _wanted(name: str, kind: type, error: Exception) -> str:
    """What an option takes, or what the parser of sizes says about it."""
    if kind is int and name.endswith("_bytes"):
        return str(error)
    return {bool: "write true or false", int: "write a whole number", float: "write a number"}.get(
        kind, str(error)
    )
