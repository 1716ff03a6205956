"""integrations: run outcore inside the training loops of other libraries (docs/integrations.md).

Each callback loads its library when it is first used, and raises MissingPackageError if the
library is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from outcore.integrations.metrics import metrics

if TYPE_CHECKING:
    from outcore.integrations.lightning import LightningCallback
    from outcore.integrations.transformers import TransformersCallback

__all__ = ["LightningCallback", "TransformersCallback", "metrics"]

_HOMES = {
    "LightningCallback": "outcore.integrations.lightning",
    "TransformersCallback": "outcore.integrations.transformers",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
