"""units: parse and print sizes, rates and times as people write them.

This is the only module that parses or formats numbers with units. The parsers raise plain
`ValueError` with a message that says what to write instead. The caller, who knows which option the
text came from, turns it into the error of `errors.py` that names the option.
"""

import math
import re
from fractions import Fraction
from numbers import Integral, Rational, Real
from typing import Literal

_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_DECIMAL = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_BYTES_PER_UNIT = {"B": 1, **_BINARY, **_DECIMAL}
_QUANTITY = re.compile(
    r"\s*(?P<number>[0-9]{1,99}(?:\.[0-9]{1,99})?)\s*(?P<unit>[A-Za-z%]*)\s*", re.ASCII
)
_MOST_BYTES = 2**63 - 1
_MOST_SPELLED = 200
"""Characters of a value that a message shows."""

_PRINTED_BYTES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_PRINTED_SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))


def parse_size(
    size: str | float | Fraction, total_bytes: int | None, *, least_bytes: Literal[0, 1] = 1
) -> int:
    """Return the number of bytes that `size` stands for, rounded down.

    An int is bytes. Text is a number and a unit: `"16GiB"` (binary), `"16GB"` (decimal), `"512B"`,
    or a percentage of `total_bytes`: `"80%"`. A float, or another number that is not an integer, is
    a fraction of `total_bytes`: `0.8`.

    Raises `ValueError` for anything else (`"16G"` and `"16gb"` are ambiguous), for fewer than
    `least_bytes` or 2**63 and more, for a fraction above 1, and for a fraction if `total_bytes` is
    None.
    """
    shown = spelled(size)
    if isinstance(size, bool) or not isinstance(size, str | float | Real):
        raise ValueError(  # noqa: TRY004 - one kind of error for anything that is not a size
            f'a size is text like "16GiB", an int (bytes) or a fraction like 0.8, not {shown}'
        )
    if isinstance(size, str) and size.strip() == "0" and not least_bytes:
        nbytes = 0  # zero needs no unit
    elif isinstance(size, str):
        nbytes = _parse_size_text(size, total_bytes)
    elif isinstance(size, Integral):
        nbytes = int(size)
    else:
        exact = Fraction(size) if isinstance(size, Rational) else float(size)
        nbytes = _fraction_of(exact, total_bytes, shown)
    if nbytes < least_bytes:
        least = "one byte" if least_bytes else "none"
        raise ValueError(f"{shown} is {spelled(nbytes)} bytes: a size is at least {least}")
    if nbytes > _MOST_BYTES:
        raise ValueError(f"{shown} is too large: a size is at most {_MOST_BYTES} bytes (8 EiB)")
    return nbytes


def parse_rate(rate: str | int | float) -> float:
    """Return the bytes per second that `rate` stands for.

    Text is a size per second: `"150MiB/s"`, `"1.2GB/s"`. A number is bytes per second.
    Raises `ValueError` for anything else and for a rate that is not positive and finite.
    """
    if isinstance(rate, bool) or not isinstance(rate, str | float | Real):
        raise ValueError(  # noqa: TRY004 - one kind of error for anything that is not a rate
            f'a rate is text like "150MiB/s" or bytes per second, not {spelled(rate)}'
        )
    bytes_per_second = _parse_rate_text(rate) if isinstance(rate, str) else _float(rate)
    if not (math.isfinite(bytes_per_second) and bytes_per_second > 0):
        raise ValueError(f"{spelled(rate)} is not a rate: it must be positive and finite")
    return bytes_per_second


def parse_part(part: str | float) -> float:
    """Return the fraction that `part` stands for: `"25%"`, `"0.25"` or `0.25`; 1 is the whole.

    It may exceed 1. Raises `ValueError` for anything else, and for a fraction that is not positive
    and finite.
    """
    advice = f'{spelled(part)} is not a fraction: write "25%" or 0.25'
    if isinstance(part, bool) or not isinstance(part, str | float | Real):
        raise ValueError(advice)  # noqa: TRY004 - one kind of error for anything else
    if isinstance(part, str):
        match = _QUANTITY.fullmatch(part)
        if match is None or match["unit"] not in ("", "%"):
            raise ValueError(advice)
        part = float(Fraction(match["number"]) / (100 if match["unit"] else 1))
    part = _float(part)
    if not (math.isfinite(part) and part > 0):
        raise ValueError(advice)
    return part


def spelled(value: object) -> str:
    """Return `value` as Python writes it, cut if that is long."""
    try:
        text = repr(value)
    except ValueError:  # Python spells no number of so many digits
        return "a number of thousands of digits"
    return text if len(text) <= _MOST_SPELLED else f"{text[: _MOST_SPELLED - 3]}..."


def format_bytes(nbytes: float) -> str:
    """Return a size with three digits and a binary unit: `12.0 GiB`; exact below 1 KiB: `512 B`."""
    sign, magnitude = ("-", -nbytes) if nbytes < 0 else ("", nbytes)
    for unit, bytes_per_unit in _PRINTED_BYTES:
        # A value within half a unit of the last printed digit below 1 prints as 1 of this unit.
        if magnitude >= bytes_per_unit * (1 - 2**-11):
            return f"{sign}{_three_digits(magnitude / bytes_per_unit)} {unit}"
    return f"{sign}{magnitude:.0f} B"


