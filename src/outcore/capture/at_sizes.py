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

MOST = 4
"""The most patterns of a graph: each is for sizes that are captured in the same way."""

TRUSTED = 2
"""Sizes for which a pattern must have told the trace that was captured, before it is used."""


class AtSizes:
    """Captures a symbolic graph at each size: by a copy at first, later by a pattern.

    `source_of` rewrites and captures a copy.
    """

    def __init__(self, symbolic: Symbolic, source_of: Callable[[GraphModule], Source]) -> None:
        self.symbolic, self._source_of = symbolic, source_of
        self._patterns: dict[Pattern, int] = {}
        """Pattern -> sizes for which it told what was captured, after those it was made from."""
        self._without = False
        """Whether no patterns are used or looked for any more."""

    def at(self, args: Sequence[Any]) -> Source:
        """What is captured for forward inputs like `args`.

        Raises CaptureError if the graph cannot be made, or not be captured.
        """
        found = ((pattern, pattern.at(args)) for pattern in self._patterns)
        pattern, told = next((each for each in found if each[1] is not None), (None, None))
        if pattern is not None and told is not None and self._patterns[pattern] >= TRUSTED:
            pattern.family.add(told.trace)
            return self._by_pattern(args, told)
        copied, source = self._copied(args)
        if pattern is not None and told is not None:
            self._compare(pattern, told, source.captured)
        elif not self._without:
            self._learn(args, copied, source)
        return source

    def _learn(self, args: Sequence[Any], copied: Copied, source: Source) -> None:
        """Look for a pattern in what was captured, as none told it."""
        self._patterns = {p: n for p, n in self._patterns.items() if not p.outdated}
        pattern = pattern_of(self.symbolic, copied, source)
        self._without = pattern is None
        told = None if pattern is None else pattern.at(args)
        if pattern is not None and told is not None and len(self._patterns) < MOST:
            self._patterns[pattern] = -1
            self._compare(pattern, told, source.captured)

    def _copied(self, args: Sequence[Any]) -> tuple[Copied, Source]:
        copied = self.symbolic.at(args)
        return copied, self._source_of(copied.module)

    def _compare(self, pattern: Pattern, told: Captured, captured: Captured) -> None:
        """Note whether a pattern told what was captured; if not, use none any more."""
        alike = told.trace == captured.trace and told.within == captured.within
        self._patterns[pattern] += 1
        if not alike:
            self._leave()

    def _leave(self) -> None:
        """Use no patterns from now on."""
        self._patterns, self._without = {}, True

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
