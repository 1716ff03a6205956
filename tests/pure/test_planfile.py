"""Plan files: they load as saved, edited ones are refused, and override rules hold for any plan."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from outcore.errors import (
    DigestError,
    FormatError,
    InfeasibleError,
    OptionValueError,
    VerifyError,
)
from outcore.explain import explain
from outcore.ir.hardware import Tier, staging_bytes
from outcore.ir.liveness import gaps
from outcore.ir.memory import fits, tier_bytes
from outcore.ir.plan import KEEP, Gap, Keep, Offload, Plan, Recompute, make_plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Cost
from outcore.ir.program import Run
from outcore.ir.store import digest, save
from outcore.ir.trace import Effect
from outcore.lower import lower
from outcore.planfile import (
    Action,
    Overridden,
    PlanFile,
    Rule,
    Versions,
    check_plan,
    check_rules,
    diff_files,
    file_text,
    find,
    forced,
    load_overrides,
    load_plans,
    make_file,
    save_plans,
    saved_plan,
    schema_text,
)
from outcore.planfile.places import labels, place
from outcore.policies import resolve
from outcore.policies.candidates import candidates
from outcore.policies.search.fixed import with_fixed
from outcore.simulate import simulate
from tests.pure.building import dense_plan, dense_problem
from tests.pure.strategies import plans, problems, small_hardware, small_problem

drawn = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])

VERSIONS = Versions("0.1.0", "3.11.2", "2.13.0")
CONV, DROPPED, CURVED, MIXED = 3, 4, 5, 6
"""Buffers of `small_problem` that the backward pass reads, made by ops 0, 1, 2 and 3."""
CONV_GAP = Gap(CONV, 3, 8)
"""The gap of `conv` across the boundary; `conv` also has one within the forward pass."""
HOST = Offload(Tier.HOST)
SCHEMA = json.loads(schema_text())


def small_plan(spec: str = "swap-all{min_bytes=1B}", budget: int = 6144) -> tuple[Problem, Plan]:
    problem = small_problem(budget)
    return problem, resolve(spec).plan(problem)


def small_file(spec: str = "swap-all{min_bytes=1B}", rules: tuple[Rule, ...] = ()) -> PlanFile:
    problem, plan = small_plan(spec)
    return make_file([saved_plan(problem, plan)], VERSIONS, rules)


def keep(match: str) -> Rule:
    return Rule(match, Action.KEEP)


def offload(match: str) -> Rule:
    return Rule(match, Action.OFFLOAD)


def recompute(match: str) -> Rule:
    return Rule(match, Action.RECOMPUTE)


class TestFiles:
    def test_a_small_one(self, golden):
        rules = (keep("layers.9"), recompute("curved"))
        golden(file_text(small_file(rules=rules)), "planfile/small")

    @drawn
    @given(problem=problems(), data=st.data())
    def test_what_is_written_is_read(self, problem, data, tmp_path_factory):
        plan = data.draw(plans(problem))
        try:
            saved = saved_plan(problem, plan, device="toy", most=1)
        except VerifyError:
            assume(False)
        file = make_file([saved, saved], VERSIONS, [keep("*")])
        path = tmp_path_factory.mktemp("plans") / "plan.json"
        save_plans(file, path)
        assert load_plans(path) == file
        again = load_plans(path).plans[0].plan()
        digests = digest(problem), digest(problem.trace)
        assert again == replace(plan, problem_digest=digests[0], trace_digest=digests[1])
        jsonschema.validate(json.loads(path.read_text(encoding="ascii")), SCHEMA)

    def test_the_same_plan_makes_the_same_bytes(self):
        assert file_text(small_file()) == file_text(small_file())
        searched = "search{min_bytes=1B,effort=0.01}"
        assert file_text(small_file(searched)) == file_text(small_file(searched))

    def test_keys_are_sorted_and_a_storage_is_a_line(self):
        text = file_text(small_file())
        ordered = json.loads(text, object_pairs_hook=list)
        assert [key for key, _ in ordered] == ["format", "overrides", "plans", "versions"]
        rows = [json.loads(row.strip().rstrip(",")) for row in text.splitlines() if '"made"' in row]
        assert rows == json.loads(text)["plans"][0]["storages"]
        assert all(list(row) == sorted(row) for row in rows)
        assert {row["name"] for row in rows} == {"conv", "dropped", "curved", "mixed"}

    def test_each_storage_says_where_it_is_from_and_why_it_moves(self):
        problem, plan = small_plan()
        moves = {(m.buffer, m.after): m for m in explain(problem, plan).moves}
        for storage in saved_plan(problem, plan).storages:
            move = moves[storage.buffer, storage.after.op]
            assert f"{storage.module} ({storage.source})" == move.site
            assert (storage.made.op, storage.made.target) == (move.op, move.target)
            assert storage.before.target == problem.trace.ops[move.before].target
            assert storage.reason == move.reason
            assert storage.seconds_more.offload == 0
            kept = next(a for a in move.alternatives if a.choice == "keep")
            (own,) = (a.seconds for a in move.alternatives if a.chosen)
            more = (kept.seconds or 0.0) - (own or 0.0)
            expected = pytest.approx(more, abs=1e-9) if kept.fits else None
            assert storage.seconds_more.keep == expected

    def test_the_headline_is_what_the_plan_takes(self):
        problem, plan = small_plan()
        saved, program = saved_plan(problem, plan), lower(problem, plan)
        timeline = simulate(problem, program)
        assert saved.predicted.seconds == timeline.seconds
        assert saved.predicted.stall_seconds == pytest.approx(timeline.stall_seconds())
        assert saved.predicted.device_bytes == timeline.peak(Tier.DEVICE)
        assert saved.predicted.host_bytes == timeline.peak(Tier.HOST)
        kept = lower(problem, make_plan({}))
        assert saved.predicted.in_core_bytes == tier_bytes(problem, kept, Tier.DEVICE)
        assert saved.predicted.in_core_seconds == simulate(problem, kept).seconds
        assert saved.machine.device == saved.machine.name == "small"
        assert saved.machine.links[0].bytes_per_second == 1e6

    def test_variants_are_kept(self):
        problem = small_problem()
        costs = ((0, (Cost(5e-4, 256),)), (4, (Cost(5e-4, 256), Cost(1e-4, 512))))
        problem = replace(problem, profile=replace(problem.profile, alternatives=costs))
        plan = make_plan({CONV_GAP: HOST}, variants={4: 2})
        saved = saved_plan(problem, plan)
        (variant,) = saved.variants
        assert (variant.op, variant.target, variant.variant) == (4, "aten.mm.default", 2)
        assert saved.plan().by_op == {4: 2}

    def test_reasons_for_some_only(self):
        problem, plan = small_plan()
        saved = saved_plan(problem, plan, most=1)
        told = [storage for storage in saved.storages if storage.reason]
        assert len(told) == 1
        assert all(s.seconds_more.offload is None for s in saved.storages if s is not told[0])


class TestWhatIsHeldForReruns:
    """Outputs of dense layers that are held to recompute the concatenations."""

    @pytest.fixture
    def saved(self):
        problem = dense_problem()
        return saved_plan(problem, dense_plan(problem))

    def test_it_is_saved_loaded_and_lowered_to_the_same_program(self, saved, tmp_path):
        problem = dense_problem()
        save_plans(make_file([saved], VERSIONS), tmp_path / "plan.json")
        (again,) = load_plans(tmp_path / "plan.json").plans
        assert again == saved
        assert again.plan().choices == dense_plan(problem).choices
        assert check_plan(again, problem).moves
        program = lower(problem, replace(again.plan(), problem_digest="", trace_digest=""))
        assert program == lower(problem, dense_plan(problem))
        runs = Counter(x.action.op for x in program.body if isinstance(x.action, Run))
        assert max(runs[op] for op in (0, 2)) == 1, "y0 and y1 are made but once"

    def test_a_line_says_that_it_is_dead(self, saved, tmp_path):
        save_plans(make_file([saved], VERSIONS), tmp_path / "plan.json")
        whole = json.loads((tmp_path / "plan.json").read_text(encoding="ascii"))
        jsonschema.validate(whole, SCHEMA)
        rows = whole["plans"][0]["storages"]
        held = {row["name"]: (row["action"], row["how"]) for row in rows if "dead" in row}
        assert held == {
            "y0": ("keep", {}),
            "y1": ("offload", {"tier": "host"}),
            "y2": ("recompute", {"stay": True}),
        }
        reason = next(row["reason"] for row in rows if row["name"] == "y0")
        assert "if dropped, the step takes 40.0 ms longer" in reason

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"action": "recompute", "how": {}}, "expected keep, offload or recompute to stay"),
            ({"action": "keep", "dead": False}, "expected offload or recompute, found 'keep'"),
            ({"dead": 1}, "expected true or false"),
        ],
    )
    def test_what_is_as_by_default_is_no_line(self, saved, tmp_path, change, said):
        save_plans(make_file([saved], VERSIONS), tmp_path / "plan.json")
        whole = json.loads((tmp_path / "plan.json").read_text(encoding="ascii"))
        row = next(row for row in whole["plans"][0]["storages"] if row["name"] == "y0")
        row.update(change)
        (tmp_path / "plan.json").write_text(json.dumps(whole))
        with pytest.raises(FormatError, match=said):
            load_plans(tmp_path / "plan.json")
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(whole, SCHEMA)

    def test_what_differs(self, saved):
        problem = dense_problem()
        dropped = make_plan({g: c for g, c in dense_plan(problem).choices if not g.dead})
        files = [make_file([s], VERSIONS) for s in (saved_plan(problem, dropped), saved)]
        (found,) = diff_files(*files).plans
        actions = {c.storage.name: c.actions for c in found.changes if c.acts_otherwise}
        assert actions == {
            "y0": (Action.RECOMPUTE, Action.KEEP),
            "y1": (Action.RECOMPUTE, Action.OFFLOAD),
            "y2": (Action.RECOMPUTE, Action.RECOMPUTE),
        }

    def test_rules_are_for_what_is_still_needed(self):
        problem = dense_problem()
        fixed = forced(problem, [keep("*"), recompute("cat*")])
        assert not any(gap.dead for gap in fixed)
        assert with_fixed(dense_plan(problem), fixed) == dense_plan(problem).by_gap


class TestFilesThatWillNotDo:
    @pytest.fixture
    def path(self, tmp_path):
        save_plans(small_file(), tmp_path / "plan.json")
        return tmp_path / "plan.json"

    def edit(self, path: Path, old: str, new: str) -> None:
        text = path.read_text(encoding="ascii")
        assert old in text
        path.write_text(text.replace(old, new), encoding="ascii")

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ('"after": {"op": 3', '"after": {"op": 4'),
            ('"device": 6144', '"device": 9999'),
            ('"reason": "if kept', '"reason": "IF KEPT'),
            ('"python": "3.11.2"', '"python": "3.12"'),
        ],
    )
    def test_an_edited_one(self, path, old, new):
        self.edit(path, old, new)
        with pytest.raises(DigestError, match="changed after it was saved"):
            load_plans(path)

    @pytest.mark.parametrize(
        ("old", "new", "said"),
        [
            ('"version": 1', '"version": 7', "has version 7, this release reads 1"),
            ('"name": "outcore",', '"name": "inner",', "has no outcore header"),
            ('"action": "offload"', '"action": "swap"', r"\.plans\[0\]\.storages\[0\]\.action"),
            ('"tier": "host"}', '"tier": "moon"}', r"storages\[0\]\.how"),
            (
                '"how": {"prefetch": 8, "release": 5, "tier": "host"}',
                '"how": 3',
                r"storages\[0\]\.how: expected an object",
            ),
            ('"buffer": 3', '"buffer": "3"', r"storages\[0\]\.buffer: expected an integer"),
            ('"name": "conv", ', "", "expected an object with after, before, buffer"),
            ('"action": "offload", ', "", "expected an object with action, after"),
            (
                '"how": {"pre',
                '"how": {"size": 1, "pre',
                r"how: expected no fields but .*found \['size'\]",
            ),
            (
                '"action": "offload", "after": {"op": 3',
                '"action": "keep", "after": {"op": 3',
                r"storages\[0\]",
            ),
            (
                '"how": {"pre',
                '"how": {"choice": "keep", "pre',
                r"storages\[0\]\.how: expected an object without a choice",
            ),
            ("{", "", "is not JSON"),
        ],
    )
    def test_a_broken_one(self, path, old, new, said):
        self.edit(path, old, new)
        with pytest.raises(FormatError, match=said):
            load_plans(path)

    def test_none_at_all(self, tmp_path):
        with pytest.raises(FormatError, match=r"none\.json: No such file"):
            load_plans(tmp_path / "none.json")
        (tmp_path / "list.json").write_text("[]")
        with pytest.raises(FormatError, match="has no outcore header"):
            load_plans(tmp_path / "list.json")

    def test_the_file_of_a_plan_alone(self, tmp_path):
        save(make_plan({}), tmp_path / "plan.json")
        with pytest.raises(FormatError, match="holds a plan; a plan file comes from"):
            load_plans(tmp_path / "plan.json")

    def test_the_schema_refuses_what_the_reader_refuses(self, path):
        jsonschema.Draft202012Validator.check_schema(SCHEMA)
        whole = json.loads(path.read_text(encoding="ascii"))
        jsonschema.validate(whole, SCHEMA)
        storage = whole["plans"][0]["storages"][0]
        for key, value in (("action", "swap"), ("how", {}), ("buffer", "3"), ("more", 1)):
            wrong = json.loads(json.dumps(whole))
            wrong["plans"][0]["storages"][0] = {**storage, key: value}
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(wrong, SCHEMA)


class TestOverrideFiles:
    def test_rules_are_read(self, tmp_path):
        path = tmp_path / "overrides.json"
        path.write_text('[{"match": "decoder.*", "action": "keep"}]')
        assert load_overrides(path) == (keep("decoder.*"),)
        part = {"$defs": SCHEMA["$defs"], "$ref": "#/$defs/overrides"}
        jsonschema.validate(json.loads(path.read_text()), part)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ('[{"match": "x", "action": "swap"}]', "one of keep, offload, recompute"),
            ('[{"match": "x"}]', "an object with action, match"),
            (
                '[{"match": "x", "action": "keep", "why": ""}]',
                r"at \[0\]: expected no fields but action, match, found \['why'\]",
            ),
            ('{"match": "x", "action": "keep"}', "expected a list"),
            ("match: x", "is not JSON"),
        ],
    )
    def test_others_are_refused(self, tmp_path, text, said):
        path = tmp_path / "overrides.json"
        path.write_text(text)
        with pytest.raises(FormatError, match=said):
            load_overrides(path)


class TestPlaces:
    @pytest.mark.parametrize(
        ("site", "found"),
        [
            ("layers.3.conv2 (model.py:41)", ("layers.3.conv2", "model.py:41")),
            ("(loss.py:3)", ("", "loss.py:3")),
            ("layers.3", ("layers.3", "")),
            ("", ("", "")),
        ],
    )
    def test_module_and_source(self, site, found):
        assert place(site) == found

    def test_what_a_rule_may_match(self):
        words = labels(small_problem().trace)
        assert words[0] == ("x",)
        assert set(words[CONV]) == {"conv", "layers.0", "net.py:10", "layers.0 (net.py:10)"}


class TestRules:
    @pytest.mark.parametrize("match", ["conv", "c?nv", "layers.0", "net.py:10", "layers.0 *"])
    def test_what_matches(self, match):
        assert forced(small_problem(), [offload(match)]) == {CONV_GAP: HOST}

    def test_keeping_is_for_every_gap_and_the_others_for_that_across_the_boundary(self):
        problem = small_problem()
        of_conv = [g for g in gaps(problem.trace) if g.buffer == CONV]
        assert len(of_conv) == 2
        assert forced(problem, [keep("conv")]) == dict.fromkeys(of_conv, KEEP)
        assert forced(problem, [recompute("conv")]) == {CONV_GAP: Recompute()}

    def test_the_last_that_matches_decides(self):
        problem = small_problem()
        found = forced(problem, [recompute("*"), keep("layers.[1-9]*"), offload("mixed")])
        assert found[CONV_GAP] == Recompute()
        assert {g.buffer: c for g, c in found.items() if g.buffer != CONV} == {
            DROPPED: KEEP,
            CURVED: KEEP,
            MIXED: HOST,
        } | {g.buffer: KEEP for g in found if g.buffer > MIXED}

    def test_one_that_matches_nothing_names_what_is_near(self):
        with pytest.raises(
            OptionValueError, match=r"matches no storage: similar names are .*curved"
        ) as caught:
            check_rules([keep("curve")], [small_problem().trace])
        assert "overrides='curve: keep'" in str(caught.value)
        check_rules([keep("curved"), offload("layers.?")], [small_problem().trace])

    def test_one_that_matches_in_another_graph_is_right(self):
        trace = small_problem().trace
        other = replace(trace, buffers=tuple(replace(b, name="") for b in trace.buffers))
        check_rules([offload("conv")], [other, trace])

    @pytest.mark.parametrize(
        ("rule", "said"),
        [
            (recompute("x"), r"x \(buffer 0\) always stays on the device"),
            (offload("conv.weight"), "it belongs to the caller"),
            (offload("layers.6"), "is made in the backward pass"),
            (offload("tangent"), "is passed to the backward pass"),
            (offload("out"), "it belongs to the caller"),
        ],
    )
    def test_one_for_what_cannot_be_moved_says_why(self, rule, said):
        with pytest.raises(OptionValueError, match=said):
            check_rules([rule], [small_problem().trace])

    def test_one_for_what_an_op_changes_says_so(self):
        trace = small_problem().trace
        op = replace(trace.ops[2], effects=frozenset([Effect.MUTATES]))
        trace = replace(trace, ops=(*trace.ops[:2], op, *trace.ops[3:]))
        with pytest.raises(OptionValueError, match=r"dropped .* device: an op changes it in place"):
            check_rules([offload("dropped")], [trace])

    def test_one_for_what_is_empty_says_so(self):
        trace = small_problem().trace
        buffers = [replace(b, nbytes=0) if b.name == "mixed" else b for b in trace.buffers]
        with pytest.raises(OptionValueError, match=r"mixed .* is empty, so there is nothing"):
            check_rules([offload("mixed")], [replace(trace, buffers=tuple(buffers))])

    def test_what_has_no_place_has_no_name_for_it(self):
        trace = small_problem().trace
        trace = replace(trace, ops=tuple(replace(op, site="") for op in trace.ops))
        with pytest.raises(OptionValueError, match=r"it matches no storage: `outcore plan show`"):
            check_rules([keep("*(*)")], [trace])

    def test_recomputing_what_cannot_run_again_says_why(self):
        problem = small_problem()
        op = replace(problem.trace.ops[2], effects=frozenset([Effect.UNREPEATABLE]))
        ops = (*problem.trace.ops[:2], op, *problem.trace.ops[3:])
        problem = replace(problem, trace=replace(problem.trace, ops=ops))
        with pytest.raises(OptionValueError, match=r"op 2 aten\.tanh\.default.* is unrepeatable"):
            forced(problem, [recompute("curved")])
        assert forced(problem, [recompute("curved"), keep("curved")])

    def test_recomputing_what_is_passed_in_says_why(self):
        problem = small_problem()
        first, *others = problem.trace.buffers
        trace = replace(problem.trace, buffers=(replace(first, borrowed=False), *others))
        problem = replace(problem, trace=trace)
        with pytest.raises(OptionValueError, match="it is passed in, and no op makes it"):
            forced(problem, [recompute("x")])
        assert set(forced(problem, [offload("x")]).values()) == {HOST}

    def test_offloading_to_nowhere_says_why(self):
        problem = small_problem()
        alone = replace(small_hardware(), capacity_bytes=((Tier.DEVICE, 1 << 20),), links=())
        with pytest.raises(OptionValueError, match="small has no outer tier"):
            forced(replace(problem, hardware=alone), [offload("conv")])


class TestOverridden:
    def test_a_plan_that_does_so_already_does_it_in_its_own_way(self):
        problem = small_problem(6144)
        policy = resolve("swap-all{min_bytes=1B}")
        own = policy.plan(problem)
        assert any(c != HOST for _, c in own.choices), "it has hints"
        assert Overridden(policy, (offload("layers.*"),)).plan(problem) == own

    def test_a_policy_that_moves_otherwise_is_overridden(self):
        problem = small_problem(8192)
        policy = resolve("swap-all{min_bytes=1B}")
        plan = Overridden(policy, (keep("conv"), recompute("curved"))).plan(problem)
        assert plan.policy == policy.name + "{min_bytes=1B}"
        assert plan.choice(CONV_GAP) == KEEP
        assert [c for g, c in plan.choices if g.buffer == CURVED] == [Recompute()]
        assert all(isinstance(c, Offload) for g, c in plan.choices if g.buffer == DROPPED)

    def test_where_that_does_not_fit_search_plans_around_it(self):
        """At 6400 B keep-all does not fit; with `conv` kept, other buffers must leave."""
        problem = small_problem(6400)
        policy = resolve("keep-all")
        with pytest.raises(InfeasibleError):
            policy.plan(problem)
        plan = Overridden(policy, (keep("conv"),)).plan(problem)
        assert plan.policy == "search"
        assert plan.choice(CONV_GAP) == KEEP
        assert plan.choices
        assert fits(problem, lower(problem, plan))

    def test_without_rules_that_matter_it_is_the_policy(self):
        problem, plan = small_plan()
        assert Overridden(resolve(plan.policy), (keep("nothing"),)).plan(problem) == plan

    @drawn
    @given(problem=problems(), data=st.data())
    def test_rules_hold_whatever_is_planned(self, problem, data):
        """If no plan fits, they hold at the smallest feasible budget."""
        rules = tuple(self.rules(problem, data))
        spec = data.draw(st.sampled_from(("keep-all", "swap-all{min_bytes=1B}", "search")))
        spec = "search{min_bytes=1B,effort=0.002}" if spec == "search" else spec
        policy = Overridden(resolve(spec), rules)
        try:
            fixed = forced(problem, rules)
        except OptionValueError:
            assume(False)
        try:
            plan = policy.plan(problem)
        except InfeasibleError as error:
            assume(error.tier == "device")
            problem = replace(problem, budget_bytes=error.floor_bytes)
            plan = policy.plan(problem)
        assert fits(problem, lower(problem, plan))
        for gap, choice in fixed.items():
            assert type(plan.choice(gap)) is type(choice)

    def rules(self, problem, data):
        names = [b.name for b in problem.trace.buffers if b.name] + ["layers.?", "layers.1*"]
        for _ in range(data.draw(st.integers(1, 3))):
            yield Rule(data.draw(st.sampled_from(names)), data.draw(st.sampled_from(Action)))

    @drawn
    @given(problem=problems())
    def test_keeping_everything_is_feasible_where_everything_fits(self, problem):
        fit = fits(problem, lower(problem, make_plan({})))
        policy = Overridden(resolve("search{min_bytes=1B,effort=0.0}"), (keep("*"),))
        assume(any(b.name for b in problem.trace.buffers) or problem.trace.ops)
        try:
            plan = policy.plan(problem)
        except InfeasibleError:
            assert not fit
        else:
            leaner = bool(plan.variants)  # an op with a smaller workspace moves nothing
            assert fit or leaner or not forced(problem, (keep("*"),))
            assert fit is all(isinstance(c, Keep) for _, c in plan.choices) or not fit


class TestChecks:
    def test_a_plan_for_the_problem(self):
        problem, plan = small_plan()
        saved = saved_plan(problem, plan)
        assert check_plan(saved, problem, strict=True) == plan
        assert find(small_file(), digest(problem.trace)) == saved
        assert find(small_file(), "another") is None

    def test_another_trace(self):
        problem, plan = small_plan()
        longer = replace(problem.trace, outputs=(*problem.trace.outputs, 1))
        with pytest.raises(DigestError, match="made for trace"):
            check_plan(saved_plan(problem, plan), replace(problem, trace=longer))

    def test_other_times_and_links_will_do_unless_strict(self):
        problem, plan = small_plan()
        saved = saved_plan(problem, plan)
        slower = replace(problem.profile, seconds=tuple(2 * s for s in problem.profile.seconds))
        changed = replace(problem, profile=slower)
        assert check_plan(saved, changed).choices == plan.choices
        with pytest.raises(DigestError, match="made for profile"):
            check_plan(saved, changed, strict=True)
        renamed = replace(problem, hardware=replace(problem.hardware, name="other"))
        with pytest.raises(DigestError, match="made for hardware"):
            check_plan(saved, renamed, strict=True)

    def test_too_small_a_budget_names_one_that_will_do(self):
        problem, plan = small_plan()
        saved = saved_plan(problem, plan)
        with pytest.raises(InfeasibleError, match=r"the plan in plans\.json") as caught:
            check_plan(saved, replace(problem, budget_bytes=3000), name="plans.json")
        enough = replace(problem, budget_bytes=caught.value.floor_bytes)
        assert check_plan(saved, enough).choices == plan.choices
        with pytest.raises(InfeasibleError, match="host budget"):
            check_plan(saved, replace(problem, host_budget_bytes=1000))

    def test_what_goes_to_a_disk_takes_host_memory_on_its_way(self):
        problem = small_problem(8192)
        saved = saved_plan(problem, make_plan({CONV_GAP: Offload(Tier.DISK)}))
        staging = staging_bytes(problem.trace.buffers[CONV].nbytes)
        check_plan(saved, replace(problem, host_budget_bytes=staging))
        with pytest.raises(InfeasibleError, match="host budget"):
            check_plan(saved, replace(problem, host_budget_bytes=staging - 1))


class TestDiffs:
    def test_a_file_and_itself(self):
        found = diff_files(small_file(), small_file())
        assert not found.differs
        assert found.to_dict()["plans"][0]["changes"] == []

    def test_what_is_done_otherwise(self):
        problem, _ = small_plan()
        one = make_plan({CONV_GAP: HOST, Gap(DROPPED, 2, 7): HOST})
        other = make_plan({CONV_GAP: Recompute(), Gap(CURVED, 3, 6): HOST})
        files = [make_file([saved_plan(problem, p)], VERSIONS) for p in (one, other)]
        (found,) = diff_files(*files).plans
        actions = {c.storage.name: c.actions for c in found.changes}
        assert actions == {
            "conv": (Action.OFFLOAD, Action.RECOMPUTE),
            "dropped": (Action.OFFLOAD, Action.KEEP),
            "curved": (Action.KEEP, Action.OFFLOAD),
        }
        assert "predicted.seconds" in {name for name, _, _ in found.figures}
        written = diff_files(*files).to_dict()["plans"][0]["changes"]
        assert [c["before"] and c["before"]["action"] for c in written] == [
            "offload",
            "offload",
            None,
        ]

    def test_reasons_and_figures_can_be_left_out(self):
        problem, plan = small_plan()
        slower = replace(problem.profile, seconds=(5e-3,) * len(problem.trace.ops))
        changed = replace(problem, profile=slower)
        files = [make_file([saved_plan(p, plan)], VERSIONS) for p in (problem, changed)]
        found = diff_files(*files)
        assert found.differs
        assert {h for c in found.plans[0].changes for h in c.how} == {"reason", "cost"}
        assert not found.only_actions().differs
        hinted = replace(plan, choices=((CONV_GAP, replace(HOST, prefetch=7)), *plan.choices[1:]))
        assert hinted.choices[0][0] == plan.choices[0][0]
        changed_file = make_file([saved_plan(problem, hinted)], VERSIONS)
        assert diff_files(files[0], changed_file).only_actions().differs

    def test_storages_of_other_traces_are_compared_by_name(self):
        problem, _ = small_plan()
        plan = make_plan({CONV_GAP: HOST})
        longer = replace(problem.trace, outputs=(*problem.trace.outputs, 1))
        other = replace(problem, trace=longer)
        files = [make_file([saved_plan(p, plan)], VERSIONS) for p in (problem, other)]
        (found,) = diff_files(*files).plans
        assert found.differs
        assert not found.changes
        assert {"digests.trace", "digests.problem"} <= {name for name, _, _ in found.figures}

    def test_graphs_that_one_file_lacks(self):
        one = small_file()
        problem, plan = small_plan()
        longer = replace(problem.trace, outputs=(*problem.trace.outputs, 1))
        more = saved_plan(replace(problem, trace=longer), replace(plan, trace_digest=""))
        both = make_file([more, *one.plans], VERSIONS)
        found = diff_files(one, both)
        assert [p.before is None for p in found.plans] == [False, True]
        assert [p.differs for p in found.plans] == [False, True]
        assert found.to_dict()["plans"][1]["traces"][0] is None

    def test_versions_and_rules(self):
        other = make_file(small_file().plans, replace(VERSIONS, torch="2.14"), [keep("conv")])
        found = diff_files(small_file(), other)
        assert [name for name, _, _ in found.figures] == [
            "versions.torch",
            "overrides[0].match",
            "overrides[0].action",
        ]


def test_every_crossing_storage_can_be_kept():
    """A rule for everything covers all gaps that policies decide on."""
    problem = small_problem()
    kept = forced(problem, [keep("*")])
    assert set(candidates(problem, 1)) <= set(kept)
