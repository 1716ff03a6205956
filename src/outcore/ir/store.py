"""store: save nouns to versioned JSON files and load them, with digests.

Each buffer, op, gap or slot has a line. A digest identifies what a noun means, not how it is
labeled: the digest of a Trace leaves out names and sites, so plans stay valid if source lines move.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from outcore.errors import DigestError, FormatError, VerifyError
from outcore.ir.codec import CodecError, Json
from outcore.ir.nouns import N, Noun, kind_of
from outcore.ir.once import once_per_trace
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.ir.program import Program
from outcore.ir.schema import NOUNS, PROBLEM
from outcore.ir.trace import Trace

NAME = "outcore"
VERSION = 3
DIGEST_DIGITS = 16
"""Hex digits of a digest: 64 bits of SHA-256, enough to distinguish the files of one user."""


# ---- digests -------------------------------------------------------------------------------------


def digest(noun: Noun) -> str:
    """The first hex digits of the SHA-256 of what `noun` means, as canonical JSON.

    It covers, for a Trace: everything but names and sites. Problem: the trace's digest and all
    other fields. Plan: the choices that differ from the default, and the variants. Program:
    everything but the digests in it. The other nouns: everything.

    The digest of a Trace is computed once per Trace object, in time linear in its ops.
    """
    return _trace_digest(noun) if isinstance(noun, Trace) else _digest(noun)


@once_per_trace
def _trace_digest(trace: Trace) -> str:
    return _digest(trace)


def _digest(noun: Noun) -> str:
    return digest_of({kind_of(type(noun)): _meaning(noun)})


def digest_of(content: Json) -> str:
    """The first hex digits of the SHA-256 of `content` as canonical JSON."""
    return hashlib.sha256(line(content).encode("ascii")).hexdigest()[:DIGEST_DIGITS]


def _meaning(noun: Noun) -> Json:
    if isinstance(noun, Trace):
        return _unlabeled(_encode(noun))
    if isinstance(noun, Problem):
        rest = replace(noun, trace=_NO_TRACE)
        return {"trace": digest(noun.trace), "problem": PROBLEM.encode(rest)}
    if isinstance(noun, Plan):
        return _encode(Plan(noun.moves, variants=noun.variants))
    if isinstance(noun, Program):
        return _encode(replace(noun, trace_digest="", plan_digest=""))
    return _encode(noun)


_NO_TRACE = Trace((), (), (), 0, (), ())


def _unlabeled(trace: Any) -> Json:
    """The JSON of a Trace, without names and sites."""
    for items, label in ("buffers", "name"), ("ops", "site"):
        for item in trace[items]:
            item[label] = ""
    return cast("Json", trace)


def check_plan_for(plan: Plan, problem: Problem) -> None:
    """Raise DigestError unless `plan` was made for the trace of `problem`.

    Measurements, the machine and the budgets may differ: `fits` checks those.
    """
    expected = digest(problem.trace)
    if plan.trace_digest != expected:
        raise DigestError(noun="plan", made_for=plan.trace_digest, expected=expected, of="trace")


# ---- files ---------------------------------------------------------------------------------------


def save(noun: Noun, path: str | os.PathLike[str]) -> None:
    """Write `noun` to `path`, completely or not at all, by `write_whole`."""
    write_whole(_file_text(noun), path)


def write_whole(text: str, path: str | os.PathLike[str]) -> None:
    """Write ASCII `text` to a temporary file next to `path`, then rename it to `path`.

    A symbolic link is followed, and a file that is replaced keeps its permissions. If `path` is not
    a regular file (a pipe, say), the text is written into it directly. Raises OSError, which names
    `path`, if it cannot be written.
    """
    given = Path(path)
    if given.exists() and not given.is_file():
        with given.open("w", encoding="ascii") as file:
            file.write(text)
        return
    target = given.resolve()
    draft = target.with_name(f".{target.name[:50]}.{uuid4().hex}.tmp")  # names have a longest
    try:
        with draft.open("x", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, draft)
        draft.replace(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error  # not of the draft
    finally:
        draft.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], kind: type[N]) -> N:
    """The noun of type `kind` that `save` wrote to `path`, with names and sites.

    Raises FormatError if the file holds something else or has another version, and DigestError if
    it was changed after it was written. The noun is not verified.
    """
    try:
        whole = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise FormatError(noun=kind_of(kind), reason=f"{path} is not JSON: {error}") from error
    header, content = _open(whole, kind, path)
    noun = _decode(content, kind, path)
    found = digest(noun)
    if header.get("digest") != found:
        named = str(header.get("digest", ""))
        raise DigestError(noun=kind_of(kind), made_for=named, expected=found, of="content")
    return noun


def _open(whole: Any, kind: type[N], path: str | os.PathLike[str]) -> tuple[dict[str, Json], Json]:
    """The header and the content. Raises FormatError unless the header is for a `kind`."""
    header = whole.get("format") if isinstance(whole, dict) else None
    if not isinstance(header, dict) or header.get("name") != NAME:
        raise FormatError(noun=kind_of(kind), reason=f"{path} has no {NAME} header")
    if header.get("kind") != kind_of(kind):
        raise FormatError(noun=kind_of(kind), reason=f"{path} holds a {header.get('kind')}")
    if header.get("version") != VERSION:
        reason = f"{path} has version {header.get('version')}, this release reads {VERSION}"
        raise FormatError(noun=kind_of(kind), reason=reason)
    if "noun" not in whole:
        raise FormatError(noun=kind_of(kind), reason=f"{path} has a header, but no noun")
    return header, whole["noun"]


def _decode(content: Json, kind: type[N], path: str | os.PathLike[str]) -> N:
    try:
        noun: N = NOUNS[kind].decode(content)
    except CodecError as error:
        reason = f"{path}: at {kind_of(kind)}{error.where}: {error}"
        raise FormatError(noun=kind_of(kind), reason=reason) from error
    except RecursionError as error:
        reason = f"{path}: arguments are nested too deeply"
        raise FormatError(noun=kind_of(kind), reason=reason) from error
    except VerifyError as error:  # a Trace that names a Value it does not list
        raise FormatError(noun=kind_of(kind), reason=f"{path}: {error}") from error
    return noun


def _encode(noun: Noun) -> Json:
    return NOUNS[type(noun)].encode(noun)


def _file_text(noun: Noun) -> str:
    header: Json = {
        "name": NAME,
        "version": VERSION,
        "kind": kind_of(type(noun)),
        "digest": digest(noun),
    }
    return f'{{"format": {line(header)},\n"noun": {_spread(_encode(noun))}}}\n'


def _spread(content: Json) -> str:
    """A noun's JSON with sorted keys: one line per field, and one per item of a field's list."""
    if isinstance(content, dict):
        fields = (f'"{name}": {_spread(content[name])}' for name in sorted(content))
        return "{\n" + ",\n".join(fields) + "\n}"
    if isinstance(content, list) and content:
        return "[\n" + ",\n".join(f" {line(item)}" for item in content) + "\n]"
    return line(content)


def line(content: Json) -> str:
    """`content` as JSON on one line, with sorted keys."""
    return json.dumps(content, sort_keys=True, allow_nan=False)
