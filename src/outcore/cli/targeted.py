"""targeted: trace the step that a function of the user's script returns."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outcore.preflight.step import Traced


def traced_step(target: str, *, real: bool) -> Traced:
    """Call the target's function and trace the step that it returns. Raises TargetError."""
    from outcore.errors import TargetError  # noqa: PLC0415 - with the others
    from outcore.preflight.advice import ON_CPU, advice_for  # noqa: PLC0415 - loads torch
    from outcore.preflight.conversion import convertible  # noqa: PLC0415 - loads torch
    from outcore.preflight.lines import line_of  # noqa: PLC0415 - with the others
    from outcore.preflight.step import (  # noqa: PLC0415 - loads torch
        NEEDS_NUMBERS,
        FewNumbers,
        no_memory,
        traced,
        unlogged,
        why,
    )
    from outcore.preflight.target import find, make_step, own_arguments  # noqa: PLC0415 - loads torch

    mode = no_memory()
    with own_arguments(target):
        function = find(target)
    try:
        with ExitStack() as stack:
            stack.enter_context(own_arguments(target))
            stack.enter_context(unlogged())
            if not real:
                stack.enter_context(mode)
                stack.enter_context(FewNumbers(mode))
                stack.enter_context(convertible())
            returned = function()
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit):
            reason = f"the function ends the process (exit code {error.code})"
        elif isinstance(error, NEEDS_NUMBERS):
            reason = f"the function cannot be called: {why(error)}"
        else:
            reason = f"the function raises {why(error)}"
        advice = "" if real else "--real makes the model and its inputs with real tensors"
        advice = ON_CPU if advice_for(error) == ON_CPU else advice
        where = line_of(error)
        raise TargetError(target=target, reason=reason, where=where, advice=advice) from error
    step = make_step(target, returned)
    try:
        return traced(step, mode)
    except Exception as error:
        where, reason = line_of(error), f"the step cannot be traced: {why(error)}"
        raise TargetError(
            target=target, reason=reason, where=where, advice=advice_for(error)
        ) from error
