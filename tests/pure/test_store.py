"""store: nouns in files and back, digests, and files that are refused."""

import dataclasses
import inspect
import json
import math
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.errors import DigestError, FormatError
from outcore.ir import store
from outcore.ir.hardware import Tier
from outcore.ir.nouns import Noun
from outcore.ir.once import once_per_trace
from outcore.ir.plan import KEEP, Gap, Offload, Plan, Recompute, make_plan
from outcore.ir.profile import Cost, Profile, Source
from outcore.ir.program import Alloc, Copy, Free, Instruction, Program, Run, Slot, Stream
from outcore.ir.store import VERSION, check_plan_for, digest, load, save
from outcore.ir.text import parse, to_text
from outcore.ir.timeline import Cause, Span, Stall, Timeline
from outcore.ir.trace import Arg, Ref, Symbol, Trace
from tests.pure.strategies import plans, problems, small_problem, small_trace

Golden = Callable[[str, str], None]

GAP = Gap(3, 3, 8)
PLAN = make_plan(
    {GAP: Offload(Tier.HOST, release=5, arrive=7), Gap(4, 2, 7): Recompute()},
    "p{x=1}",
    "abc",
    "def",
    {0: 1, 3: 2},
)
DEAD = make_plan({Gap(3, 8, 12, dead=True): KEEP, Gap(4, 2, 7): Recompute()})
PROGRAM = Program(
    slots=(Slot(0, 0, Tier.DEVICE, 64), Slot(1, 0, Tier.DISK, 64, offset=512)),
    body=(
        Instruction(
            Run(0, (0,), (), donate=((0, 1),), again=True, variant=1), Stream.COMPUTE, pace=(3,)
        ),
        Instruction(Alloc(1), Stream.OUT),
        Instruction(Copy(0, 1), Stream.OUT, after=(0, 1)),
        Instruction(Free(1), Stream.IN, after=(2,)),
    ),
    boundary=2,
    arguments=(0,),
    tangents=(),
    results=(0,),
    trace_digest="t",
    plan_digest="p",
)
TIMELINE = Timeline(
    (Span(0, Stream.COMPUTE, 0.1, 1 / 3),),
    (Stall(0, Cause.FETCH, math.inf),),
    ((Tier.DEVICE, 64),),
    Source.MEASURED,
)
PROFILE = dataclasses.replace(
    small_problem().profile, alternatives=((3, (Cost(5e-4, 4096), Cost(2e-4, 8192))),)
)
NOUNS: list[Noun] = [
    small_trace(),
    small_problem().profile,
    PROFILE,
    small_problem().hardware,
    small_problem(),
    PLAN,
    PROGRAM,
    TIMELINE,
]


# ---- there and back ------------------------------------------------------------------------------


@pytest.mark.parametrize("noun", NOUNS, ids=lambda noun: type(noun).__name__)
def test_every_noun_loads_as_it_was_saved(noun: Noun, tmp_path: Path) -> None:
    path = tmp_path / "noun.json"
    save(noun, path)
    assert load(path, type(noun)) == noun
    assert list(tmp_path.iterdir()) == [path]


@given(data=st.data())
def test_any_problem_and_plan_load_as_they_were_saved(
    data: st.DataObject, tmp_path_factory
) -> None:
    path = tmp_path_factory.mktemp("store") / "noun.json"
    problem = data.draw(problems())
    plan = data.draw(plans(problem))
    for noun in (problem, plan):
        save(noun, path)
        assert load(path, type(noun)) == noun


def test_odd_arguments_load_as_they_were_saved(tmp_path: Path) -> None:
    trace = small_trace()
    args = (1, 1.0, True, None, "1", -0.0, math.inf, -math.inf, (), ((Ref(0),), Symbol("a", "b")))
    (first, *others) = trace.ops
    odd = dataclasses.replace(
        trace, ops=(dataclasses.replace(first, args=args, kwargs=(("nan", math.nan),)), *others)
    )
    save(odd, tmp_path / "odd")
    loaded = load(tmp_path / "odd", Trace).ops[0]
    assert repr(loaded.args) == repr(args)
    assert repr(loaded.kwargs) == "(('nan', nan),)"


