"""Batches: traces for any batch size, extrapolated from traces for two.

Every size in a step is an affine function of the number of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard, TypeVar

from outcore.errors import VerifyError
from outcore.ir.trace import Arg, Buffer, Op, Trace, Value

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Batches:
    """The same step with `first_samples` and with `second_samples`.

    Sizes, strides and the integers among the arguments are extrapolated linearly. Floats, such as
    the factor of a mean, are taken from `first`. So such a trace is for planning, not for running.
    """

    first_samples: int
    first: Trace
    second_samples: int
    second: Trace

    def at(self, samples: int) -> Trace:
        """The step with `samples`. Raises VerifyError if the two traces are not the same step."""
        one, two = self.first, self.second
        if self.first_samples == self.second_samples:
            raise self._apart("two batches of one size tell no slope")
        for name in ("boundary", "inputs", "outputs", "tangents", "gradients", "donations"):
            if getattr(one, name) != getattr(two, name):
                raise self._apart(f"other {name}")
        return replace(
            one,
            buffers=self._each(self._buffer, one.buffers, two.buffers, samples),
            values=self._each(self._value, one.values, two.values, samples),
            ops=self._each(self._op, one.ops, two.ops, samples),
        )

    def _each(
        self, at: Callable[[T, T, int], T], one: Sequence[T], two: Sequence[T], samples: int
    ) -> tuple[T, ...]:
        if len(one) != len(two):
            raise self._apart(f"{len(one)} and {len(two)} entries")
        return tuple(at(a, b, samples) for a, b in zip(one, two, strict=True))

    def _buffer(self, one: Buffer, two: Buffer, samples: int) -> Buffer:
        return replace(one, nbytes=self._size(one.nbytes, two.nbytes, samples))

    def _value(self, one: Value, two: Value, samples: int) -> Value:
        kinds = [(v.buffer, v.dtype, v.conj, v.neg) for v in (one, two)]
        if kinds[0] != kinds[1]:
            raise self._apart(f"{one} and {two}")
        return replace(
            one,
            shape=self._each(self._size, one.shape, two.shape, samples),
            stride=self._each(self._size, one.stride, two.stride, samples),
            offset=self._size(one.offset, two.offset, samples),
        )

    def _op(self, one: Op, two: Op, samples: int) -> Op:
        if (one.target, one.outputs, one.phase) != (two.target, two.outputs, two.phase):
            raise self._apart(f"op {one.id} {one.target} and {two.target}")
        names = [name for name, _ in one.kwargs]
        if names != [name for name, _ in two.kwargs]:
            raise self._apart(f"op {one.id} {one.target} with other arguments")
        kwargs = self._each(
            self._arg, [a for _, a in one.kwargs], [a for _, a in two.kwargs], samples
        )
        return replace(
            one,
            args=self._each(self._arg, one.args, two.args, samples),
            kwargs=tuple(zip(names, kwargs, strict=True)),
        )

    def _arg(self, one: Arg, two: Arg, samples: int) -> Arg:
        if isinstance(one, tuple) and isinstance(two, tuple):
            return self._each(self._arg, one, two, samples)
        if _whole(one) and _whole(two):
            return self._size(one, two, samples)
        if one != two and not (isinstance(one, float) and isinstance(two, float)):
            raise self._apart(f"arguments {one} and {two}")
        return one

    def _size(self, one: int, two: int, samples: int) -> int:
        """One size, extrapolated to `samples`."""
        slope, rest = divmod(two - one, self.second_samples - self.first_samples)
        if rest:
            raise self._apart(f"sizes {one} and {two}")
        size = one + slope * (samples - self.first_samples)
        if size < 0 <= min(one, two):
            raise self._apart(f"sizes {one} and {two} are below zero at {samples}")
        return size

    def _apart(self, detail: str) -> VerifyError:
        return VerifyError(
            noun="trace",
            rule="two batches of one step have the same ops, and sizes on a straight line",
            where=f"batches of {self.first_samples} and of {self.second_samples}",
            detail=detail,
        )


def _whole(arg: Arg) -> TypeGuard[int]:
    return isinstance(arg, int) and not isinstance(arg, bool)
