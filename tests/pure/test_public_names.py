"""The public names of outcore: all exist, and only those that run torch import it."""

import copy
import importlib
import pickle
import subprocess
import sys

import pytest

import outcore
from tests.pure.building import small_problem

NEED_TORCH = {
    *("Backend", "Session", "handle", "session", "trace", "unwrap", "wrap"),
    *("offload_optimizer", "restore_optimizer"),
}

USE_ALL_BUT = """
import sys, outcore
assert not {"torch", "numpy"} & set(sys.modules), "importing outcore loads more than it needs"
for name in sorted(set(outcore.__all__) - set(sys.argv[1:])):
    getattr(outcore, name)
    assert "torch" not in sys.modules, name
"""


def test_every_public_name_is_there_in_order():
    assert outcore.__all__ == sorted(outcore.__all__)
    homes = [name for names in outcore._NAMES.values() for name in names]
    assert sorted([*homes, "plan"]) == outcore.__all__
    assert set(outcore.__all__) <= set(dir(outcore))


def test_no_name_loads_torch_but_those_that_run_it():
    subprocess.run([sys.executable, "-c", USE_ALL_BUT, *NEED_TORCH], check=True)


def test_a_name_that_does_not_exist():
    with pytest.raises(AttributeError, match="module 'outcore' has no attribute 'lowr'"):
        outcore.lowr  # noqa: B018 - the access is what is tested


def test_a_module_does_not_replace_the_function_of_its_name():
    importlib.import_module("outcore.lower.sync")
    assert outcore.lower is sys.modules["outcore.lower"].lower
    assert outcore.simulate is sys.modules["outcore.simulate"].simulate


def test_the_package_is_pickled_and_copied_by_name():
    """As cloudpickle does with modules that a function refers to."""
    assert pickle.loads(pickle.dumps(outcore)) is outcore
    assert copy.deepcopy(outcore) is outcore


def test_from_problem_to_timeline():
    problem = small_problem(budget_bytes=16384)
    plan = outcore.plan(problem, "swap-all{min_bytes=1B}")
    timeline = outcore.simulate(problem, outcore.lower(problem, plan))
    assert plan.choices
    assert timeline.peak(outcore.Tier.DEVICE) <= problem.budget_bytes
    assert outcore.plan(problem).policy == "search"
    with pytest.raises(outcore.PolicyError, match="did you mean 'pooch'"):
        outcore.plan(problem, "poch")
