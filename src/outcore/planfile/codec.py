"""codec: convert plan files between data classes and JSON."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outcore.ir.codec import (
    BOOL,
    FLOAT,
    INT,
    TEXT,
    Codec,
    CodecError,
    Json,
    member,
    optional,
    record,
    sparse,
    tuple_of,
)
from outcore.ir.plan import KEEP, Choice, default_choice
from outcore.ir.profile import Source
from outcore.ir.schema import CHOICE, TIER
from outcore.planfile.nouns import (
    Action,
    Budgets,
    Digests,
    Machine,
    PlanFile,
    Predicted,
    Rule,
    SavedLink,
    SavedPlan,
    SavedVariant,
    SecondsMore,
    Storage,
    Use,
    Versions,
)

UNSAID: dict[str, dict[str, Json]] = {
    "offload": dict.fromkeys(("depart", "release", "prefetch", "arrive")),
    "recompute": {"stay": False},
    "keep": {},
}
"""Map each action to the fields of its choice that a file leaves out if they have this value."""

USE = record(Use, op=INT, target=TEXT)
SECONDS = optional(FLOAT)
_LABELS: dict[str, Codec[Any]] = {
    "buffer": INT,
    "name": TEXT,
    "nbytes": INT,
    "made": optional(USE),
    "module": TEXT,
    "source": TEXT,
    "after": USE,
    "before": USE,
    "seconds_more": record(SecondsMore, keep=SECONDS, offload=SECONDS, recompute=SECONDS),
    "reason": TEXT,
    "dead": sparse(BOOL, False),
}


def _unchosen(**fields: object) -> Storage:
    """A Storage without its choice, which the caller fills in."""
    return Storage(**fields, choice=KEEP)  # type: ignore[arg-type]  # the codecs give what it takes


_STORAGE = record(_unchosen, **_LABELS)


def _encode_storage(storage: Storage) -> Json:
    """The fields as JSON; the choice becomes `{"action": "offload", "how": {"tier": "host"}}`."""
    labels, choice = _STORAGE.encode(storage), CHOICE.encode(storage.choice)
    assert isinstance(labels, dict)  # noqa: S101 - records are objects
    assert isinstance(choice, dict)  # noqa: S101 - as above
    action = str(choice.pop("choice"))
    usual = UNSAID[action]
    how = {k: value for k, value in choice.items() if k not in usual or usual[k] != value}
    return {**labels, "action": action, "how": how}


def _decode_storage(json: Json) -> Storage:
    if not isinstance(json, dict) or not {"action", "how"} <= json.keys():
        wanted = ", ".join(sorted([*_LABELS.keys() - {"dead"}, "action", "how"]))
        raise CodecError(f"an object with {wanted}", json)
    rest = {key: value for key, value in json.items() if key not in ("action", "how")}
    choice = _decode_choice(json["action"], json["how"])
    storage = replace(_STORAGE.decode(rest), choice=choice)
    if choice == default_choice(storage.gap):
        others = "keep, offload or recompute to stay" if storage.dead else "offload or recompute"
        raise CodecError(others, json["action"]).inside(".action")
    return storage


def _decode_choice(action: Json, how: Json) -> Choice:
    if not isinstance(action, str) or action not in UNSAID:
        raise CodecError(f"one of {', '.join(UNSAID)}", action).inside(".action")
    if not isinstance(how, dict) or "choice" in how:  # it would replace the action
        raise CodecError("an object without a choice", how).inside(".how")
    try:
        choice: Choice = CHOICE.decode({"choice": action, **UNSAID[action], **how})
    except CodecError as error:
        raise error.inside(".how") from None
    return choice


STORAGE = Codec(_encode_storage, _decode_storage)
RULES = tuple_of(record(Rule, match=TEXT, action=member(Action)))
PLAN = record(
    SavedPlan,
    policy=TEXT,
    times=member(Source),
    machine=record(
        Machine,
        device=TEXT,
        name=TEXT,
        duplex=BOOL,
        links=tuple_of(
            record(
                SavedLink,
                source=TIER,
                target=TIER,
                bytes_per_second=FLOAT,
                latency_seconds=FLOAT,
            )
        ),
    ),
    digests=record(Digests, trace=TEXT, profile=TEXT, hardware=TEXT, problem=TEXT, plan=TEXT),
    budgets=record(
        Budgets,
        device=INT,
        host=optional(INT),
        disk=optional(INT),
        outside=INT,
        between=INT,
    ),
    predicted=record(
        Predicted,
        seconds=FLOAT,
        in_core_seconds=FLOAT,
        recompute_seconds=FLOAT,
        stall_seconds=FLOAT,
        device_bytes=INT,
        host_bytes=INT,
        disk_bytes=INT,
        in_core_bytes=INT,
    ),
    storages=tuple_of(STORAGE),
    variants=tuple_of(record(SavedVariant, op=INT, target=TEXT, variant=INT)),
)
FILE = record(
    PlanFile,
    versions=record(Versions, outcore=TEXT, python=TEXT, torch=TEXT),
    plans=tuple_of(PLAN),
    overrides=RULES,
)
ROWS = frozenset({"links", "overrides", "storages", "variants"})
"""Names of the lists that are written with one item per line."""
