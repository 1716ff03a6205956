"""together: plan for several networks in parallel, on all cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from benchmarks.kit.benchmark import Patience
from benchmarks.kit.rows import Row
from benchmarks.reproduction.steps import Scale


def together(
    rows_of: Callable[[str, int, Scale], Sequence[Row]],
    batches: Mapping[str, int],
    scale: Scale,
    patience: Patience,
) -> Iterator[Row]:
    """The rows of each network at its batch, in order. Each network has its own process.

    Since they run in parallel, planning is not timed here; `speed` does that.
    """
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        asked = [pool.submit(rows_of, *each, scale) for each in batches.items()]
        for each in asked:
            if patience.over():
                pool.shutdown(wait=False, cancel_futures=True)
                return
            yield from each.result()
