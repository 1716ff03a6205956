"""Policies of other packages: how they are found, listed and refused; the page on writing one."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from outcore.errors import InfeasibleError, PolicyError
from outcore.ir.memory import fits
from outcore.lower import lower
from outcore.out_of_process import plan_out_of_process
from outcore.policies import POLICIES, KnownPolicies, plugins, resolve, spec_text
from outcore.policies.keep_all import KeepAll
from tests.pure.packages import on_path, write_package
from tests.pure.strategies import problems
from tests.pure.test_policies import chain

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-policy.md"

POLICY = """
import os
from pathlib import Path
from dataclasses import dataclass
from typing import ClassVar
from outcore.policies.settle import settle

@dataclass(frozen=True, slots=True)
class Mine:
    name: ClassVar[str] = "mine"
    summary: ClassVar[str] = "keeps all, [mine]"
    depth: int = 3

    def plan(self, problem):
        return settle(problem, {}, self)
"""


def on_the_page():
    """The module and the entry points of docs/writing-a-policy.md."""
    found = dict(reversed(re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), re.DOTALL)))
    project = tomllib.loads(found["toml"])["project"]
    return project["name"], project["entry-points"]["outcore.policies"], found["python"]


@pytest.fixture
def install(tmp_path):
    """A function that installs a package until the test is over."""
    with on_path(tmp_path):
        yield lambda *package: write_package(tmp_path, *package)


@pytest.fixture
def mine(install):
    install("my-policies", {"mine": "my_module:Mine"}, {"my_module": POLICY})


def test_a_policy_of_another_package_is_found_by_name(mine):
    policy = resolve("mine{depth=5}")
    assert spec_text(policy) == "mine{depth=5}"
    assert policy.plan(chain()).policy == "mine{depth=5}"
    assert [*KnownPolicies()] == [*POLICIES, "mine"]
    (plugin,) = plugins()
    assert (plugin.name, plugin.distribution, plugin.kind) == (
        "mine",
        "my-policies 1.0",
        type(policy),
    )


def test_a_name_that_nobody_has_is_answered_with_all_that_are_known(mine):
    with pytest.raises(PolicyError, match=r"unknown policy 'mien': did you mean 'mine'\?"):
        resolve("mien")
    with pytest.raises(PolicyError, match=r"unknown option 'dept': did you mean 'depth'\?"):
        resolve("mine{dept=1}")


def test_packages_are_not_looked_at_for_what_is_built_in(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", None)
    for name in POLICIES:
        assert resolve(name).name == name


BROKEN = {
    "cannot be imported: ModuleNotFoundError: No module named 'nowhere'": "import nowhere",
    "cannot be imported: AttributeError": "",
    "it is not a dataclass": "Mine = 3",
    "its dataclass is not frozen": POLICY.replace("frozen=True, ", ""),
    "one of its options has no default": POLICY.replace("depth: int = 3", "depth: int"),
    "its `name` is 'other', and its entry point 'mine'": POLICY.replace('"mine"', '"other"'),
    "it has no `summary`": POLICY.replace("summary:", "about:"),
    "it has no method `plan`": POLICY.replace("def plan(", "def make("),
}


@pytest.mark.parametrize("said", BROKEN)
def test_a_package_that_is_wrong_is_named_once_it_is_used(install, said):
    install("my-policies", {"mine": "my_module:Mine"}, {"my_module": BROKEN[said]})
    assert resolve("keep-all") == KeepAll()
    with pytest.raises(PolicyError) as caught:
        resolve("mine")
    assert str(caught.value).startswith("policy 'mine': my_module:Mine of my-policies 1.0 ")
    assert said in str(caught.value)
    (plugin,) = plugins()
    assert isinstance(plugin.kind, PolicyError)
    assert str(plugin.kind) == str(caught.value)


def test_a_name_that_is_built_in_stays_what_it_is(install):
    source = POLICY.replace('"mine"', '"pooch"')
    install("my-policies", {"pooch": "my_module:Mine"}, {"my_module": source})
    assert resolve("pooch").name in POLICIES
    assert type(resolve("pooch")) is POLICIES["pooch"]
    (plugin,) = plugins()
    assert "my-policies 1.0 also has a policy of this name; outcore uses the built-in" in str(
        plugin.kind
    )


def test_two_packages_with_one_name_are_both_named(install, mine):
    install("other-policies", {"mine": "other_module:Mine"}, {"other_module": POLICY})
    with pytest.raises(PolicyError, match=r"my-policies 1\.0 and other-policies 1\.0 each have"):
        resolve("mine")


APART = POLICY.replace("depth: int = 3", "out_of_process: ClassVar[bool] = True").replace(
    "return settle(problem, {}, self)",
    "print('planning'); Path(os.environ['TOLD']).write_text(str(os.getpid()))\n"
    "        return settle(problem, {}, self)",
)


def test_another_process_finds_it_too(install, tmp_path, monkeypatch):
    install("my-policies", {"mine": "my_module:Mine"}, {"my_module": APART})
    told = tmp_path / "told"
    monkeypatch.setenv("TOLD", str(told))
    policy, problem = resolve("mine"), chain()
    plan = plan_out_of_process(policy, problem)
    there = told.read_text()
    assert plan == policy.plan(problem)
    assert there != told.read_text(), "that was this process"


def test_another_process_finds_it_in_the_working_directory(install, tmp_path, monkeypatch):
    install("my-policies", {"mine": "my_module:Mine"}, {"my_module": APART})
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    policy = resolve("mine")
    monkeypatch.syspath_prepend("")
    monkeypatch.setattr("sys.path", [p for p in sys.path if p != str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(type(policy), "plan")  # this process cannot plan
    assert plan_out_of_process(policy, chain()).policy == "mine"


# ---- the page ------------------------------------------------------------------------------------


def test_the_policy_of_the_page_is_short():
    _, _, source = on_the_page()
    body = source.partition("@dataclass")[2]
    assert len([line for line in body.splitlines() if line.strip()]) <= 22


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(problem=problems())
def test_the_policy_of_the_page_keeps_what_policies_promise(tmp_path_factory, problem):
    folder = tmp_path_factory.mktemp("package")
    name, entry_points, source = on_the_page()
    write_package(folder, name, entry_points, {"largest_first": source})
    with on_path(folder):
        policy = resolve("largest-first{min_bytes=1B}")
        try:
            plan = policy.plan(problem)
        except InfeasibleError as error:
            problem = replace(problem, budget_bytes=error.floor_bytes)
            plan = policy.plan(problem)
        assert fits(problem, lower(problem, plan))
        assert plan == policy.plan(problem)
        assert plan.policy == spec_text(policy)