def test_file_of_a_trace(golden: Golden, tmp_path: Path) -> None:
    save(small_trace(), tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text(encoding="ascii")
    golden(text, "ir/trace_file")
    assert json.loads(text)["format"]["name"] == "outcore"


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    save(PLAN, path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(Plan(()), path)
    assert load(path, Plan) == PLAN
    assert list(tmp_path.iterdir()) == [path]


# ---- digests -------------------------------------------------------------------------------------


def test_digest_of_a_trace_leaves_out_names_and_sites() -> None:
    trace = small_trace()
    renamed = dataclasses.replace(
        trace,
        buffers=tuple(dataclasses.replace(b, name=f"{b.name}!") for b in trace.buffers),
        ops=tuple(dataclasses.replace(op, site="elsewhere") for op in trace.ops),
    )
    assert renamed != trace
    assert digest(renamed) == digest(trace)
    problem = small_problem()
    assert digest(dataclasses.replace(problem, trace=renamed)) == digest(problem)


def test_digest_of_a_plan_is_that_of_its_choices() -> None:
    relabeled = dataclasses.replace(PLAN, policy="other", problem_digest="x", trace_digest="y")
    kept = dataclasses.replace(PLAN, choices=((Gap(0, 1, 5), KEEP), *PLAN.choices))
    assert digest(relabeled) == digest(kept) == digest(PLAN)


def test_digest_of_a_program_leaves_out_the_digests_in_it() -> None:
    assert digest(dataclasses.replace(PROGRAM, trace_digest="", plan_digest="")) == digest(PROGRAM)


def test_digests_tell_types_apart() -> None:
    assert digest(Profile((), (), Source.MEASURED)) != digest(Profile((), (), Source.ESTIMATED))
    first, *others = small_trace().ops
    ops = [
        (dataclasses.replace(first, args=(*first.args, constant)), *others)
        for constant in (1, 1.0, True, "1", None)
    ]
    assert len({digest(dataclasses.replace(small_trace(), ops=o)) for o in ops}) == len(ops)


def test_a_number_of_seconds_may_be_an_int() -> None:
    whole = Profile((1, 2), (0, 0), Source.MEASURED)
    assert digest(whole) == digest(Profile((1.0, 2.0), (0, 0), Source.MEASURED))


@pytest.mark.parametrize(
    ("noun", "old", "new"),
    [
        (small_trace(), "boundary 5", "boundary 6"),
        (small_trace(), '1024 B "mixed"', '2048 B "mixed"'),
        (small_trace(), 'activation 1024 B "mixed"', 'grad 1024 B "mixed"'),
        (small_trace(), "borrowed ", ""),
        (small_trace(), "float32 (16, 16)", "int32 (16, 16)"),
        (small_trace(), "(16, 16) stride (16, 1)", "(16, 16) stride (1, 16)"),
        (small_trace(), "(16, 16) stride (16, 1)", "(15, 16) stride (16, 1) offset 16"),
        (small_trace(), "aten.tanh", "aten.sinh"),
        (small_trace(), "0.5", "0.25"),
        (small_trace(), "alpha=1", "alpha=2"),
        (small_trace(), " !random", ""),
        (small_trace(), "%11, %12", "%12, %11"),
        (small_trace(), "inputs %0, %1, %2", "inputs %0, %1"),
        (small_trace(), "outputs %7", "outputs %7, none"),
        (small_trace(), "gradients none, %15", "gradients %15"),
        (small_trace(), "donate 6: %11 -> %13", ""),
        (small_problem(), "problem budget 8192 B", "problem budget 8191 B"),
        (small_problem(), "problem budget 8192 B", "problem budget 8192 B host 0 B"),
        (small_problem(), "problem budget 8192 B", "problem budget 8192 B disk 0 B"),
        (small_problem(), "problem budget 8192 B", "problem budget 8192 B outside 1 B"),
        (small_problem(), "problem budget 8192 B", "problem budget 8192 B between 1 B"),
        (small_problem(), "op 3 0.001 s 128 B", "op 3 0.0011 s 128 B"),
        (small_problem(), "op 3 0.001 s 128 B", "op 3 0.001 s 129 B"),
        (small_problem(), "estimated", "measured"),
        (small_problem(), "duplex", "simplex"),
        (small_problem(), "aten.tanh", "aten.sinh"),
        (PLAN, "gap 4 after 2 before 7 recompute", ""),
        (PLAN, "recompute", "recompute stay"),
        (PLAN, "offload host", "offload disk"),
        (PLAN, "release 5", "release 6"),
        (PLAN, "release 5", "prefetch 5"),
        (PLAN, "release 5", "depart 5"),
        (PLAN, "arrive 7", ""),
        (PLAN, "op 3 variant 2", ""),
        (PLAN, "op 3 variant 2", "op 3 variant 1"),
        (DEAD, " dead", ""),
        (DEAD, "keep", "recompute stay"),
        (PROFILE, " or 0.0002 s 8192 B", ""),
        (PROFILE, "0.0002 s", "0.0001 s"),
        (PROFILE, "8192 B", "8191 B"),
        (PROGRAM, "boundary 2", "boundary 3"),
        (PROGRAM, "at 512", "at 0"),
        (PROGRAM, "rerun", "run"),
        (PROGRAM, " donate s0:s1", ""),
        (PROGRAM, " variant 1", ""),
        (PROGRAM, "after 0 1", "after 1"),
        (PROGRAM, "after 0 1", "after 0 pace 1"),
        (PROGRAM, "results s0", "results"),
        (TIMELINE, "span 0 compute 0.1 s", "span 0 compute 0.10000000000000002 s"),
        (TIMELINE, "fetch", "pace"),
        (TIMELINE, "measured", "simulated"),
    ],
)  # fmt: skip
def test_every_change_of_meaning_changes_the_digest(noun: Noun, old: str, new: str) -> None:
    text = to_text(noun)
    assert old in text
    assert digest(parse(text.replace(old, new), type(noun))) != digest(noun)


# ---- what is refused -----------------------------------------------------------------------------


def rewritten(path: Path, change: Callable[[Any], object]) -> Path:
    """The file at `path` with its JSON changed in place."""
    whole = json.loads(path.read_text(encoding="ascii"))
    change(whole)
    path.write_text(json.dumps(whole), encoding="ascii")
    return path


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    save(small_trace(), tmp_path / "trace.json")
    return tmp_path / "trace.json"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not JSON"),
        (b"PK\x03\x04\xff", "is not JSON"),
        (b"trace boundary 5", "is not JSON"),
        (b"[]", "has no outcore header"),
        (b'{"format": {"name": "other"}, "noun": {}}', "has no outcore header"),
        (b'{"format": {"name": "outcore", "kind": "plans"}}', "holds a plans"),
        (b'{"format": {"name": "outcore", "kind": "trace", "version": 1}}', "has version 1"),
        (b'{"format": {"name": "outcore", "kind": "trace", "version": 3}}', "but no noun"),
    ],
)
def test_a_file_that_is_none_of_ours(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=reason) as caught:
        load(path, Trace)
    assert str(path) in str(caught.value)


