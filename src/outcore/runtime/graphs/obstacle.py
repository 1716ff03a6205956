"""Obstacle: why a step of a profiled graph could not be metered."""

from __future__ import annotations

from enum import Enum


class Obstacle(Enum):
    """Each obstacle: after how many such steps in a row outcore reports it, and the reason then."""

    OTHER_THREADS = (16, "each of its steps runs on another thread, and cannot be metered")
    """A step cannot be read once its thread has gone on to other work. A few times in a row, the
    thread may only have stood still while others went on."""

    INSIDE_BACKWARD = (
        8,
        (
            "its forward call runs inside a backward call, where metering cannot start: with "
            "torch.utils.checkpoint, use_reentrant=False avoids this"
        ),
    )

    METERED_ELSEWHERE = (64, "a step on another thread is being metered, and does not end")

    ANOTHER_PROFILER = (
        8,
        "another torch profiler runs in each of its steps, and a process can run one at a time",
    )
    """The user's profiler, which will end at some time: the graph is profiled until then."""

    @property
    def most(self) -> int:
        """After how many such steps in a row outcore gives up, or warns if it `passes`."""
        return self.value[0]

    @property
    def reason(self) -> str:
        """Why the graph has no plan, for the report and the warning."""
        return self.value[1]

    @property
    def passes(self) -> bool:
        """Whether the graph may still get a plan; else it runs in-core from then on."""
        return self is Obstacle.ANOTHER_PROFILER
