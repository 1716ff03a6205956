"""looking: look for parts of a wrapped model that backward reaches and that no graph has."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from weakref import WeakSet

from torch import Tensor, nn

from outcore.wrapping.compiled import HOOKS_OF_ALL
from outcore.wrapping.frozen import PlainCalls
from outcore.wrapping.outside_graphs import (
    is_compiled_as_called,
    missing,
    unseen,
    unseen_frozen,
)
from outcore.wrapping.trained import Trained

STEPS = 2
"""Training steps whose backward shows which parameters no graph has. The second one looks again,
after more has been compiled."""


class Looking:
    """Looks at the first training calls of a model, and again when parameters are unfrozen."""

    def __init__(
        self,
        model: nn.Module,
        lookers: WeakSet[object],
        known: Callable[[nn.Module], Collection[int] | None],
        apart: Callable[[nn.Module], Collection[str]],
    ) -> None:
        """`lookers`: this adds itself as long as it looks (`Parameters.lookers`).

        `known` and `apart` are asked for what `UnseenModules` is given; None: it is not known what
        graphs have.
        """
        self._lookers, self._known, self._apart = lookers, known, apart
        self._steps_left = 0
        """In how many further training calls to look."""
        self._trained = Trained(model)
        self._most_trained = 0
        """The most parameters that a call has trained. If there are more, some were unfrozen."""
        self._unseen: UnseenModules | None = None
        """Looks in the backward of the last call."""
        self._frozen: PlainCalls | None = None
        """Looks for frozen modules in the last call."""

    def again(self) -> None:
        """Look at the next `STEPS` training calls."""
        self._stop_backward()
        self._steps_left = STEPS
        self._lookers.add(self)

    def in_call(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which to call the model: it looks for frozen modules, if any."""
        self._frozen = None
        ids = self._known(model) if self._steps_left and not any(HOOKS_OF_ALL) else None
        if ids is None:
            return nullcontext()
        paths = unseen_frozen(model, ids, self._apart(model))
        named = {path: model.get_submodule(path) for path in paths}
        modules = {
            path: module
            for path, module in named.items()
            if not is_compiled_as_called(module) and module._compiled_call_impl is None  # noqa: SLF001 - what Module.compile sets
        }
        self._frozen = PlainCalls(modules) if modules else None
        return nullcontext() if self._frozen is None else self._frozen

    def after_call(self, model: nn.Module, *, trained: bool) -> None:
        """Look in the backward of a call, if it is a training call (`trained`)."""
        if not trained:
            self._frozen = None
        now, before = self._trained.number(), self._most_trained
        if now > before:
            self._most_trained, recorded = now, len(self._lookers) > 0
            self.again()
            if before and not recorded:  # it is not known which parameters this call was given
                return
        if self._unseen is not None:
            return
        if not self._steps_left:
            self._lookers.discard(self)
        elif trained:
            self._steps_left -= 1
            ids = self._known(model)
            if ids is not None:
                found = UnseenModules(model, ids, self._apart(model))
                self._unseen = found if found.looks else None

    @property
    def found(self) -> bool:
        """Whether backward has reached such a part, or will reach a frozen one."""
        looks = self._unseen, self._frozen
        return any(look is not None and look.used for look in looks)

    def take(self, model: nn.Module) -> list[str]:
        """Return the paths of what was found, and look no more in this backward."""
        known, found, self._unseen = self._known(model), self._unseen, None
        paths = [] if found is None else found.end(model, known)
        if self._frozen is not None and known is not None:
            paths += [p for p in unseen_frozen(model, known) if p in self._frozen.used]
        self._frozen = None
        return paths

    def stop(self) -> None:
        """Look no more. Hooks on parameters are removed."""
        self._lookers.discard(self)
        self._frozen = None
        self._stop_backward()

    def _stop_backward(self) -> None:
        found, self._unseen = self._unseen, None
        if found is not None:
            found.stop()


class UnseenModules:
    """Finds torch's own modules that backward reaches although no graph has their parameters.

    It watches the next backward by hooks on parameters, so modules that a step does not use are not
    counted. Recurrent layers, which run between graphs, are not counted either. torch compiles
    modules of other classes by themselves.
    """

    def __init__(
        self, model: nn.Module, known: Collection[int], apart: Collection[str] = ()
    ) -> None:
        """`known`: ids of the parameters that graphs have. `apart`: as for `own`."""
        self._used: set[str] = set()
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(_note, self._used, path))  # type: ignore[no-untyped-call]  # torch leaves it so
            for path in unseen(model, known, apart)
            for p in missing(model.get_submodule(path), known)
            if p.is_leaf
        ]

    @property
    def looks(self) -> bool:
        """Whether there are any modules to look for."""
        return bool(self._hooks)

    @property
    def used(self) -> bool:
        """Whether backward has reached one."""
        return bool(self._used)

    def end(self, model: nn.Module, known: Collection[int] | None) -> list[str]:
        """Stop looking, and return the paths of the modules found.

        Modules whose parameters graphs have by now are left out. Returns no paths if `known` is
        None: it is not known what graphs have.
        """
        self.stop()
        if known is None:
            return []
        return [path for path in unseen(model, known) if path in self._used]

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def _note(used: set[str], path: str, _: Tensor) -> None:
    """Record that backward reached a parameter of the module at `path`."""
    used.add(path)
