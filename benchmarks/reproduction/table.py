"""table: the parts of the page, in its order."""

from collections.abc import Mapping
from types import MappingProxyType

from benchmarks.kit.benchmark import Benchmark
from benchmarks.reproduction.others import recompute, vdnn
from benchmarks.reproduction.pooch import ablation, speed, table3
from benchmarks.reproduction.sony import fragmentation, window
from benchmarks.reproduction.steps import Scale
from benchmarks.reproduction.superneurons import cache, capacity, replays, workspaces

_ROWS: tuple[Benchmark[Scale], ...] = (
    Benchmark("table3", "PoocH: what is kept, offloaded, recomputed", table3),
    Benchmark("ablation", "PoocH: what each of its parts brings", ablation),
    Benchmark("speed", "PoocH: speed out of core", speed),
    Benchmark("replays", "SuperNeurons: replays and peaks in the paper's layers", replays),
    Benchmark("cache", "SuperNeurons: what the tensor cache saves", cache),
    Benchmark("capacity", "SuperNeurons: the widest and the deepest networks", capacity),
    Benchmark("workspaces", "SuperNeurons: workspaces of convolutions", workspaces),
    Benchmark("window", "Sony: speed out of core, and largest batches", window),
    Benchmark("fragmentation", "Sony: what is reserved for a schedule", fragmentation),
    Benchmark("vdnn", "vDNN: VGG-16", vdnn),
    Benchmark("recompute", "MONeT: recomputation alone", recompute),
)

BENCHMARKS: Mapping[str, Benchmark[Scale]] = MappingProxyType({row.name: row for row in _ROWS})
