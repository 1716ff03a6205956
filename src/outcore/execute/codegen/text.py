"""text: pieces of generated Python."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

_NAME: Final = re.compile(r"\b[skr][0-9]+\b")

_NAME_OR_TEXT: Final = re.compile(rf"""({_NAME.pattern})|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""")


def apart(outputs: Sequence[str]) -> Iterator[str]:
    """Forward's `outputs`, each as an object of its own that is no view of another one.

    In the captured graph, `detach` makes another object of the same Value. Autograd goes by objects
    when it is told which outputs are not differentiable, and a view of an output belongs to its
    graph.
    """
    whole, given = {text for text in outputs if text.isidentifier()}, set[str]()

    def detached(name: re.Match[str]) -> str:
        return f"{name[0]}.detach()" if name[0] in whole else name[0]

    for text in outputs:
        yield text if text in whole - given else _NAME.sub(detached, text)
        given.add(text)


def made_once(gradients: Sequence[str]) -> tuple[list[str], list[str]]:
    """Lines that make each view among `gradients` that occurs several times, and new `gradients`.

    All gradients that are one view in the captured graph must be one tensor object: as the gradient
    of a parameter, autograd takes a tensor that nobody else holds without a copy. Objects of their
    own would leave several parameters with gradients in the same memory.
    """
    often = Counter(text for text in gradients if not text.isidentifier())
    names = {text: f"g{i}" for i, text in enumerate(often) if often[text] > 1}
    lines = [f"{name} = {text}" for text, name in names.items()]
    return lines, [names.get(text, text) for text in gradients]


def tuple_of(results: Iterable[str]) -> str:
    """A tuple of `results`, as text."""
    return "(" + "".join(f"{result}, " for result in results) + ")"


def unpack(names: Iterable[str], source: str) -> list[str]:
    """Lines that bind `names` to the items of the list `source` and empty it."""
    names = list(names)
    unpack = [f"{', '.join(names)}, = {source}"] if names else []
    return [*unpack, f"{source}.clear()"]


def indented(lines: Iterable[str]) -> Iterator[str]:
    """`lines`, one level deeper."""
    return (f"    {line}" for line in lines)


def names_in(line: str) -> list[str]:
    """Local names of slots, copies and generator states in `line`; text that ops get has none."""
    return [name for name in _NAME_OR_TEXT.findall(line) if name]
