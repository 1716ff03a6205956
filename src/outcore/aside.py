"""aside: what of a model torch runs plainly, beside the graphs that it compiles."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from outcore.capture import recurrent_layers

OWN = "torch.nn."
"""Where the classes of modules begin that torch compiles inside other code alone."""


class Aside:
    """Which parameters of a model the next backward reaches though no graph has them.

    Autograd tells, by hooks, so that parameters that a step does not use are none of them. Nor are
    those of recurrent layers, which run between graphs.
    """

    def __init__(self, model: nn.Module, known: Collection[int]) -> None:
        self._used: list[str] = []
        apart = {id(p) for layer in recurrent_layers(model) for p in layer.parameters()}
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(_note, self._used, name))  # type: ignore[no-untyped-call]  # torch leaves it so
            for name, p in model.named_parameters()
            if p.requires_grad and p.is_leaf and id(p) not in known and id(p) not in apart
        ]

    @property
    def used(self) -> bool:
        """Whether there was one."""
        return bool(self._used)

    def end(self) -> list[str]:
        """Their names. No more are looked for."""
        for hook in self._hooks:
            hook.remove()
        return self._used


def _note(used: list[str], name: str, _: Tensor) -> None:
    used.append(name)


def owners(names: Iterable[str]) -> list[str]:
    """The modules whose parameters those are, by name, each once."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def pieces(model: nn.Module, paths: Iterable[str]) -> dict[str, nn.Module]:
    """Modules of torch's own inside `model` that hold those at `paths`, as large as may be.

    Torch compiles none of them where it does not compile what calls them; each can be compiled by
    itself. None is recurrent.
    """
    return dict(piece for path in paths for piece in _piece(model, path))


def _piece(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    while path and _stands_alone(module := model.get_submodule(path)):
        found.append((path, module))
        path = path.rpartition(".")[0]
    yield from found[-1:]


def _stands_alone(module: nn.Module) -> bool:
    """Whether it is torch's own, can be called, and has nothing that torch compiles nowhere."""
    hooked: Any = module._backward_hooks or module._backward_pre_hooks  # noqa: SLF001 - no other way
    apart = hooked or recurrent_layers(module)
    own = f"{type(module).__module__}.".startswith(OWN)
    return own and not apart and type(module).forward is not nn.Module.forward
