"""torch_backend: the backend of `torch.compile(..., backend="outcore", options={...})`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from outcore.api import Backend
from outcore.capture import passing, trace_type_checks

trace_type_checks()  # torch.compile imports this before it traces, and needs a Backend only after

_backends: dict[str, Backend] = {}


def outcore(
    module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    **asked: Any,
) -> Callable[..., Any]:
    """Compile one graph. Graphs compiled with the same options share one budget.

    Raises as `Backend` does, at the first call of what was compiled.
    """
    with passing():
        backend = backend_for(options or {})
    return backend(module, example_inputs, **asked)


def backend_for(options: Mapping[str, Any]) -> Backend:
    """Return the Backend for `options`, for example for its report.

    If the Backend for these options was closed, or there was none, a new one is made. Raises as
    `Backend` does.
    """
    key = json.dumps(dict(options), sort_keys=True, default=str)
    if key not in _backends or _backends[key].closed:
        _backends[key] = Backend(**options)
    return _backends[key]
