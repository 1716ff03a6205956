"""at_sizes: what is captured of one symbolic graph, size after size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from outcore.capture.compiler.compat import plain
from outcore.capture.graph import Captured, Joint
from outcore.capture.pattern import Pattern, pattern_of
from outcore.capture.sizes.described import described
from outcore.capture.sizes.symbolic import Copied, Symbolic
from outcore.capture.source import Source
from outcore.errors import CaptureError

TRUSTED = 2
"""Sizes for which a pattern must have told the trace that was captured, before it is used."""


class AtSizes:
    """Captures a symbolic graph at each size: by a copy at first, later by a pattern.

    `source_of` rewrites and captures a copy.
    """

    def __init__(self, symbolic: Symbolic, source_of: Callable[[GraphModule], Source]) -> None:
        self.symbolic, self._source_of = symbolic, source_of
        self._pattern: Pattern | None = None
        self._agreed = 0
        """Sizes for which the pattern told what was captured."""
        self._without = False
        """Whether no pattern is looked for any more."""

    def at(self, args: Sequence[Any]) -> Source:
        """What is captured for forward inputs like `args`.

        Raises CaptureError if the graph cannot be made, or not be captured.
        """
        told = None if self._pattern is None else self._pattern.at(args)
        if told is not None and self._agreed >= TRUSTED:
            return self._by_pattern(args, told)
        copied, source = self._copied(args)
        if self._pattern is None and not self._without:
            self._pattern, self._agreed = pattern_of(self.symbolic, copied, source), -1
            self._without = self._pattern is None
            told = None if self._pattern is None else self._pattern.at(args)
        if told is not None:
            self._compare(told, source.captured)
        elif self._agreed < 0:  # it does not fit the sizes that it was made from
            self._pattern = None
        return source

    def _copied(self, args: Sequence[Any]) -> tuple[Copied, Source]:
        copied = self.symbolic.at(args)
        return copied, self._source_of(copied.module)

    def _compare(self, told: Captured, captured: Captured) -> None:
        """Note whether the pattern told what was captured; if not, use none any more."""
        alike = told.trace == captured.trace and told.within == captured.within
        self._agreed += 1
        if not alike:
            self._leave()

    def _leave(self) -> None:
        """Use no pattern from now on."""
        self._pattern, self._without = None, True

    def _by_pattern(self, args: Sequence[Any], told: Captured) -> Source:
        later = _Later(self._copied, args, told)

        def joint() -> Joint:
            self._leave()  # a kernel does not do what was captured
            return later.joint()

        return Source(replace(told, source=joint), later.dense, None, None)


class _Later:
    """The source of what a pattern told: a copy, made when it is asked for."""

    def __init__(
        self,
        make: Callable[[Sequence[Any]], tuple[Copied, Source]],
        args: Sequence[Any],
        told: Captured,
    ) -> None:
        self._make, self._told = make, told
        self._args = [described(plain(x)) if isinstance(x, Tensor) else x for x in args]

    @cached_property
    def _source(self) -> Source:
        return self._make(self._args)[1]

    def dense(self) -> GraphModule:
        """As `Source.dense`."""
        return self._source.dense()

    def joint(self) -> Joint:
        """As `Captured.source`. Raises CaptureError if the copy is not what the pattern told."""
        captured = self._source.captured
        if captured.trace != self._told.trace:
            raise CaptureError(reason="its sizes are not captured as those before")
        return captured.source()
