"""Presets: machines of the papers, and of today, each figure with its source.

One TOML file each beside this one. Rates are the vendor's peaks; what ops reach of them is
`Efficiency`, the same for all but where a file says otherwise.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from outcore.errors import OptionValueError, did_you_mean
from outcore.estimate import TYPICAL, Efficiency
from outcore.ir.hardware import Hardware, Link, Tier
from outcore.units import parse_rate, parse_size


@dataclass(frozen=True, slots=True)
class Preset:
    """A machine by name, what ops reach of its rates, and where its figures come from."""

    hardware: Hardware
    efficiency: Efficiency
    summary: str
    sources: Mapping[str, str]


def preset(name: str) -> Preset:
    """The machine called `name`. OptionValueError names the nearest where there is none."""
    found = presets()
    if name not in found:
        raise OptionValueError(option="hardware", value=name, reason=did_you_mean(name, found))
    return found[name]


@cache
def presets() -> Mapping[str, Preset]:
    """All of them by name."""
    texts = {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in files(__name__).iterdir()
        if entry.name.endswith(".toml")
    }
    return {name: _preset(name, tomllib.loads(text)) for name, text in sorted(texts.items())}


def _preset(name: str, given: Mapping[str, Any]) -> Preset:
    device = parse_size(given["device_memory"], None)
    host = parse_size(given["host_memory"], None)
    link = Link(parse_rate(given["link_rate"]), given["link_latency_seconds"])
    hardware = Hardware(
        name=name,
        capacity_bytes=((Tier.DEVICE, device), (Tier.HOST, host)),
        links=((Tier.DEVICE, Tier.HOST, link), (Tier.HOST, Tier.DEVICE, link)),
        duplex=given["duplex"],
        flops_per_second=tuple(given["flops_per_second"].items()),
        memory_bytes_per_second=parse_rate(given["memory_rate"]),
        op_overhead_seconds=given["op_overhead_seconds"],
        rounding_bytes=((Tier.DEVICE, 512), (Tier.HOST, 512)),
    )
    efficiency = Efficiency(**given["efficiency"]) if "efficiency" in given else TYPICAL
    return Preset(hardware, efficiency, given["summary"], given["sources"])
