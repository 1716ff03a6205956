"""How many single faults the program verifier catches: `python -m benchmarks.verifier`.

Generated traces and plans (fixed seed), lowered; each instruction and each hazard edge is taken away
in turn. An edge does harm where some order of the streams then gives another result.
"""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, given, settings

from tests.pure.mutations import Tally
from tests.pure.test_lower import lowered, planned


def main() -> None:
    """Print the figures."""
    tally = Tally()

    @given(planned())
    @settings(
        max_examples=200,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def collect(case: object) -> None:
        problem, plan = case  # type: ignore[misc]  # a pair, drawn
        program = lowered(problem, plan)
        if program is not None:
            tally.add(problem, program)

    collect()
    rate = tally.instructions_caught / tally.instructions
    print(f"lost instructions: {tally.instructions}, caught {rate:.2%}")
    print(f"lost hazard edges: {tally.edges}, caught {tally.edges_caught / tally.edges:.2%}")
    print(f"  of which change results: {tally.edges_harmful}, missed {tally.edges_harmful_missed}")


if __name__ == "__main__":
    main()
