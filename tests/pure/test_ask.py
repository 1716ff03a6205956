"""ask: errors for policies that do not return a plan that fits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from outcore.errors import InfeasibleError, PolicyError
from outcore.ir.plan import make_plan
from outcore.policies import ask
from tests.pure.building import dense_problem


@dataclass(frozen=True)
class Wrong:
    """A policy whose plan() returns or raises whatever `do` does."""

    do: Callable[[], Any]
    name: ClassVar[str] = "wrong"
    summary: ClassVar[str] = "does as it is told"

    def plan(self, _: object) -> Any:
        return self.do()


def stumble() -> None:
    raise KeyError("no such thing")


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (lambda: None, "returned NoneType, and that is not a Plan"),
        (stumble, "raised KeyError: 'no such thing'"),
        (lambda: sys.exit(5), "raised SystemExit: 5"),
    ],
    ids=["nothing", "an error", "an end"],
)
def test_it_is_said_what_a_policy_did_instead(do: Callable[[], Any], said: str) -> None:
    with pytest.raises(PolicyError, match=said) as caught:
        ask(Wrong(do), dense_problem())
    assert str(caught.value).startswith("policy 'wrong': its plan() ")


def test_a_plan_that_does_not_fit_is_no_plan() -> None:
    with pytest.raises(InfeasibleError, match="under policy wrong"):
        ask(Wrong(lambda: make_plan({}, "wrong")), dense_problem(budget_bytes=4096))