def test_a_file_with_a_long_name(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 250 + ".json")
    save(small_trace(), path)
    assert load(path, Trace) == small_trace()


def test_arguments_that_are_nested_too_deeply(tmp_path: Path) -> None:
    deep: Arg = 1
    for _ in range(300):
        deep = (deep,)
    trace = small_trace()
    first = dataclasses.replace(trace.ops[0], args=(*trace.ops[0].args, deep))
    save(dataclasses.replace(trace, ops=(first, *trace.ops[1:])), tmp_path / "deep.json")
    before = sys.getrecursionlimit()  # hypothesis raises it
    sys.setrecursionlimit(len(inspect.stack(0)) + 600)
    try:
        with pytest.raises(FormatError, match="arguments are nested too deeply"):
            load(tmp_path / "deep.json", Trace)
    finally:
        sys.setrecursionlimit(before)


def test_a_file_of_another_kind(trace_file: Path) -> None:
    with pytest.raises(FormatError, match=r"not a readable plan file: .* holds a trace"):
        load(trace_file, Plan)


def test_a_file_of_another_version(trace_file: Path) -> None:
    rewritten(trace_file, lambda whole: whole["format"].update(version=7))
    with pytest.raises(FormatError, match=f"has version 7, this release reads {VERSION}"):
        load(trace_file, Trace)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.json", Trace)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (["boundary"], "5", "at trace.boundary: expected an integer, found '5'"),
        (["boundary"], True, "at trace.boundary: expected an integer, found True"),
        (
            ["buffers", 3, "role"],
            "odd",
            r"at trace.buffers\[3\].role: expected one of input, param",
        ),
        (["buffers", 3, "borrowed"], 1, r"at trace.buffers\[3\].borrowed: expected true or false"),
        (
            ["buffers", 3],
            {},
            r"at trace.buffers\[3\]: expected an object with borrowed, id, name, nbytes",
        ),
        (["ops", 0, "args", 3], [{}], r"at trace.ops\[0\].args\[3\]\[0\]: expected an object"),
        (["ops", 0, "args", 0], {"value": "3"}, r"args\[0\].value: expected an integer"),
        (["ops", 0, "args", 0], {"float": "x"}, r"args\[0\]: expected a number, found 'x'"),
        (["ops", 0, "args", 0], {"float": 10**400}, r"args\[0\]: expected a number, found 1000"),
        (["ops", 0, "args", 0], {"value": 99}, "it names %99, and there are 16 values"),
        (["ops", 3, "kwargs", 0], ["alpha"], r"kwargs\[0\]: expected a list of 2"),
        (["ops"], None, "at trace.ops: expected a list, found None"),
    ],
)
def test_a_file_whose_content_does_not_fit(
    path: list[Any], value: object, reason: str, trace_file: Path
) -> None:
    def change(whole: Any) -> None:
        *steps, last = ["noun", *path]
        for step in steps:
            whole = whole[step]
        whole[last] = value

    with pytest.raises(FormatError, match=reason):
        load(rewritten(trace_file, change), Trace)


