"""BENCHMARKS: every benchmark by name, in the order in which they run."""

from __future__ import annotations

from benchmarks.gpu.links import links
from benchmarks.gpu.questions import (
    alexnet,
    batches,
    decoder,
    hooks,
    idle,
    lengths,
    optimizer,
    precision,
    resnet,
    volumes,
)
from benchmarks.gpu.scale import Scale
from benchmarks.kit.benchmark import Benchmark

_ROWS = (
    Benchmark("links", "arithmetic, memory, and copies beside each other", links, 0.5),
    Benchmark("resnet", "ResNet-50 under a cap, policies and peers", resnet, 5),
    Benchmark("idle", "what it costs where everything fits", idle),
    Benchmark("precision", "ResNet-50 with TF32 and bfloat16 under shares", precision, 2),
    Benchmark("decoder", "GPT-2 large at a long context under shares", decoder, 1.5),
    Benchmark("lengths", "GPT-2 on texts of many lengths, with room and under a share", lengths),
    Benchmark("optimizer", "AdamW's state on the device or the host", optimizer),
    Benchmark("volumes", "3-D networks under a cap", volumes, 1.5),
    Benchmark("batches", "ResNet-50 at other batches under a cap", batches, 2),
    Benchmark("hooks", "ResNet-50 beside hooks that move all saved tensors", hooks),
    Benchmark("alexnet", "AlexNet under a share", alexnet, 0.5),
)

BENCHMARKS: dict[str, Benchmark[Scale]] = {row.name: row for row in _ROWS}
