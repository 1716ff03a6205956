"""Scale: how much of the CPU benchmarks is run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is run."""

    workload: str
    """The network of `worth`, `fused`, `honest` and `quick` (see `workloads`)."""
    text_workload: str
    """The network of `optimizer`."""
    returned_workload: str
    """The network of `returned`."""
    idle_workloads: tuple[str, ...]
    """The networks of `idle`."""
    cases: tuple[str, ...]
    """Models of tests/cpu/models.py; empty means all of them."""
    shares: tuple[float, ...]
    """Budgets of `exact`, as fractions of the way from the floor to the in-core peak."""
    budget_share: float
    """The budget of `worth`, `fused`, `honest` and `quick`, as a fraction of the in-core peak."""
    rounds: int
    """Turns of each worker in an interleaved run."""
    turn_seconds: float
    """A turn repeats short steps until it takes about this long."""
    throttled: bool
    """Whether to repeat `worth`, `fused` and `honest` with a slower link."""
    repeats: int
    """Trainings of `quick`."""
    steps: int
    """Training steps of `leak`."""
    drops: int
    """Forward calls of `leak` whose results are dropped."""
    examples: int
    """Generated plans of `verifier`."""
    memory_bytes: int | None = None
    """The machine's memory as `beyond` should see it; None means the actual memory."""


FULL = Scale(
    workload="resnet50-b16-224",
    text_workload="gpt2-b1-256",
    returned_workload="gpt2-b4-256",
    idle_workloads=("resnet50-b16-224",),
    cases=(),
    shares=(0.8, 0.5, 0.3),
    budget_share=0.4,
    rounds=15,
    turn_seconds=0.5,
    throttled=True,
    repeats=3,
    steps=100,
    drops=50,
    examples=200,
)

SMALL = Scale(
    workload="small-resnet-b16-64",
    text_workload="small-gpt2-b2-64",
    returned_workload="small-gpt2-b2-64",
    idle_workloads=(),
    cases=("two-heads",),
    shares=(0.5,),
    budget_share=0.7,
    rounds=3,
    turn_seconds=0.1,
    throttled=False,
    repeats=1,
    steps=20,
    drops=10,
    examples=20,
    memory_bytes=512 << 20,
)
