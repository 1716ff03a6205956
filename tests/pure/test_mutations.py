"""verify_program refuses programs that lost an instruction or a hazard edge."""

from __future__ import annotations

from hypothesis import given, settings

from tests.pure.mutations import Tally
from tests.pure.test_lower import lowered, planned


def test_lost_instructions_and_edges_are_caught() -> None:
    total = Tally()

    @given(planned())
    @settings(max_examples=60)
    def check(case) -> None:
        problem, plan = case
        program = lowered(problem, plan)
        if program is None or len(program.body) > 120:
            return
        one = Tally()
        one.add(problem, program)
        assert one.edges_harmful_missed == 0
        assert one.instructions_caught >= 0.95 * one.instructions
        for field in Tally.__dataclass_fields__:
            setattr(total, field, getattr(total, field) + getattr(one, field))

    check()
    assert total.edges_harmful > 20
    assert total.instructions > 500
