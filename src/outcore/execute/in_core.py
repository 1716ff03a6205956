"""in_core: run a captured graph as torch captured it, with the interface of an Executable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outcore.execute.executable import Executable

Call = Callable[[list[Any]], Any]


def in_core(forward: Call, backward: Call, forward_outputs: int, constants: int) -> Executable:
    """Make an Executable from two boxed functions: no plan, no copies.

    `forward([*inputs])` returns `forward_outputs` results, followed by what it saves for backward.
    `backward([*saved, *tangents])` returns the gradients. Both empty the list that they are given,
    so that its tensors are freed after their last use. The last `constants` arguments of the
    forward call are not passed on, because the functions hold them.
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

    return Executable(None, None, run_forward, run_backward, {}, None)


def _apart(saved: Any, results: tuple[Any, ...]) -> Any:
    """Return `saved`, or a detached copy of the tensor object if it is also a result.

    The caller's tensor owns the autograd graph, so it must not be held itself.
    """
    return saved.detach() if any(saved is r for r in results) else saved
