"""outcore hardware: list the machine presets."""

from __future__ import annotations

from rich.table import Table

from outcore.cli.screen import screen
from outcore.units import format_bytes, format_rate


def hardware() -> None:
    """List the machines with their memory, rates and links."""
    from outcore.ir.hardware import Tier  # noqa: PLC0415 - with the next
    from outcore.presets import presets  # noqa: PLC0415 - reads files; only where it is used

    table = Table("machine", "what it is")
    for name in ("memory", "its rate", "float32", "link"):
        table.add_column(name, justify="right")
    for name, found in presets().items():
        machine = found.hardware
        link = machine.link(Tier.DEVICE, Tier.HOST)
        table.add_row(
            name,
            found.summary,
            format_bytes(machine.capacity(Tier.DEVICE)),
            format_rate(machine.memory_bytes_per_second),
            f"{dict(machine.flops_per_second)['float32'] / 1e12:.3g} TFLOP/s",
            format_rate(link.bytes_per_second),
        )
    table.add_row("this-machine", "this machine, measured when it is used", *["-"] * 4)
    screen().print(table)