def test_what_is_as_by_default_is_not_written_where_older_files_lack_it(tmp_path: Path) -> None:
    """So older files load, and digests stay the same."""
    for noun in (small_problem().profile, dataclasses.replace(PLAN, variants=())):
        save(noun, tmp_path / "file")
        text = (tmp_path / "file").read_text(encoding="ascii")
        assert "alternatives" not in text
        assert "variant" not in text
        assert "dead" not in text
    assert digest(small_problem().profile) == "5d53c7c82b49f9f7"
    assert digest(dataclasses.replace(PLAN, variants=())) == "ec083009610c67e9"


def test_what_came_later_is_still_held_to_its_type(tmp_path: Path) -> None:
    save(PLAN, tmp_path / "plan")
    rewritten(tmp_path / "plan", lambda whole: whole["noun"].update(variants=[[0]]))
    with pytest.raises(FormatError, match=r"at plan.variants\[0\]: expected a list of 2"):
        load(tmp_path / "plan", Plan)
    rewritten(tmp_path / "plan", lambda whole: whole["noun"].update(variant=[]))
    with pytest.raises(FormatError, match=r"at plan: expected no fields but .*found \['variant'\]"):
        load(tmp_path / "plan", Plan)


def test_a_dead_gap_is_read_as_it_was_written(tmp_path: Path) -> None:
    save(DEAD, tmp_path / "plan")
    assert load(tmp_path / "plan", Plan) == DEAD
    whole = json.loads((tmp_path / "plan").read_text(encoding="ascii"))
    assert [gap.get("dead") for gap, _ in whole["noun"]["choices"]] == [True, None]
    rewritten(tmp_path / "plan", lambda w: w["noun"]["choices"][0][0].update(dead=1))
    with pytest.raises(FormatError, match=r"choices\[0\]\[0\].dead: expected true or false"):
        load(tmp_path / "plan", Plan)


