"""What becomes of a program before it runs."""

from dataclasses import replace

import pytest
import torch

from outcore.errors import VerifyError
from outcore.execute import build
from outcore.ir.plan import make_plan
from outcore.ir.profile import Cost
from outcore.lower import lower
from tests.pure.building import small_problem


def test_a_program_with_variants_of_ops_is_refused_before_it_runs() -> None:
    """Torch has no second algorithm to name: the default would run in its place, unseen."""
    problem = small_problem()
    profile = replace(problem.profile, alternatives=((3, (Cost(5e-4, 4096),)),))
    program = lower(replace(problem, profile=profile), make_plan({}, variants={3: 1}))
    with pytest.raises(VerifyError) as caught:
        build(problem.trace, program, torch.default_generator)
    error = caught.value
    assert (error.noun, error.where) == ("program", "instruction 7")
    assert error.detail == "variant 1 of op 3 aten.add.Tensor"
