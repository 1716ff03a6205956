"""networks: the papers' networks and a few more, in plain PyTorch.

They are for comparisons, benchmarks and tests:

    spec = network("resnet50")
    model = spec.build(classes=2)
    batch = spec.batch(16, seed=0, classes=2)
    spec.loss(model, batch).backward()

``spec.small`` is the same network, so small that a training step takes a fraction of a second.
"""

from outcore.networks.figures import Figures, figures
from outcore.networks.photographs import photograph_batches
from outcore.networks.spec import Batch, NetworkSpec
from outcore.networks.table import NETWORKS, network

__all__ = [
    "NETWORKS",
    "Batch",
    "Figures",
    "NetworkSpec",
    "figures",
    "network",
    "photograph_batches",
]
