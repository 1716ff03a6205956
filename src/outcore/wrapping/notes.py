"""notes: what a wrapped model is told when a call of it runs outside any graph."""

from collections.abc import Sequence

RAN_UNCOMPILED = (
    "a call inside a transform (torch.func, forward-mode AD), a dispatch mode (such as a FLOP "
    "counter or fake tensors) or torch.jit.trace ran as plain PyTorch: the budget does not cover it"
)

UNCALLED = (
    "parameters of {model} get gradients although {model} itself is not called: it runs as plain "
    "PyTorch, and the budget does not cover it. If it was compiled after outcore.wrap, by "
    "torch.compile or its compile(), leave that out: outcore compiles it. If the training loop "
    "calls other methods of it, wrap the modules that these call, in one outcore.session"
)

OTHERS = (
    "outcore: also wrapped, each with a budget of its own: {names}. This budget counts what they "
    "hold: wrap models that train together in one outcore.session, and unwrap those that are done"
)

STATE = (
    "outcore: the state of {names} takes {size} of the memory that is held outside the graph. "
    "outcore.offload_optimizer(optimizer) keeps it in a slower memory between the steps"
)

UNSEEN = (
    "a training call reached no graph: torch.compile ran it as plain PyTorch, as it does once it "
    "has compiled a function too often or met code that it cannot compile, and the budget does not "
    "cover it. "
    "TORCH_LOGS=recompiles,graph_breaks shows why"
)

UNSEEN_PART = (
    "a part of the model was called in more ways than torch.compile compiles: further ones run as "
    "plain PyTorch, and the budget does not cover them. TORCH_LOGS=recompiles shows what differs "
    "between calls"
)

UNTRACED = (
    "torch.compile fails to trace code of {model}: {reason}. That code runs as plain PyTorch, and "
    "the budget does not cover it; what it calls is planned separately, if torch can trace that"
)

UNCOMPILED = (
    "torch.compile does not compile the code that calls {names}: they run as plain PyTorch, and "
    "the budget does not cover them. TORCH_LOGS=graph_breaks shows why"
)

ALONE = (
    "parts of the model are compiled separately, each as one or more graphs, because torch.compile "
    "does not compile the code that calls them: {names}. TORCH_LOGS=graph_breaks shows why"
)

CUMULATIVE = (
    "outcore: torch.compile ends graphs at {names}, which have momentum=None: they read the number "
    "of steps in each step. With a number as momentum the model may be a single graph"
)

PLAIN_SO_FAR = (
    "outcore: parts of the model ran as plain PyTorch so far, and their memory is part of what is "
    "held outside the graph: {names}. They are compiled from the next call on: run the step again"
)

MOST_NAMED = 3
"""Modules that a note names; it counts the others."""


def listed(names: Sequence[str]) -> str:
    """Return the first `MOST_NAMED` names, and how many more there are."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
