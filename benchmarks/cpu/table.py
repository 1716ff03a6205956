"""BENCHMARKS: every benchmark by name, in the order in which they run."""

from __future__ import annotations

from benchmarks.cpu.beyond import beyond
from benchmarks.cpu.exact import exact
from benchmarks.cpu.fused import fused
from benchmarks.cpu.honest import honest
from benchmarks.cpu.idle import idle
from benchmarks.cpu.leak import leak
from benchmarks.cpu.optimizer import optimizer
from benchmarks.cpu.quick import quick
from benchmarks.cpu.returned import returned
from benchmarks.cpu.rivals import rivals
from benchmarks.cpu.scale import Scale
from benchmarks.cpu.verifier import verifier
from benchmarks.cpu.worth import worth
from benchmarks.kit.benchmark import Benchmark

_ROWS = (
    Benchmark("verifier", "faults in programs that are caught before they run", verifier),
    Benchmark("quick", "seconds from the first call to a plan", quick),
    Benchmark("honest", "predicted against measured time and memory", honest),
    Benchmark("worth", "time and memory under a budget, beside the peers", worth),
    Benchmark("rivals", "search beside the other policies, on four courses", rivals),
    Benchmark("fused", "fused kernels under a budget, beside torch's compiler", fused),
    Benchmark("idle", "what it costs where everything fits", idle),
    Benchmark("beyond", "a step that the machine's memory does not hold", beyond),
    Benchmark("returned", "results that get no gradient, beside the loss", returned),
    Benchmark("optimizer", "an optimizer's state on the disk between its steps", optimizer),
    Benchmark("leak", "memory over many steps, and without backward", leak),
    Benchmark("exact", "bitwise equal results, inside the budget", exact),
)

BENCHMARKS: dict[str, Benchmark[Scale]] = {row.name: row for row in _ROWS}
