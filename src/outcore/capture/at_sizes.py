"""at_sizes: what is captured of one symbolic graph, size after size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import GraphModule

from outcore.capture.captured import Captured, Joint
from outcore.capture.compiler.compat import as_dynamo_compiles, plain
from outcore.capture.patterns import Pattern, pattern_of
from outcore.capture.sizes.described import described
from outcore.capture.sizes.symbolic import Copied, Symbolic
from outcore.capture.source import Rewritten, Source, source_of
from outcore.errors import CaptureError
from outcore.gc_paused import gc_paused

MOST = 4
"""The most patterns of a graph: each is for sizes that are captured in the same way."""

TRIES = 16
"""How often a pattern is looked for."""

TRUSTED = 2
"""Sizes for which a pattern must have told the trace that was captured, before it is used."""


class Copy(NamedTuple):
    """A copy of a symbolic graph, and what became of it."""

    copied: Copied
    rewritten: Rewritten
    source: Source


class AtSizes:
    """Captures a symbolic graph at each size: by a copy at first, later by a pattern.

    `rewrite` rewrites a copy, in place. Calls are for one thread at a time (`as_dynamo_compiles`).
    """

    def __init__(self, symbolic: Symbolic, rewrite: Callable[[GraphModule], Rewritten]) -> None:
        self.symbolic, self._rewrite = symbolic, rewrite
        self._patterns: dict[Pattern, int] = {}
        """Pattern -> sizes for which it told what was captured, after those it was made from."""
        self._tries = TRIES
        """How often a pattern is still looked for."""

    def at(self, args: Sequence[Any]) -> Source:
        """What is captured for forward inputs like `args`.

        Raises CaptureError if the graph cannot be made, or not be captured.
        """
        found = ((pattern, pattern.at(args)) for pattern in self._patterns)
        pattern, told = next((each for each in found if each[1] is not None), (None, None))
        if pattern is not None and told is not None and self._patterns[pattern] >= TRUSTED:
            pattern.family.add(told.trace)
            return self._by_pattern(args, told)
        copy = self.copy(args)
        if pattern is not None and told is not None:
            self._compare(pattern, told, copy.source.captured)
        else:
            self._learn(args, copy)
        return copy.source

    def copy(self, args: Sequence[Any]) -> Copy:
        """A copy for forward inputs like `args`. Raises CaptureError as `at`."""
        copied, made = self.rewritten(args)
        source = source_of(made, self.symbolic.forward_outputs, self.symbolic.static_inputs)
        return Copy(copied, made, source)

    def rewritten(self, args: Sequence[Any]) -> tuple[Copied, Rewritten]:
        """A copy that is not captured. Raises CaptureError if it cannot be made."""
        copied = self.symbolic.at(args)
        return copied, self._rewrite(copied.module)

    def leave(self) -> None:
        """Use no patterns from now on."""
        self._patterns, self._tries = {}, 0

    def _learn(self, args: Sequence[Any], copy: Copy) -> None:
        """Look for a pattern in what was captured, as none told it."""
        self._patterns = {p: n for p, n in self._patterns.items() if not p.outdated}
        if not self._tries or len(self._patterns) == MOST:
            return
        self._tries -= 1
        pattern = pattern_of(self.symbolic, *copy)
        told = None if pattern is None else pattern.at(args)
        if pattern is not None and told is not None:
            self._patterns[pattern] = -1
            self._compare(pattern, told, copy.source.captured)

    def _compare(self, pattern: Pattern, told: Captured, captured: Captured) -> None:
        """Note whether a pattern told what was captured; if not, use none any more."""
        self._patterns[pattern] += 1
        if told.trace != captured.trace or told.within != captured.within:
            self.leave()

    def _by_pattern(self, args: Sequence[Any], told: Captured) -> Source:
        later = _Later(self, args, told)
        return Source(replace(told, source=later.joint), later.dense, told=True)


class _Later:
    """What a pattern told, as a graph: made when it is asked for."""

    def __init__(self, at_sizes: AtSizes, args: Sequence[Any], told: Captured) -> None:
        self._at_sizes, self._told = at_sizes, told
        self._args = [described(plain(x)) if isinstance(x, Tensor) else x for x in args]

    def dense(self) -> GraphModule:
        """As `Source.dense`. Raises CaptureError if the copy cannot be made."""
        with as_dynamo_compiles(), gc_paused():
            return self._at_sizes.rewritten(self._args)[1].dense

    def joint(self) -> Joint:
        """As `Captured.source`, after a kernel did not do what was told: patterns are left.

        Raises CaptureError if the copy is not what was told.
        """
        with as_dynamo_compiles(), gc_paused():
            self._at_sizes.leave()
            return self._joint

    @cached_property
    def _joint(self) -> Joint:
        captured = self._at_sizes.copy(self._args).source.captured
        if captured.trace != self._told.trace:
            raise CaptureError(reason="its sizes are not captured as those before")
        return captured.source()
