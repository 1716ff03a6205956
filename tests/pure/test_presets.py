"""Machines by name, and policies compared on them."""

import json
from dataclasses import replace

import pytest

from outcore.allocators.first_fit import FirstFit
from outcore.allocators.ideal import Ideal
from outcore.compare import Comparison
from outcore.errors import OptionValueError, PolicyError
from outcore.ir.hardware import Tier
from outcore.presets import preset, presets
from outcore.report import Counts
from tests.pure.building import small_hardware, small_trace
from tests.pure.test_estimate import one_op

FIGURES = {"device_memory", "host_memory", "memory_rate", "flops_per_second", "link_rate"}


@pytest.mark.parametrize("name", presets())
def test_every_figure_has_a_source(name):
    found = preset(name)
    assert found.hardware.name == name
    assert set(found.sources) >= FIGURES
    assert all(found.sources.values())
    assert "float32" in dict(found.hardware.flops_per_second)
    for tier in (Tier.DEVICE, Tier.HOST):
        assert found.hardware.capacity(tier) > 1 << 30


def test_the_machines_of_the_papers_are_there():
    assert {"v100-pcie3", "v100-nvlink2", "p100", "k40c", "titan-xp"} < set(presets())


def test_an_unknown_machine():
    with pytest.raises(OptionValueError, match="did you mean 'v100-pcie3'"):
        preset("v100-pcie")


def comparison(states=0, allocator=None):
    machine = replace(preset("v100-pcie3"), hardware=small_hardware())
    trace = small_trace()  # its ops have fewer arguments than torch's
    nameless = tuple(replace(op, target="test.op") for op in trace.ops)
    return Comparison(
        replace(trace, ops=nameless), machine, items=4, states=states, allocator=allocator
    )


def test_a_policy_beside_the_step_in_core():
    found = comparison()
    tight, roomy = found.rows([16384, 7800], ["swap-all{min_bytes=1B}"])
    assert roomy.feasible
    assert tight.feasible
    assert tight.peak_bytes <= 7800
    assert tight.items_per_second == pytest.approx(4 / tight.seconds)
    assert tight.relative_to_in_core == pytest.approx(found.in_core.seconds / tight.seconds)
    assert 0 < tight.relative_to_in_core <= roomy.relative_to_in_core <= 1
    assert tight.counts == Counts(offload=4)
    assert json.loads(json.dumps(tight.to_dict()))["counts"]["offload"] == 4


def test_variants_are_for_policies_and_not_for_the_step_in_core():
    geometry = (None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    maps, kernel = (64, 64, 56, 56), (64, 64, 3, 3)
    trace = one_op("aten.convolution.default", [maps, kernel], maps, *geometry)
    plain, both = (Comparison(trace, preset("titan-xp"), 64, variants=v) for v in (False, True))
    assert both.profile.cost(0, 1).seconds < plain.profile.cost(0).seconds
    assert replace(both.profile, alternatives=()) == plain.profile
    assert both.in_core == plain.in_core


def test_keeping_all_in_enough_room_is_the_step_in_core():
    (row,) = comparison().rows([1 << 20], ["keep-all"])
    assert row.relative_to_in_core == 1
    assert row.counts == Counts(keep=4)


def test_no_plan_says_why():
    (row,) = comparison().rows([1000], ["keep-all"])
    assert not row.feasible
    assert row.seconds is None
    assert row.needed_bytes > 1000
    assert "smallest feasible budget" in row.reason


def test_an_allocator_beside_the_plan():
    policy = "swap-all{min_bytes=1B}"
    (plain,) = comparison().rows([7800], [policy])
    (ideal,) = comparison(allocator=Ideal()).rows([7800], [policy])
    assert plain.reserved_bytes is None
    assert ideal.feasible
    assert ideal.reserved_bytes == ideal.peak_bytes == plain.peak_bytes
    assert ideal.seconds == plain.seconds


def test_a_plan_that_fits_until_an_allocator_serves_it():
    tight, roomy = comparison(allocator=FirstFit(1024)).rows([7800, 16384], ["swap-all"])
    assert not tight.feasible
    assert tight.seconds is None
    assert 7800 < tight.reserved_bytes == tight.needed_bytes
    assert tight.peak_bytes <= 7800
    assert tight.needed_tier == "device"
    assert "first-fit reserves" in tight.reason
    assert roomy.feasible
    assert roomy.peak_bytes <= roomy.reserved_bytes <= 16384


def test_the_optimizer_takes_its_share():
    none, adam = comparison(), comparison(states=2)
    weights = 2 * 64 * 4
    more = adam.in_core.peak(Tier.DEVICE) - none.in_core.peak(Tier.DEVICE)
    assert more == 2 * weights


def test_a_wrong_spec_is_refused_before_anything_is_planned():
    with pytest.raises(PolicyError, match="poch"):
        next(comparison().rows([16384], ["keep-all", "poch"]))