def test_a_plan_file_with_an_unknown_choice(tmp_path: Path) -> None:
    save(PLAN, tmp_path / "plan")
    rewritten(tmp_path / "plan", lambda w: w["noun"]["choices"][0][1].update(choice="swap"))
    reason = r"at plan.choices\[0\]\[1\]: expected an object whose choice is one of keep, offload"
    with pytest.raises(FormatError, match=reason):
        load(tmp_path / "plan", Plan)


def test_changed_content_is_noticed_but_changed_names_are_not(trace_file: Path) -> None:
    rewritten(trace_file, lambda whole: whole["noun"]["buffers"][3].update(name="renamed"))
    assert load(trace_file, Trace).buffers[3].name == "renamed"
    rewritten(trace_file, lambda whole: whole["noun"]["buffers"][3].update(nbytes=2048))
    with pytest.raises(DigestError) as caught:
        load(trace_file, Trace)
    assert caught.value.made_for == digest(small_trace())
    assert (caught.value.noun, caught.value.of) == ("trace", "content")
    assert "this trace file was changed after it was saved" in str(caught.value)


def test_a_plan_is_refused_for_another_trace() -> None:
    problem = small_problem()
    plan = dataclasses.replace(PLAN, trace_digest=digest(problem.trace))
    check_plan_for(plan, problem)
    longer = parse(to_text(problem.trace).replace("0.5", "0.25"), Trace)
    with pytest.raises(DigestError, match="this plan was made for trace"):
        check_plan_for(plan, dataclasses.replace(problem, trace=longer))
    with pytest.raises(DigestError, match=r"made for trace \(none given\)"):
        check_plan_for(Plan(()), problem)


def test_a_plan_may_meet_other_measurements_and_budgets() -> None:
    problem = small_problem()
    plan = dataclasses.replace(PLAN, problem_digest="1", trace_digest=digest(problem.trace))
    slower = Profile((2e-3,) * 9, (0,) * 9, Source.MEASURED)
    for other in (small_problem(9000), dataclasses.replace(problem, profile=slower)):
        check_plan_for(plan, other)


def test_the_digest_of_a_trace_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies lower hundreds of plans for one trace."""
    trace = small_trace()
    worked_out = []

    def count(noun: Noun) -> str:
        worked_out.append(type(noun))
        return "d"

    monkeypatch.setattr(store, "_digest", count)
    assert [digest(trace), digest(trace), digest(small_trace())] == ["d"] * 3
    assert worked_out == [Trace, Trace]


def test_what_is_known_of_a_trace_goes_with_it() -> None:
    class Found:
        """An object that a weak reference can point to."""

    trace = small_trace()
    known = once_per_trace(lambda _: Found())
    found = ref(known(trace))
    assert known(trace) is found()
    assert known(small_trace()) is not found()
    del trace
    assert found() is None


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link, file = tmp_path / "link.json", tmp_path / "real" / "plan.json"
    link.symlink_to(file)
    save(PLAN, link)
    assert link.is_symlink()
    assert load(file, Plan) == PLAN
    assert list((tmp_path / "real").iterdir()) == [file]


def test_what_is_no_file_is_written_into(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    save(PLAN, pipe)
    assert pipe.is_fifo()
    assert json.loads(os.read(reader, 1 << 16))["format"]["kind"] == "plan"
    os.close(reader)


def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    save(PLAN, file)
    file.chmod(0o600)
    save(PLAN, file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_an_error_names_the_file_and_not_its_draft(tmp_path: Path) -> None:
    file = tmp_path / "none" / "plan.json"
    with pytest.raises(FileNotFoundError) as caught:
        save(PLAN, file)
    assert caught.value.filename == str(file)
    assert str(file) in str(caught.value)
