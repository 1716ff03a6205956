"""out_of_memory: show what would fit, after a script ran out of memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule

from outcore.measure import causes, ran_out
from outcore.policies import resolve
from outcore.preflight.forecast import Forecast, forecast
from outcore.preflight.lines import line_of
from outcore.preflight.optimizers import OptimizerState, held_for
from outcore.preflight.room import let_go, room_bytes
from outcore.preflight.step import Step, no_memory, traced, why
from outcore.preflight.watch import CallWatch, again, shapes
from outcore.preflight.words import rows, verdict, what_to_do
from outcore.presets import Preset, preset, presets
from outcore.runtime.settings.options import DEFAULT_POLICY, make_options
from outcore.runtime.this_machine import this_machine
from outcore.units import format_bytes

ANY_MACHINE = "h100"
"""Used if this machine cannot be measured: memory figures do not depend on its speed."""

AROUND = ("DataParallel", "DistributedDataParallel")
"""Class names of wrappers around the module that is trained."""

WIDTH = 17
LISTED = 4
"""How many shapes of inputs are written out."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """All that is known of a step that did not fit."""

    model: str
    """Class name of the model."""
    device: torch.device
    found: Forecast
    """What the step needs, and whether a plan fits."""
    times: bool
    """Whether the machine's speed is known, so that times mean something."""
    inputs: str
    """Shapes of the inputs, as text."""
    held: OptimizerState
    """What the optimizers hold."""
    others: tuple[str, ...]
    """Class names of other modules that the script trains."""
    note: str
    """How training would differ from the trace; empty if it would not."""


def tell(error: BaseException, watch: CallWatch) -> None:
    """Write what would fit to standard error, if `error` is an out-of-memory error.

    Releases what the script holds, except its model.
    """
    if not ran_out(error):
        return
    try:
        found = _outlook(error, watch)
        lines = ["outcore: no module was being trained"] if found is None else list(_lines(found))
    except Exception as failed:  # noqa: BLE001 - the script's own error was shown, and nothing may replace it
        where = line_of(failed)
        place = f", at {where}" if where else ""
        lines = [f"outcore: could not estimate what would fit: {why(failed)}{place}"]
    sys.stderr.write("\n".join(["", *lines, ""]))
    sys.stderr.flush()


def _outlook(error: BaseException, watch: CallWatch) -> Outlook | None:
    for each in causes(error):
        watch.look_back(each.__traceback__)
    call = watch.last
    model = None if call is None else call.module()
    if call is None or model is None:
        return None
    inner = _inner(model)
    held = held_for(inner)
    let_go(error)
    mode = no_memory()
    with mode:
        args, kwargs = again(call.args), again(call.kwargs)
    device = next(inner.parameters()).device
    step = traced(Step(_as_called(inner, watch.half, device), args, kwargs), mode)
    room = room_bytes(device, inner)
    machine, times = _machine(device)
    policy = resolve(make_options({}).policy or DEFAULT_POLICY)
    found = forecast(step.trace, machine, room, policy, held.nbytes, step.unused_bytes)
    inputs = [str(each) for each in shapes([call.args, call.kwargs])]
    more = f" and {len(inputs) - LISTED} more" if len(inputs) > LISTED else ""
    return Outlook(
        type(inner).__name__,
        device,
        found,
        times,
        ", ".join(inputs[:LISTED]) + more,
        held,
        tuple(name for name in watch.called if name != type(model).__name__),
        step.note,
    )


def _inner(model: nn.Module) -> nn.Module:
    """The module that is trained, without wrappers that compile or replicate it."""
    while True:
        if isinstance(model, OptimizedModule):
            model = model._orig_mod  # noqa: SLF001 - what torch.compile was given
        elif type(model).__name__ in AROUND:
            model = model.get_submodule("module")
        else:
            return model


def _as_called(
    model: nn.Module, half: torch.dtype | None, device: torch.device
) -> Callable[..., Any]:
    """The model under the autocast under which it was called."""
    if half is None:
        return model

    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, half):
            return model(*args, **kwargs)

    return cast


def _machine(device: torch.device) -> tuple[Preset, bool]:
    """This machine, and whether its times are known. Measuring it needs some memory."""
    try:
        return this_machine(), True
    except Exception:  # noqa: BLE001 - measuring may fail in any way
        name = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else ""
        alike = [each for each in presets() if each in name]
        return preset(alike[0] if alike else ANY_MACHINE), bool(alike)


def _lines(outlook: Outlook) -> Iterator[str]:
    found = outlook.found
    needed, room = format_bytes(found.in_core_peak_bytes), format_bytes(found.budget_bytes)
    device = "this GPU" if outlook.device.type == "cuda" else "this process"
    yield (
        f"outcore: a training step of {outlook.model} needs {needed} in-core, and {device} has "
        f"{room} available (all predicted)"
    )
    if found.fits_in_core:
        yield "That would fit: other memory that the script holds is not in these figures."
    else:
        yield verdict(found, times=outlook.times)
    for name, text in rows(found, times=outlook.times):
        yield f"{name:<{WIDTH}}{text}"
    yield f"{'counted':<{WIDTH}}inputs {outlook.inputs}; optimizer: {_counted(outlook.held)}"
    unknown = "".join(f"the state of {each}, " for each in outlook.held.unknown)
    not_counted = f"{unknown}memory of the loss itself, and all else that the script holds"
    yield f"{'not counted':<{WIDTH}}{not_counted}"
    if outlook.others:
        yield f"{'':<{WIDTH}}other modules that it trains: {', '.join(outlook.others)}"
    if outlook.note:
        yield f"{'in training':<{WIDTH}}{outlook.note}"
    name, text = what_to_do(found, found.budget_bytes)
    yield f"{name:<{WIDTH}}{text}"


def _counted(held: OptimizerState) -> str:
    if not held.names:
        return "no optimizer was found"
    told = f"{', '.join(held.names)} {format_bytes(held.nbytes)}"
    return f"{told}, and more not known yet" if held.unknown else told
