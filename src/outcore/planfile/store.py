"""store: read and write plan files and overrides: JSON with sorted keys, one line per move.

The same plans give the same bytes. A file contains the digest of its content, so that outcore can
refuse one that was edited by hand or merged wrongly. To change a plan, write overrides.
"""

from __future__ import annotations

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from outcore.errors import DigestError, FormatError
from outcore.ir.codec import Codec, CodecError, Json
from outcore.ir.store import NAME, digest_of, line, write_whole
from outcore.planfile.codec import FILE, ROWS, RULES
from outcore.planfile.nouns import PlanFile, Rule

T = TypeVar("T")
VERSION = 1
KIND = "plans"


def schema_text() -> str:
    """The JSON Schema of plan files; `$defs/overrides` in it is the schema of override files."""
    return (files("outcore.planfile") / "schema.json").read_text(encoding="ascii")


def file_text(file: PlanFile) -> str:
    """The text of `file`."""
    content = FILE.encode(file)
    assert isinstance(content, dict)  # noqa: S101 - `record` makes an object
    header: Json = {"name": NAME, "kind": KIND, "version": VERSION, "digest": digest_of(content)}
    return _spread({"format": header, **content}) + "\n"


def save_plans(file: PlanFile, path: str | os.PathLike[str]) -> None:
    """Write `file` to `path`, completely or not at all. Raises OSError if that is not possible."""
    write_whole(file_text(file), path)


def load_plans(path: str | os.PathLike[str]) -> PlanFile:
    """What `save_plans` wrote to `path`. The plans are not verified, which needs their problem.

    Raises FormatError if there is no such file, or if it holds something else or has another
    version; DigestError if it was changed since it was written.
    """
    whole = _read(path, "plan")
    header = whole.pop("format", None) if isinstance(whole, dict) else None
    if not isinstance(header, dict) or header.get("name") != NAME:
        raise FormatError(noun="plan", reason=f"{path} has no {NAME} header")
    if header.get("kind") != KIND:
        reason = f"{path} holds a {header.get('kind')}; a plan file comes from `outcore plan make`"
        raise FormatError(noun="plan", reason=f"{reason} or Backend.save_plans")
    if header.get("version") != VERSION:
        reason = f"{path} has version {header.get('version')}, this release reads {VERSION}"
        raise FormatError(noun="plan", reason=reason)
    file = _decode(FILE, whole, path, "plan")
    found = digest_of(FILE.encode(file))
    if header.get("digest") != found:
        named = str(header.get("digest", ""))
        where = os.fspath(path)
        raise DigestError(noun="plan", made_for=named, expected=found, of="content", file=where)
    return file


def load_overrides(path: str | os.PathLike[str]) -> tuple[Rule, ...]:
    """The rules of an override file: `[{"match": "decoder.*", "action": "keep"}]`.

    Raises FormatError if there is no such file, or if it holds something else.
    """
    return _decode(RULES, _read(path, "overrides"), path, "overrides")


def _read(path: str | os.PathLike[str], noun: str) -> Any:
    try:
        return json.loads(Path(path).read_bytes())
    except OSError as error:
        raise FormatError(noun=noun, reason=f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(noun=noun, reason=f"{path} is not JSON: {error}") from error


def _decode(codec: Codec[T], content: Json, path: str | os.PathLike[str], noun: str) -> T:
    try:
        return codec.decode(content)
    except CodecError as error:
        where = error.where or "the top"
        raise FormatError(noun=noun, reason=f"{path}: at {where}: {error}") from error


def _spread(content: Json, depth: int = 0, *, rows: bool = False) -> str:
    """Indented JSON with sorted keys; the items of lists named in `ROWS` take one line each."""
    if not content or not isinstance(content, dict | list):
        return line(content)
    pad = "\n" + " " * (depth + 1)
    if isinstance(content, dict):
        opening, closing = "{", "}"
        items = [
            f'"{key}": {_spread(content[key], depth + 1, rows=key in ROWS)}'
            for key in sorted(content)
        ]
    else:
        opening, closing = "[", "]"
        items = [line(item) if rows else _spread(item, depth + 1) for item in content]
    return f"{opening}{pad}{f',{pad}'.join(items)}\n{' ' * depth}{closing}"
