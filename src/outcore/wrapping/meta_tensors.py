"""meta_tensors: call compiled code with a plain tensor in place of MONAI's MetaTensor.

torch.compile does not follow the bookkeeping of a MetaTensor, and ends a graph at each layer
(docs/decisions/0050).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

T = TypeVar("T")

NOTE = (
    "outcore: {model} asks a MetaTensor for its metadata. This call gave it a plain tensor; from "
    "the next one on, it gets the MetaTensor, and graphs may end at each layer. To avoid that, "
    "read the metadata outside of the model"
)
"""The note on an error of a model that turned out to read metadata."""


class MetaTensors:
    """Takes MetaTensors out of the calls of one model, and puts them back into its results."""

    def __init__(self) -> None:
        self._stay: bool | None = None
        """Whether the model may read metadata, and gets MetaTensors; None: not looked at yet."""

    def taken_out(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any], dict[int, Any]]:
        """The arguments of a call with a plain tensor for the MetaTensor among them.

        Also that, by the `id` of the plain one. Nothing is taken out if there are several: results
        could have the metadata of either. Nor of containers: the model may change those.
        """
        kind = getattr(sys.modules.get("monai.data.meta_tensor"), "MetaTensor", None)
        if kind is None or self._stay:
            return args, kwargs, {}
        found = {id(each): each for each in (*args, *kwargs.values()) if isinstance(each, kind)}
        if len(found) != 1:
            return args, kwargs, {}
        if self._stay is None:
            self._stay = _may_read(model, kind)
            if self._stay:
                return args, kwargs, {}
        ((at, meta),) = found.items()
        plain = meta.as_tensor()
        positional = tuple(plain if id(each) == at else each for each in args)
        named = {name: plain if id(each) == at else each for name, each in kwargs.items()}
        return positional, named, {id(plain): meta}

    def put_back(self, results: T, taken: dict[int, Any]) -> T:
        """The results of a call, with the metadata that MONAI's ops would give each tensor.

        `taken`: the last result of `taken_out`. A plain tensor that was given becomes the
        MetaTensor that it was.
        """
        if not taken:
            return results
        (meta,) = taken.values()
        kind, known = type(meta), dict(taken)

        def theirs(leaf: Any) -> Any:
            if type(leaf) is not torch.Tensor:
                return leaf
            if id(leaf) not in known:
                (known[id(leaf)],) = kind.update_meta([leaf.as_subclass(kind)], None, [meta], {})
            return known[id(leaf)]

        converted: T = pytree.tree_map(theirs, results)
        return converted

    def tell(self, error: AttributeError, model: nn.Module, taken: dict[int, Any]) -> None:
        """Leave MetaTensors in from the next call on if the model lacked an attribute of theirs."""
        if any(error.name is not None and hasattr(meta, error.name) for meta in taken.values()):
            self._stay = True
            error.add_note(NOTE.format(model=type(model).__name__))


def _may_read(model: nn.Module, kind: type) -> bool:
    """Whether a `forward` in `model` names the class, or an attribute that only it has."""
    names = {kind.__name__, *dir(kind)} - set(dir(torch.Tensor))
    forwards = {type(module).forward for module in model.modules()}
    codes = [code for f in forwards if not _is_torchs(f) and (code := getattr(f, "__code__", None))]
    return any(names.intersection(_names(code)) for code in codes)


def _is_torchs(forward: Any) -> bool:
    return str(getattr(forward, "__module__", "")).startswith("torch.nn.")


def _names(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes in some code, and in functions made in it."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)
