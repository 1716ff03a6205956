"""registered_ops: register ops with torch while graphs are captured, named by what they do."""

from __future__ import annotations

import threading
from hashlib import blake2b
from itertools import count
from typing import Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload


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
        self.namespace = namespace
        self.library = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's
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
                    self.found[name] = self._define(name, does), does
                op, known = self.found[name]
                if known.function is does.function and known.identity == does.identity:
                    return op
        raise AssertionError  # numbers do not end

    def _define(self, name: str, does: Nameable) -> OpOverload:
        self.library.define(f"{name}(Tensor[] given) -> Tensor[]")  # type: ignore[no-untyped-call]  # torch's
        self.library.impl(name, does.run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # torch's
        torch.library.register_fake(f"{self.namespace}::{name}", does.describe, lib=self.library)
        found: OpOverload = getattr(getattr(torch.ops, self.namespace), name).default
        return found
