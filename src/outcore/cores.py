"""cores: how many threads can work at once."""

import os


def usable_cores() -> int:
    """How many of the machine's cores this thread may run on."""
    usable = getattr(os, "sched_getaffinity", None)  # some systems do not have it
    return len(usable(0)) if usable is not None else os.cpu_count() or 1
