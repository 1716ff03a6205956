"""integrations: run outcore inside the training loops of other libraries (docs/integrations.md).

Each callback loads its library when it is first used, and raises MissingPackageError if the
library is not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outcore.integrations.metrics import metrics
from outcore.lazy import lazily

if TYPE_CHECKING:
    from outcore.integrations.lightning import LightningCallback
    from outcore.integrations.transformers import TransformersCallback

__all__ = ["LightningCallback", "TransformersCallback", "metrics"]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "outcore.integrations.lightning": ("LightningCallback",),
        "outcore.integrations.transformers": ("TransformersCallback",),
    },
)
