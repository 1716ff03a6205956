"""in_core: a captured graph run as torch captured it, behind the same two calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outcore.execute.executable import Executable

Call = Callable[[list[Any]], Any]


def in_core(forward: Call, backward: Call, forward_outputs: int, constants: int) -> Executable:
    """An Executable of two boxed functions; no plan, no copies.

    `forward([*inputs])` returns `forward_outputs` results and then what it saves;
    `backward([*saved, *tangents])` returns the gradients. Both empty the list they are given, so
    that what they read dies at its last use. The last `constants` arguments of the forward call are
    not passed on: the functions hold them.
    """

    def run_forward(arguments: list[Any], _: object) -> tuple[tuple[Any, ...], list[Any]]:
        inputs = arguments[: len(arguments) - constants]
        arguments.clear()
        made = forward(inputs)
        results = tuple(made[:forward_outputs])
        return results, [_apart(s, results) for s in made[forward_outputs:]]

    def run_backward(crossing: list[Any], tangents: list[Any], _: object) -> tuple[Any, ...]:
        given = [*crossing, *tangents]
        crossing.clear()
        tangents.clear()
        return tuple(backward(given))

    return Executable(None, run_forward, run_backward, {}, "")


def _apart(saved: Any, results: tuple[Any, ...]) -> Any:
    """`saved`, but not the very object given to the caller, which owns the graph."""
    return saved.detach() if any(saved is r for r in results) else saved
