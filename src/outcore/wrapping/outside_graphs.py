"""outside_graphs: which parts of a model run outside of all graphs, and which can be compiled."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from outcore.capture import recurrent_layers

OWN = "torch.nn."
"""Prefix of torch's own module classes, which torch compiles only as part of other code."""


def missing(module: nn.Module, known: Collection[int]) -> list[nn.Parameter]:
    """Return the module's direct trained parameters that are not in `known`."""
    parameters = module.parameters(recurse=False)
    return [p for p in parameters if p.requires_grad and id(p) not in known]


def own(model: nn.Module, apart: Collection[str] = ()) -> list[str]:
    """Return the paths of torch's own modules inside `model` that are callable and not recurrent.

    With those of scripted modules, which torch does not compile either. Modules at the paths
    `apart`, and inside them, are left out.
    """
    named = ((f"{path}.", module) for path, module in model.named_modules() if path)
    others = tuple(f"{path}." for path in apart)
    return [p[:-1] for p, m in named if _is_alone(m) and not p.startswith(others)]


def unseen(model: nn.Module, known: Collection[int], apart: Collection[str] = ()) -> list[str]:
    """Return those of the paths `own` whose modules have trained parameters not in `known`."""
    return [path for path in own(model, apart) if missing(model.get_submodule(path), known)]


def unseen_frozen(
    model: nn.Module, known: Collection[int], apart: Collection[str] = ()
) -> list[str]:
    """Return those of the paths `own` whose modules are frozen, with parameters not in `known`."""
    frozen = {path for path, m in model.named_modules() if _is_unseen(m, known)}
    return [path for path in own(model, apart) if path in frozen] if frozen else []


def _is_unseen(module: nn.Module, known: Collection[int]) -> bool:
    """Whether the module has direct parameters, all of them frozen, and one is not in `known`."""
    direct = list(module.parameters(recurse=False))
    frozen = not any(p.requires_grad for p in direct)
    return frozen and any(id(p) not in known for p in direct)


def _is_alone(module: nn.Module) -> bool:
    """Whether torch compiles the module only as part of other code, or not at all."""
    return _is_own(module) or _is_scripted(module)


def _is_scripted(module: nn.Module) -> bool:
    """Whether the module is scripted. Its class has no `forward`."""
    return isinstance(module, torch.jit.ScriptModule)


def _is_own(module: nn.Module) -> bool:
    """Whether the module is torch's own, can be called, and has no recurrent layers."""
    kind = type(module)
    if not kind.__module__.startswith(OWN):  # nor is it scripted
        return False
    return kind.forward is not nn.Module.forward and not recurrent_layers(module)


def pieces(
    model: nn.Module, paths: Iterable[str], tried: Container[nn.Module] = ()
) -> dict[str, nn.Module]:
    """Return the largest of torch's own modules inside `model` that contain the modules at `paths`.

    torch compiles none of them if it does not compile their caller. Each can be compiled
    separately, except modules with hooks that torch compiles nowhere. Those that were `tried` are
    left out: something inside them ends graphs.
    """
    return dict(piece for path in paths for piece in _piece(model, path, tried))


def _piece(
    model: nn.Module, path: str, tried: Container[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest module that contains the one at `path` and can be compiled separately."""
    found: list[tuple[str, nn.Module]] = []
    while path and _stands_alone(module := model.get_submodule(path)):
        found.append((path, module))
        path = path.rpartition(".")[0]
    yield from [piece for piece in found if piece[1] not in tried][-1:]


def is_called_by_own(model: nn.Module, path: str) -> bool:
    """Whether the module at `path` is called by another one of torch's own."""
    while path:
        path = path.rpartition(".")[0]
        caller = model.get_submodule(path)
        if _is_scripted(caller) or type(caller).forward is not nn.Module.forward:  # unlike lists
            return _is_own(caller)
    return False


def _stands_alone(module: nn.Module) -> bool:
    """Whether the module can be compiled separately."""
    return _is_own(module) and not any(map(_is_hooked, module.modules()))


def _is_hooked(module: nn.Module) -> bool:
    hooks: Any = module._backward_hooks or module._backward_pre_hooks  # noqa: SLF001 - no other way
    return bool(hooks)


def is_compiled_as_called(module: nn.Module) -> bool:
    """Whether torch compiles calls of the module by its entry point, not by its class's `forward`.

    It does so for modules with hooks, and for those whose `forward` was replaced.
    """
    hooks: Any = module._forward_hooks or module._forward_pre_hooks  # noqa: SLF001 - no other way
    return bool(hooks) or _is_hooked(module) or "forward" in vars(module)
