"""units: parse and format sizes, rates, times, counts and fractions."""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from outcore.units import (
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    parse_part,
    parse_rate,
    parse_size,
    spell_size,
)

GIB = 2**30
sizes = st.integers(min_value=1, max_value=2**50)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1B", 1),
        ("512 B", 512),
        ("1KiB", 1024),
        ("1kB", 1000),
        ("1KB", 1000),
        ("2MiB", 2 * 2**20),
        ("2MB", 2_000_000),
        ("16GiB", 16 * GIB),
        ("16GB", 16_000_000_000),
        (" 1.5 GiB ", 3 * GIB // 2),
        ("0.3KiB", 307),
        ("1TiB", 2**40),
        ("1TB", 10**12),
        ("2PiB", 2**51),
        ("2PB", 2 * 10**15),
        ("80%", 80),
        ("12.5 %", 12),
        ("100%", 100),
        (0.8, 80),
        (1.0, 100),
        (Fraction(7, 10), 70),
        (np.float32(0.5), 50),
        (7, 7),
        (np.int32(7), 7),
    ],
)
def test_parse_size_reads_what_users_write(text, nbytes):
    assert parse_size(text, 100) == nbytes


@pytest.mark.parametrize("text", ["16G", "16gb", "16Gb", "16g", "16gib", "16GIB", "16Gib"])
def test_ambiguous_units_are_refused_with_both_readings(text):
    with pytest.raises(ValueError, match="write 16GiB or 16GB"):
        parse_size(text, None)


@pytest.mark.parametrize(
    ("size", "advice"),
    [
        ("512m", "write 512MiB or 512MB"),
        ("12 bananas", "no unit 'bananas': write B, KiB, MiB"),
        ("1024 b", "write 1024B$"),
        ("3 bytes", "write 3B$"),
        ("16", "Write 16GiB, or 16B for bytes"),
        ("0.8", 'Write "80%" for a part'),
        ("0", "a size such as"),
        ("1073741824", "Write 1073741824B for bytes"),
        ("", "cannot read"),
        ("auto", "cannot read"),
        ("-16GiB", "cannot read"),
        ("1e9B", "cannot read"),
        ("1_000B", "cannot read"),
        ("\N{ARABIC-INDIC DIGIT ONE}GiB", "cannot read"),
        ("GiB", "cannot read"),
        ("80%%", "write"),
        (True, "text like"),
        (None, "text like"),
        ([1], "text like"),
        (0, "at least one byte"),
        (-5, "at least one byte"),
        ("0GiB", "at least one byte"),
        ("0%", "not a fraction"),
        ("101%", "not a fraction"),
        (0.0, "not a fraction"),
        (-0.5, "not a fraction"),
        (1.5, "not a fraction"),
        (16e9, "bytes as an int"),
        (math.nan, "not a fraction"),
        (math.inf, "not a fraction"),
    ],
)
def test_what_is_no_size_is_refused_with_advice(size, advice):
    with pytest.raises(ValueError, match=advice):
        parse_size(size, 100)


@pytest.mark.parametrize("size", ["80%", 0.8])
def test_a_fraction_needs_a_whole(size):
    with pytest.raises(ValueError, match="unknown whole"):
        parse_size(size, None)


def test_a_fraction_of_less_than_a_byte_is_refused():
    with pytest.raises(ValueError, match="0 bytes"):
        parse_size("1%", 50)


@given(sizes)
def test_a_size_in_any_unit_is_exact(nbytes):
    assert parse_size(nbytes, None) == nbytes
    assert parse_size(f"{nbytes}B", None) == nbytes
    few = min(nbytes, 2**33 - 1)
    assert parse_size(f"{few}GiB", None) == few * GIB
    assert parse_size(f"{few}GB", None) == few * 10**9


@pytest.mark.parametrize("nines", [20, 60, 400, 5000])
@pytest.mark.parametrize("sign", ["", "-"])
def test_numbers_of_any_length_are_refused_in_few_words(nines, sign):
    number = f"{sign}{'9' * nines}"
    value = 10**nines * (-1 if sign else 1)
    most = nines > 99 or sign  # others are rates and parts
    refused: list[Callable[[], object]] = [
        *(partial(parse_size, size, None) for size in (value, f"{number}GiB", f"{number}B")),
        *(partial(parse_rate, rate) for rate in (value, f"{number}GiB/s") if most),
        *(partial(parse_part, part) for part in (value, number) if most),
    ]
    for parse in refused:
        with pytest.raises(ValueError, match=r"size|rate|fraction") as caught:
            parse()
        assert len(str(caught.value)) < 500


