"""The planning benchmarks, at a small size."""

from __future__ import annotations

import json

import pytest

from benchmarks.planner.command import main
from benchmarks.planner.monotone import slope


def test_the_command_runs(tmp_path, capsys):
    file = tmp_path / "out.json"
    main(["--only", "speed", "monotone", "--small", "--out", str(file)])
    capsys.readouterr()
    found = json.loads(file.read_text())["benchmarks"]
    (timed,) = found["speed"]["rows"]
    assert timed["planning_seconds"] > 0
    memory, link = found["monotone"]["rows"]
    for row in (memory, link):
        assert row["figures"] == sorted(row["figures"])
        assert len(row["figures"]) == len(row["lost"])
        assert row["lost"] == sorted(row["lost"], reverse=True)
    assert memory["lost"][-1] == pytest.approx(0)


@pytest.mark.parametrize(
    ("lost", "said", "met"),
    [
        ([0.3, 0.2, 0.2, 0.0], "0 of 3 steps up lose more, 0.00% at most", True),
        ([0.3, 0.2, 0.21, 0.0, 0.002], "2 of 4 steps up lose more, 1.00% at most", False),
    ],
)
def test_what_is_lost_may_only_shrink(lost, said, met):
    (check,) = slope("a step", "memory", range(len(lost)), lost).checks
    assert (check.goal, check.met) == (said, met)
