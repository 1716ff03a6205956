"""schema: the JSON form of every noun, one codec per type, in pipeline order.

A change that makes older files unreadable needs a new `store.VERSION`.
"""

from __future__ import annotations

import math
from typing import Any

from outcore.ir.codec import (
    BOOL,
    FLOAT,
    INT,
    TEXT,
    Codec,
    Json,
    encode_float,
    fixed,
    member,
    optional,
    record,
    set_of,
    sparse,
    tagged,
    tuple_of,
)
from outcore.ir.hardware import Hardware, Link, Tier
from outcore.ir.plan import Gap, Keep, Offload, Plan, Recompute
from outcore.ir.problem import Problem
from outcore.ir.profile import Cost, Profile, Source
from outcore.ir.program import Alloc, Copy, Free, Instruction, Program, Run, Slot, Stream
from outcore.ir.timeline import Cause, Span, Stall, Timeline
from outcore.ir.trace import (
    Arg,
    Buffer,
    Donation,
    Effect,
    Op,
    Phase,
    Ref,
    Role,
    Symbol,
    Trace,
    Value,
)

INTS = tuple_of(INT)
TIER = member(Tier)
TIER_BYTES = tuple_of(fixed(TIER, INT))

# ---- hardware ------------------------------------------------------------------------------------

LINK = record(Link, bytes_per_second=FLOAT, latency_seconds=FLOAT)
HARDWARE = record(
    Hardware,
    name=TEXT,
    capacity_bytes=TIER_BYTES,
    links=tuple_of(fixed(TIER, TIER, LINK)),
    duplex=BOOL,
    flops_per_second=tuple_of(fixed(TEXT, FLOAT)),
    memory_bytes_per_second=FLOAT,
    op_overhead_seconds=FLOAT,
    rounding_bytes=TIER_BYTES,
    fetch_padding_bytes=INT,
)

# ---- trace ---------------------------------------------------------------------------------------


def _encode_arg(arg: Arg) -> Json:
    """Constants unchanged; `{"value": 3}`, `{"kind": ..., "name": ...}`, `{"float": "inf"}`."""
    if isinstance(arg, tuple):
        return [_encode_arg(item) for item in arg]
    if isinstance(arg, Ref):
        return REF.encode(arg)
    if isinstance(arg, Symbol):
        return SYMBOL.encode(arg)
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"float": encode_float(arg)}
    return arg


def _decode_arg(json: Json) -> Arg:
    if isinstance(json, list):
        return ARGS.decode(json)
    if not isinstance(json, dict):
        return json
    if json.keys() == {"value"}:
        return REF.decode(json)
    if json.keys() == {"float"}:
        return FLOAT.decode(json["float"])
    return SYMBOL.decode(json)


REF = record(Ref, value=INT)
SYMBOL = record(Symbol, kind=TEXT, name=TEXT)
ARG = Codec(_encode_arg, _decode_arg)
ARGS = tuple_of(ARG)

BUFFER = record(Buffer, id=INT, nbytes=INT, role=member(Role), borrowed=BOOL, name=TEXT)
VALUE = record(
    Value,
    id=INT,
    buffer=INT,
    dtype=TEXT,
    shape=INTS,
    stride=INTS,
    offset=INT,
    conj=sparse(BOOL, False),
    neg=sparse(BOOL, False),
)
OP = record(
    Op,
    id=INT,
    target=TEXT,
    args=ARGS,
    outputs=tuple_of(optional(INT)),
    phase=member(Phase),
    kwargs=tuple_of(fixed(TEXT, ARG)),
    effects=set_of(Effect),
    site=TEXT,
)
TRACE = record(
    Trace,
    buffers=tuple_of(BUFFER),
    values=tuple_of(VALUE),
    ops=tuple_of(OP),
    boundary=INT,
    inputs=INTS,
    outputs=ARGS,
    tangents=INTS,
    gradients=ARGS,
    donations=tuple_of(record(Donation, op=INT, source=INT, target=INT)),
)

# ---- profile, problem ----------------------------------------------------------------------------

COSTS = tuple_of(record(Cost, seconds=FLOAT, workspace_bytes=INT))
PROFILE = record(
    Profile,
    seconds=tuple_of(FLOAT),
    workspace_bytes=INTS,
    source=member(Source),
    alternatives=sparse(tuple_of(fixed(INT, COSTS)), ()),
)
PROBLEM = record(
    Problem,
    trace=TRACE,
    profile=PROFILE,
    hardware=HARDWARE,
    budget_bytes=INT,
    host_budget_bytes=optional(INT),
    disk_budget_bytes=optional(INT),
    outside_bytes=INT,
    between_bytes=INT,
)

# ---- plan ----------------------------------------------------------------------------------------

GAP = record(Gap, buffer=INT, after=INT, before=INT, dead=sparse(BOOL, False))
CHOICE = tagged(
    "choice",
    {
        "keep": (Keep, record(Keep)),
        "offload": (
            Offload,
            record(
                Offload,
                tier=TIER,
                depart=optional(INT),
                release=optional(INT),
                prefetch=optional(INT),
                arrive=optional(INT),
            ),
        ),
        "recompute": (Recompute, record(Recompute, stay=BOOL)),
    },
)
PLAN = record(
    Plan,
    choices=tuple_of(fixed(GAP, CHOICE)),
    policy=TEXT,
    problem_digest=TEXT,
    trace_digest=TEXT,
    variants=sparse(tuple_of(fixed(INT, INT)), ()),
)

# ---- program, timeline ---------------------------------------------------------------------------

SLOT = record(Slot, id=INT, buffer=INT, tier=TIER, nbytes=INT, offset=INT)
ACTION = tagged(
    "do",
    {
        "alloc": (Alloc, record(Alloc, slot=INT)),
        "free": (Free, record(Free, slot=INT)),
        "copy": (Copy, record(Copy, source=INT, target=INT)),
        "run": (
            Run,
            record(
                Run,
                op=INT,
                reads=INTS,
                writes=INTS,
                donate=tuple_of(fixed(INT, INT)),
                again=BOOL,
                variant=sparse(INT, 0),
            ),
        ),
    },
)
INSTRUCTION = record(Instruction, action=ACTION, stream=member(Stream), after=INTS, pace=INTS)
PROGRAM = record(
    Program,
    slots=tuple_of(SLOT),
    body=tuple_of(INSTRUCTION),
    boundary=INT,
    arguments=INTS,
    tangents=INTS,
    results=INTS,
    trace_digest=TEXT,
    plan_digest=TEXT,
)
SPAN = record(Span, instruction=INT, stream=member(Stream), start_seconds=FLOAT, stop_seconds=FLOAT)
TIMELINE = record(
    Timeline,
    spans=tuple_of(SPAN),
    stalls=tuple_of(record(Stall, instruction=INT, cause=member(Cause), seconds=FLOAT)),
    peak_bytes=TIER_BYTES,
    source=member(Source),
)

NOUNS: dict[type[Any], Codec[Any]] = {
    Hardware: HARDWARE,
    Trace: TRACE,
    Profile: PROFILE,
    Problem: PROBLEM,
    Plan: PLAN,
    Program: PROGRAM,
    Timeline: TIMELINE,
}
