"""Ops that are made while graphs are captured, and known by what they do."""

from __future__ import annotations

import threading
from hashlib import blake2b
from itertools import count
from typing import Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload


class Nameable(Protocol):
    """What an op does: it takes tensors and gives tensors, none of which is a view of another."""

    @property
    def name(self) -> str:
        """In short."""
        ...

    @property
    def told(self) -> str:
        """In full: what is told alike does the same."""
        ...

    @property
    def function(self) -> object:
        """What no text tells; None: nothing."""
        ...

    def run(self, given: list[Tensor], /) -> list[Tensor]:
        """Its results."""
        ...

    def describe(self, given: list[Tensor], /) -> list[Tensor]:
        """The same for fake tensors."""
        ...


class NamedOps:
    """The ops of a namespace. They stay: torch keeps ops, and graphs come again."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.library = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's
        self.lock = threading.Lock()
        self.found: dict[str, tuple[OpOverload, Nameable]] = {}
        """By name; with what it does, by which that stays alive."""

    def find(self, does: Nameable) -> OpOverload:
        """`NAMESPACE::NAME_DIGEST(Tensor[] given) -> Tensor[]`: an earlier one if told alike."""
        with self.lock:
            for number in count():
                digest = blake2b(f"{does.told}\n{number}".encode(), digest_size=6).hexdigest()
                name = f"{does.name}_{digest}"
                if name not in self.found:
                    self.found[name] = self._define(name, does), does
                op, known = self.found[name]
                if known.function is does.function and known.told == does.told:
                    return op
        raise AssertionError  # numbers do not end

    def _define(self, name: str, does: Nameable) -> OpOverload:
        self.library.define(f"{name}(Tensor[] given) -> Tensor[]")  # type: ignore[no-untyped-call]  # torch's
        self.library.impl(name, does.run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # torch's
        torch.library.register_fake(f"{self.namespace}::{name}", does.describe, lib=self.library)
        found: OpOverload = getattr(getattr(torch.ops, self.namespace), name).default
        return found
