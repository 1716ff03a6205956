"""words: phrase the contents of plan files as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from outcore.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from outcore.planfile import Action, PlanFile, SavedPlan, Storage

NONE = "-"
FOR_RERUNS = "for reruns"
"""Why a storage is held that no op needs any more: ops may be recomputed from it."""


def headline(file: PlanFile, saved: SavedPlan) -> Iterator[tuple[str, str]]:
    """Rows on what a plan was made from, and its predicted figures."""
    versions, machine, budgets = file.versions, saved.machine, saved.budgets
    known = (("python", versions.python), ("torch", versions.torch))
    others = "".join(f", {name} {text}" for name, text in known if text)
    yield "policy", saved.policy or NONE
    yield "made with", f"outcore {versions.outcore}{others}"
    named = "" if machine.device == machine.name else f" ({machine.name})"
    yield "machine", f"{machine.device}{named}, times {saved.times.value}"
    for link in machine.links:
        latency = format_seconds(link.latency_seconds)
        rate = f"{format_rate(link.bytes_per_second)}, latency {latency}"
        yield "link", f"{link.source.value} to {link.target.value} at {rate}"
    tiers = (("device", budgets.device), ("host", budgets.host), ("disk", budgets.disk))
    yield "budget", ", ".join(f"{format_bytes(n)} on the {t}" for t, n in tiers if n is not None)
    yield from _predicted(saved)
    for rule in file.overrides:
        yield "override", f"{rule.match}: {rule.action}"
    digests = saved.digests
    yield "digests", f"trace {digests.trace}, profile {digests.profile}, plan {digests.plan}"


def _predicted(saved: SavedPlan) -> Iterator[tuple[str, str]]:
    said = saved.predicted
    times = f", {said.seconds / said.in_core_seconds:.3f} times in-core" * bool(
        said.in_core_seconds
    )
    yield "peak", f"{format_bytes(said.device_bytes)}, in-core {format_bytes(said.in_core_bytes)}"
    yield "step", f"{format_seconds(said.seconds)}{times} (all predicted)"
    outer = (("host", said.host_bytes), ("disk", said.disk_bytes))
    taken = ", ".join(f"{format_bytes(n)} on the {tier}" for tier, n in outer if n)
    if taken:
        yield "outside", taken
    storages = sorted(saved.storages, key=lambda storage: storage.dead)
    for action, dead in dict.fromkeys((each.action, each.dead) for each in storages):
        yield f"{action}", _moved(saved, action, dead=dead)


def _moved(saved: SavedPlan, action: Action, *, dead: bool) -> str:
    alike = (each for each in saved.storages if (each.action, each.dead) == (action, dead))
    sizes = [storage.nbytes for storage in alike]
    return f"{len(sizes)} of {format_bytes(sum(sizes))}" + f", {FOR_RERUNS}" * dead


def storage_words(storage: Storage) -> str:
    """A storage's name and buffer number."""
    return f"{storage.name} (buffer {storage.buffer})".strip()


def action_words(storage: Storage) -> str:
    """The action on a storage; if the storage is dead, also what it is held for."""
    return f"{storage.action}\n{FOR_RERUNS}" if storage.dead else storage.action


def made_words(storage: Storage) -> str:
    """The op that makes a storage, with its module and source line."""
    if storage.made is None:
        return "passed in"
    source = f"({storage.source})" if storage.source else ""
    return " ".join(filter(None, (storage.made.target, storage.module, source)))
