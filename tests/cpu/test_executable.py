"""What becomes of a program before it runs."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from outcore import aten
from outcore.errors import VerifyError
from outcore.execute import build
from outcore.ir.plan import make_plan
from outcore.ir.profile import Cost
from outcore.lower import lower
from outcore.measure import metered
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", aten.DONATIONS)
def test_a_donated_result_has_the_same_bits(target: str, dtype: torch.dtype) -> None:
    given, out = aten.DONATIONS[target]
    op, written = aten.resolve(target), aten.in_place(target)
    kinds = [str(a.type) for a in op._schema.arguments if a.default_value is None]
    seeded = torch.Generator().manual_seed(0)
    for shape, number in product([(37, 65), (7, 4, 3, 5), ()], [0.1, 1 / 3, 2.7]):
        tensors = [torch.randn(shape, generator=seeded).to(dtype) for _ in kinds]
        for turned in (False, True):
            laid = [t.transpose(0, 1) if turned and t.dim() > 1 else t for t in tensors]
            args: list[Any] = [
                t if k == "Tensor" else number for t, k in zip(laid, kinds, strict=True)
            ]
            expected = op(*args)
            args[given] = laid[given].clone()
            found = written(*args, **({out: args[given]} if out else {}))
            assert torch.equal(found.nan_to_num(), expected.nan_to_num()), (shape, number)


@pytest.mark.parametrize("target", aten.DONATIONS)
def test_a_donated_result_takes_no_memory_and_has_the_same_bits(target: str) -> None:
    given, out = aten.DONATIONS[target]
    op, written = aten.resolve(target), aten.in_place(target)
    kinds = [str(a.type) for a in op._schema.arguments if a.default_value is None]
    x = torch.randn(1 << 16)
    args = [x.clone() if kind == "Tensor" else 0.25 for kind in kinds]
    expected = op(*args)
    kwargs = {out: args[given]} if out else {}
    found, reading = metered(lambda: written(*args, **kwargs))
    assert torch.equal(found, expected)
    assert found is args[given]
    assert reading.peak_bytes() < x.nbytes // 2
