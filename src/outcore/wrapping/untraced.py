"""untraced: note why torch failed to trace code, which then ran as plain PyTorch."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy
from torch._dynamo import convert_frame
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters
from torch._subclasses import fake_tensor

from outcore.capture import leaving_uncompiled

UNTRACED = "outcore untraced"
"""Our own counter of such pieces of code. It is reset together with torch's."""


@dataclass(slots=True)
class Untraced:
    """What torch failed to trace in one call."""

    again: bool
    """Whether torch is to try again in later calls."""
    handled: BaseException | None
    """The exception that was being handled as the call began."""
    reasons: list[str] = field(default_factory=list)
    """Why, for each piece of code. Empty if torch would not log it."""
    given_up: bool = False
    """Whether torch does not try again some of the code."""


class _Current(threading.local):
    call: Untraced | None = None
    """The call of this thread that is noted; None if there is none."""


_current = _Current()


@contextmanager
def noting_untraced(*, again: bool) -> Iterator[Untraced]:
    """Let torch run uncompiled what it fails to trace, and note the reasons.

    torch's own messages about it, of dozens of lines each, are left out. `again`: torch is to try
    again in later calls, and to go on running what it compiled of that code. By default it does
    neither.
    """
    before, call = _current.call, Untraced(again, sys.exception())
    _current.call = call
    try:
        with leaving_uncompiled():
            yield call
    finally:
        _current.call, call.handled = before, None


def untraced() -> int:
    """How many pieces of code torch failed to trace."""
    return counters[UNTRACED]["total"]


def _is_to_be_logged(record: logging.LogRecord) -> bool:
    """Note why torch leaves code uncompiled, instead of a message."""
    call = _current.call
    if call is None or record.levelno < logging.WARNING or not record.exc_info:
        return True
    error = record.exc_info[1]
    if error is not None:
        counters[UNTRACED]["total"] += 1
        call.reasons.append(_cause_taken(error, call.handled))
        if call.again and isinstance(error, TorchDynamoException):
            error.frame_exec_strategy = _FrameExecStrategy(
                _FrameAction.DEFAULT, _FrameAction.DEFAULT
            )
        else:
            call.given_up = True
    return False


def _is_to_be_logged_alone(record: logging.LogRecord) -> bool:
    """Leave out what torch logs of an op that cannot be traced: the reason says it, too."""
    return _current.call is None or not record.exc_info


def _cause_taken(error: BaseException, handled: BaseException | None) -> str:
    """The first line of what led to `error`, as torch's ops say it.

    What its frames hold is forgotten: they have the inputs of the call. `handled` came before it.
    """
    chain, found = [error], error.__cause__ or error.__context__
    while found is not None and found is not handled:
        chain.append(found)
        found = found.__cause__ or found.__context__
    for each in chain:
        traceback.clear_frames(each.__traceback__)
    plain = (each for each in chain if not isinstance(each, TorchDynamoException))
    cause = next(plain, chain[-1])
    kind = "" if isinstance(cause, RuntimeError) else f"{type(cause).__name__}: "
    return kind + str(cause).partition("\n")[0]


convert_frame.log.addFilter(_is_to_be_logged)
fake_tensor.log.addFilter(_is_to_be_logged_alone)
