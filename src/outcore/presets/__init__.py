"""presets: load the machine presets: the papers' machines and current ones, with sources.

Each preset is a TOML file in this folder. Rates are the vendor's peaks. `Efficiency` says what
fraction of them ops reach: it is the same for all presets, unless a file has its own.
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
    """A machine with a name, the efficiency of ops on it, and the source of each figure."""

    hardware: Hardware
    efficiency: Efficiency
    summary: str
    sources: Mapping[str, str]


def preset(name: str) -> Preset:
    """The preset called `name`. If there is none, OptionValueError names the nearest."""
    found = presets()
    if name not in found:
        reason = f"there is no machine of this name: {did_you_mean(name, found)}"
        raise OptionValueError(option="hardware", value=name, reason=reason)
    return found[name]


@cache
def presets() -> Mapping[str, Preset]:
    """All presets by name."""
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
