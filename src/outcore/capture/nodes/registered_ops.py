"""registered_ops: register ops with torch.

outcore's own ops are there from the start. Those that are made while graphs are captured are named
by what they do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from hashlib import blake2b
from itertools import count
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.library import Library

from outcore import aten

OURS: Final = Library("outcore", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's
"""The namespace of outcore's own ops."""


def register(
    library: Library,
    schema: str,
    run: Callable[..., Any],
    describe: Callable[..., Any] | None = None,
) -> OpOverload:
    """Register an op with torch, and return it.

    `run` computes it, `describe` does so for fake tensors. None: the op is in no graph.
    """
    name = schema.partition("(")[0]
    packet, _, overload = name.partition(".")
    library.define(schema)  # type: ignore[no-untyped-call]  # torch's
    library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # torch's
    if describe is not None:
        torch.library.register_fake(f"{library.ns}::{name}", describe, lib=library)
    return aten.resolve(f"{library.ns}.{packet}.{overload or 'default'}")


class Nameable(Protocol):
    """What an op does: it takes tensors and returns tensors, none of which is a view of another."""

    @property
    def name(self) -> str:
        """A short name."""
        ...

    @property
    def identity(self) -> str:
        """All that the op does, as text: equal texts mean the same op."""
        ...

    @property
    def function(self) -> object:
        """What the text cannot express, compared by identity; None if there is nothing."""
        ...

    def run(self, given: list[Tensor], /) -> list[Tensor]:
        """Return the results."""
        ...

    def describe(self, given: list[Tensor], /) -> list[Tensor]:
        """Return the results for fake tensors."""
        ...


class NamedOps:
    """The ops of a namespace. They are never removed: torch keeps ops, and graphs come back."""

    def __init__(self, namespace: str) -> None:
        self.library = Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's
        self.lock = threading.Lock()
        self.found: dict[str, tuple[OpOverload, Nameable]] = {}
        """Name -> op, and what it does, which is kept alive by this entry."""

    def find(self, does: Nameable) -> OpOverload:
        """Return the op for `does`, `NAMESPACE::NAME_DIGEST(Tensor[] given) -> Tensor[]`.

        An op that was registered earlier is reused if its `identity` and `function` are the same.
        """
        with self.lock:
            for number in count():
                digest = blake2b(f"{does.identity}\n{number}".encode(), digest_size=6).hexdigest()
                name = f"{does.name}_{digest}"
                if name not in self.found:
                    schema = f"{name}(Tensor[] given) -> Tensor[]"
                    made = register(self.library, schema, does.run, does.describe)
                    self.found[name] = made, does
                op, known = self.found[name]
                if known.function is does.function and known.identity == does.identity:
                    return op
        raise AssertionError  # numbers do not end
