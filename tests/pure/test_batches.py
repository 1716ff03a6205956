"""Batches: traces of any batch size, derived from the traces of two batch sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.reproduction.batches import Batches
from outcore.errors import VerifyError
from outcore.ir.trace import Ref, Role, Trace
from tests.pure.building import TraceBuilder
from tests.pure.chainer_resnet import chainer_resnet50


def step(samples: int, *, odd: int = 0, target: str = "test.f") -> Trace:
    t = TraceBuilder()
    x = t.new(3 * samples + odd, Role.INPUT, borrowed=True)
    y = t.new(5, Role.ACTIVATION)
    args = (Ref(x), (samples, -1), 1 / samples, True, 7, None)
    t.op(target, args, (y,))
    return t.trace([x], (Ref(y),), [], ())


def test_sizes_and_whole_numbers_lie_on_a_line_and_other_arguments_stay() -> None:
    found = Batches(2, step(2), 4, step(4)).at(7)
    assert found.buffers == step(7).buffers
    assert found.values == step(7).values
    assert found.ops[0].args == (Ref(0), (7, -1), 0.5, True, 7, None)


@pytest.mark.parametrize("samples", [1, 16, 512])
def test_a_network_at_another_batch_is_the_one_that_is_built_so(samples: int) -> None:
    few, more = (chainer_resnet50(n).trace for n in (2, 3))
    assert Batches(2, few, 3, more).at(samples) == chainer_resnet50(samples).trace


OTHERS = (
    step(4, odd=1),
    step(4, target="test.g"),
    replace(step(4), boundary=0),
    replace(step(4), outputs=()),
    replace(step(4), ops=(replace(step(4).ops[0], args=(Ref(1),)),)),
    replace(step(4), ops=(replace(step(4).ops[0], kwargs=(("alpha", 2),)),)),
    replace(step(4), ops=()),
)


@pytest.mark.parametrize("other", OTHERS)
def test_two_steps_that_are_not_one_are_refused(other: Trace) -> None:
    with pytest.raises(VerifyError, match="batches of 2 and of 4"):
        Batches(2, step(2), 4, other).at(8)


def test_two_batches_of_one_size_and_sizes_below_zero_are_refused() -> None:
    with pytest.raises(VerifyError, match="no slope"):
        Batches(2, step(2), 2, step(2)).at(3)
    with pytest.raises(VerifyError, match="below zero"):
        Batches(2, step(2), 4, step(4)).at(-1)
