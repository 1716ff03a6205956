"""capture: turn a PyTorch training step into a Trace."""

from __future__ import annotations

from outcore.capture.at_sizes import AtSizes
from outcore.capture.captured import Captured
from outcore.capture.compiler.compat import (
    aot_autograd,
    as_dynamo_compiles,
    as_it_lies,
    boxed,
    compiles_autograd,
    default_partition,
    is_batched,
    is_within,
    keeps_graph,
    leaving_uncompiled,
    must_run_uncompiled,
    noticing_changes,
    partition_later,
    plain,
    stand_in_survives,
    under_checkpoint,
    without_autocast,
    without_function_modes,
)
from outcore.capture.compiler.error_passthrough import ending_graphs, passing
from outcore.capture.compiler.own_globals import own_globals
from outcore.capture.compiler.recurrent import is_recurrent, recurrent_apart, recurrent_layers
from outcore.capture.compiler.shells import Shells, shells
from outcore.capture.compiler.tracing import as_kernels
from outcore.capture.compiler.type_checks import trace_type_checks
from outcore.capture.fusion.fuse import fused
from outcore.capture.graph import capture
from outcore.capture.offline import trace, trace_as_run, trace_network
from outcore.capture.recapture import capture_again
from outcore.capture.rewrites.batch_norm import by_cudnn
from outcore.capture.rewrites.metadata_only import LargeInputs
from outcore.capture.rewrites.missing import Missing
from outcore.capture.rewrites.opaque import as_ops
from outcore.capture.rewrites.sparse import SparseGradients
from outcore.capture.sizes.by_sizes import BySizes, is_symbolic
from outcore.capture.sizes.symbolic import Symbolic, UnknownSizesError
from outcore.capture.source import Source, rewritten, source_of

__all__ = [
    "AtSizes",
    "BySizes",
    "Captured",
    "LargeInputs",
    "Missing",
    "Shells",
    "Source",
    "SparseGradients",
    "Symbolic",
    "UnknownSizesError",
    "aot_autograd",
    "as_dynamo_compiles",
    "as_it_lies",
    "as_kernels",
    "as_ops",
    "boxed",
    "by_cudnn",
    "capture",
    "capture_again",
    "compiles_autograd",
    "default_partition",
    "ending_graphs",
    "fused",
    "is_batched",
    "is_recurrent",
    "is_symbolic",
    "is_within",
    "keeps_graph",
    "leaving_uncompiled",
    "must_run_uncompiled",
    "noticing_changes",
    "own_globals",
    "partition_later",
    "passing",
    "plain",
    "recurrent_apart",
    "recurrent_layers",
    "rewritten",
    "shells",
    "source_of",
    "stand_in_survives",
    "trace",
    "trace_as_run",
    "trace_network",
    "trace_type_checks",
    "under_checkpoint",
    "without_autocast",
    "without_function_modes",
]