def spell_size(nbytes: int) -> str:
    """Return the smallest two-decimal size of at least `nbytes` that `parse_size` reads.

    For advice such as "try budget=1.44GiB": a size rounded to nearest could fall short.
    """
    for unit, bytes_per_unit in _PRINTED_BYTES:
        if nbytes >= bytes_per_unit:
            hundredths = -(-nbytes * 100 // bytes_per_unit)
            return f"{hundredths // 100}.{hundredths % 100:02d}{unit}"
    return f"{nbytes}B"


def exact_size(nbytes: int) -> str:
    """Return `nbytes` as `parse_size` reads it, in the largest unit that spells it exactly."""
    for unit, bytes_per_unit in _PRINTED_BYTES:
        if nbytes % bytes_per_unit == 0:
            return f"{nbytes // bytes_per_unit}{unit}"
    return f"{nbytes}B"


def format_seconds(seconds: float) -> str:
    """Return a time with three digits in s, ms, us or ns: `1.41 s`, `250 ms`; `0 s` for zero."""
    sign, magnitude = ("-", -seconds) if seconds < 0 else ("", seconds)
    if magnitude == 0:
        return "0 s"
    for unit, seconds_per_unit in _PRINTED_SECONDS:
        if magnitude >= seconds_per_unit * (1 - 5e-4):
            return f"{sign}{_three_digits(magnitude / seconds_per_unit)} {unit}"
    return f"{sign}{magnitude / 1e-9:.2g} ns"


def format_rate(bytes_per_second: float) -> str:
    """Return a transfer rate with three digits and a binary unit: `3.70 GiB/s`."""
    return f"{format_bytes(bytes_per_second)}/s"


def format_count(count: int) -> str:
    """Return an exact count with thousands separators: `25,557,032`."""
    return f"{count:,}"


def _parse_size_text(text: str, total_bytes: int | None) -> int:
    """Read a number with a unit, or a percentage of `total_bytes`."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f'cannot read {spelled(text)} as a size: write "16GiB", "16GB" or "80%"')
    number, unit = match["number"], match["unit"]
    if unit == "%":
        return _fraction_of(Fraction(number) / 100, total_bytes, spelled(text))
    if unit not in _BYTES_PER_UNIT:
        raise ValueError(f"cannot read {spelled(text)} as a size: {_unit_advice(number, unit)}")
    return math.floor(Fraction(number) * _BYTES_PER_UNIT[unit])


def _parse_rate_text(text: str) -> float:
    """Read a size per second."""
    size, slash, second = text.strip().rpartition("/")
    match = _QUANTITY.fullmatch(size)
    if not slash or second != "s" or match is None:
        raise ValueError(f'cannot read {spelled(text)} as a rate: write "150MiB/s" or "150MB/s"')
    number, unit = match["number"], match["unit"]
    if unit not in _BYTES_PER_UNIT:
        raise ValueError(
            f"cannot read {spelled(text)} as a rate: {_unit_advice(number, unit, '/s')}"
        )
    return float(Fraction(number) * _BYTES_PER_UNIT[unit])


def _fraction_of(fraction: float | Fraction, total_bytes: int | None, shown: str) -> int:
    """Return `fraction` of `total_bytes`, rounded down; refuse what is not a fraction."""
    if not 0 < fraction <= 1:
        raise ValueError(
            f'{shown} is not a fraction: write "80%" (above 0, at most 100 %), or a size like '
            '"16GiB", or bytes as an int'
        )
    if total_bytes is None:
        raise ValueError(
            f'{shown} is a fraction of an unknown whole: write a size like "16GiB" instead'
        )
    return math.floor(Fraction(fraction) * total_bytes)


def _unit_advice(number: str, unit: str, per: str = "") -> str:
    """Say what to write instead of a number with a unit that is unknown or ambiguous."""
    if not unit:
        return f"{number} of what? {_with_a_unit(number, per)}"
    prefix = unit[0].upper()
    if unit.lower() in ("b", "byte", "bytes"):
        return f"write {number}B{per}"
    if prefix not in "KMGTP":
        return f"there is no unit {unit!r}: write {', '.join(_BYTES_PER_UNIT)}{per and ' per s'}"
    return f"write {number}{prefix}iB{per} or {number}{prefix}B{per}"


def _with_a_unit(number: str, per: str) -> str:
    """Say what a number without a unit may stand for."""
    value = float(number)
    if value < 1:
        part = f'"{100 * value:g}%" for a part of the whole, or ' if value and not per else ""
        return f'Write {part}a size such as "1GiB{per}"'
    size = f"{number}GiB{per}, or " if value < _BYTES_PER_UNIT["KiB"] else ""
    return f"Write {size}{number}B{per} for bytes"


def _float(number: float) -> float:
    """Return `number` as a float, or infinity if it is too large for one."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _three_digits(number: float) -> str:
    """Print a number of at least about 1 with three significant digits, or all integer digits."""
    decimals = 2 if number < 9.995 else 1 if number < 99.95 else 0  # noqa: PLR2004 - see above
    return f"{number:.{decimals}f}"
