"""uncompiled: what of a model torch runs plainly, beside the graphs that it compiles."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from outcore.capture import recurrent_layers

OWN = "torch.nn."
"""Where the classes of modules begin that torch compiles inside other code alone."""


class Uncompiled:
    """Which modules of torch's own the next backward reaches though no graph has their parameters.

    Autograd tells, by hooks, so that what a step does not use is none of them. Nor are recurrent
    layers, which run between graphs. Modules of others torch compiles by themselves.
    """

    def __init__(
        self, model: nn.Module, known: Collection[int], apart: Collection[str] = ()
    ) -> None:
        """`known`: the ids of parameters that graphs have. `apart`: as for `own`."""
        self._used: set[str] = set()
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(_note, self._used, path))  # type: ignore[no-untyped-call]  # torch leaves it so
            for path in own(model, apart)
            for p in _missing(model.get_submodule(path), known)
            if p.is_leaf
        ]

    @property
    def looks(self) -> bool:
        """Whether there are any to look for."""
        return bool(self._hooks)

    @property
    def used(self) -> bool:
        """Whether there was one."""
        return bool(self._used)

    def end(self, model: nn.Module, known: Collection[int] | None) -> list[str]:
        """Where they are in `model`, but for what graphs have by now. No more are looked for.

        Nowhere where what they have is not `known` any more.
        """
        self.stop()
        if known is None:
            return []
        found = ((path, model.get_submodule(path)) for path in own(model) if path in self._used)
        return [path for path, module in found if _missing(module, known)]

    def stop(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()


def _note(used: set[str], path: str, _: Tensor) -> None:
    used.add(path)


def _missing(module: nn.Module, known: Collection[int]) -> list[nn.Parameter]:
    parameters = module.parameters(recurse=False)
    return [p for p in parameters if p.requires_grad and id(p) not in known]


def own(model: nn.Module, apart: Collection[str] = ()) -> list[str]:
    """Where modules of torch's own are inside `model` that can be called and are not recurrent.

    Those at the paths `apart`, and inside them, are left out.
    """
    named = ((f"{path}.", module) for path, module in model.named_modules() if path)
    others = tuple(f"{path}." for path in apart)
    return [p[:-1] for p, module in named if _is_own(module) and not p.startswith(others)]


def _is_own(module: nn.Module) -> bool:
    callable_ = type(module).forward is not nn.Module.forward
    named = type(module).__module__.startswith(OWN)
    return named and callable_ and not recurrent_layers(module)


def pieces(model: nn.Module, paths: Iterable[str]) -> dict[str, nn.Module]:
    """The modules of torch's own inside `model` that hold those at `paths`, as large as may be.

    Torch compiles none of them where it does not compile what calls them; each can be compiled by
    itself, but for those with hooks that torch compiles nowhere.
    """
    return dict(piece for path in paths for piece in _piece(model, path))


def _piece(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    while path and _stands_alone(module := model.get_submodule(path)):
        found.append((path, module))
        path = path.rpartition(".")[0]
    yield from found[-1:]


def _stands_alone(module: nn.Module) -> bool:
    return _is_own(module) and not any(map(_is_hooked, module.modules()))


def _is_hooked(module: nn.Module) -> bool:
    hooks: Any = module._backward_hooks or module._backward_pre_hooks  # noqa: SLF001 - no other way
    return bool(hooks)