@given(st.integers(1, 100), st.integers(100, 2**50))
def test_percent_and_fraction_agree_and_stay_within_the_whole(percent, total):
    nbytes = parse_size(f"{percent}%", total)
    assert nbytes == percent * total // 100
    assert abs(parse_size(percent / 100, total) - nbytes) <= 1


@given(st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none()))
def test_parse_size_returns_a_positive_int_or_raises_value_error(size):
    try:
        nbytes = parse_size(size, 2**40)
    except ValueError as error:
        assert str(error)  # noqa: PT017 - both outcomes are allowed, each has its shape
    else:
        assert type(nbytes) is int
        assert nbytes >= 1


@given(sizes)
def test_a_printed_size_reads_back_to_three_digits(nbytes):
    # Off by at most half of the last digit, and what is below a byte.
    near = pytest.approx(nbytes, abs=0.0051 * nbytes + 1)
    assert parse_size(format_bytes(nbytes), None) == near


@given(st.integers(1, 1023))
def test_small_sizes_print_exactly(nbytes):
    assert format_bytes(nbytes) == f"{nbytes} B"


@given(sizes)
def test_a_spelled_size_is_enough_and_hardly_more(nbytes):
    spelled = parse_size(spell_size(nbytes), None)
    assert nbytes <= spelled <= nbytes * 1.01


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * 1024 - 1, "10.0 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (12 * GIB, "12.0 GiB"),
        (1.5 * GIB, "1.50 GiB"),
        (GIB - 1, "1.00 GiB"),
        (640 * GIB, "640 GiB"),
        (5000 * GIB, "5000 GiB"),
        (-3 * 2**20, "-3.00 MiB"),
    ],
)
def test_format_bytes(nbytes, text):
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1.4142, "1.41 s"),
        (61.27, "61.3 s"),
        (3600, "3600 s"),
        (0.25, "250 ms"),
        (0.99996, "1.00 s"),
        (1e-6, "1.00 us"),
        (3.21e-5, "32.1 us"),
        (5e-9, "5.00 ns"),
        (1e-10, "0.1 ns"),
        (-0.5, "-500 ms"),
    ],
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


@given(st.floats(min_value=1e-9, max_value=1e9))
def test_a_printed_time_is_true_to_three_digits(seconds):
    number, unit = format_seconds(seconds).split()
    scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]
    assert float(number) * scale == pytest.approx(seconds, rel=0.0051)


@pytest.mark.parametrize(
    ("rate", "bytes_per_second"),
    [
        ("150MiB/s", 150 * 2**20),
        ("1.2 GB/s", 1.2e9),
        (" 64 B/s", 64),
        (12.5, 12.5),
        (10**9, 1e9),
    ],
)
def test_parse_rate_reads_what_users_write(rate, bytes_per_second):
    assert parse_rate(rate) == bytes_per_second
    assert type(parse_rate(rate)) is float


@pytest.mark.parametrize(
    ("rate", "advice"),
    [
        ("150MiB", '"150MiB/s"'),
        ("150mb/s", "write 150MiB/s or 150MB/s"),
        ("150/s", "Write 150GiB/s"),
        ("150MiB/min", '"150MiB/s"'),
        ("50%/s", "50"),
        ("fast", "cannot read"),
        (0, "positive"),
        ("0MiB/s", "positive"),
        (-1.0, "positive"),
        (math.nan, "positive"),
        (math.inf, "positive"),
        (True, "text like"),
        (None, "text like"),
    ],
)
def test_what_is_no_rate_is_refused_with_advice(rate, advice):
    with pytest.raises(ValueError, match=advice):
        parse_rate(rate)


@given(st.floats(min_value=1, max_value=1e15))
def test_a_printed_rate_reads_back_to_three_digits(bytes_per_second):
    assert parse_rate(format_rate(bytes_per_second)) == pytest.approx(
        bytes_per_second, rel=0.0051, abs=0.5
    )


def test_format_count_is_exact():
    assert format_count(25_557_032) == "25,557,032"


@pytest.mark.parametrize(
    ("given", "part"),
    [("25%", 0.25), ("0.25", 0.25), (0.25, 0.25), ("150 %", 1.5), (2, 2.0), ("3", 3.0)],
)
def test_parse_part_reads_what_users_write(given, part):
    assert parse_part(given) == part


@pytest.mark.parametrize(
    "given", ["", "a quarter", "1GiB", "1e-2", 0, -0.5, "0%", math.inf, math.nan, True, None]
)
def test_what_is_no_part_is_refused(given):
    with pytest.raises(ValueError, match=r'write "25%" or 0\.25'):
        parse_part(given)
