"""Obstacle: why a step of a graph that is profiled could not be metered."""

from __future__ import annotations

from enum import Enum


class Obstacle(Enum):
    """With the most such steps in a row that are waited for, and the reason to wait no more."""

    OTHER_THREADS = (4, "each of its steps runs on another thread, unseen by the meter")
    """Nothing can be read of a step whose thread has gone on to other work."""

    INSIDE_BACKWARD = (
        8,
        (
            "its forward call runs inside a backward call, where no meter can begin: with "
            "torch.utils.checkpoint, use_reentrant=False avoids this"
        ),
    )

    METERED_ELSEWHERE = (64, "a step on another thread is metered, and does not end")

    ANOTHER_PROFILER = (
        8,
        "another profiler of torch runs in each of its steps, and a process can run one at a time",
    )
    """It is the user's, who will end it some day: the graph goes on being profiled."""

    @property
    def most(self) -> int:
        """So many steps in a row are waited for."""
        return self.value[0]

    @property
    def reason(self) -> str:
        """Why the graph has no plan after that."""
        return self.value[1]

    @property
    def passes(self) -> bool:
        """Whether a plan may come yet; else the graph runs in-core from then on."""
        return self is Obstacle.ANOTHER_PROFILER
