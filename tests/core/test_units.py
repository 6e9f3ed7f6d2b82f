"""Numbers for people: the right prefix, and what was written is what is meant."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import UsageError
from phalanx.core.units import (
    parse_bytes,
    parse_count,
    show_bytes,
    show_count,
    show_flops,
    show_rate,
    show_seconds,
    show_share,
)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (show_bytes(6.48e12), "6.48 TB"),
        (show_bytes(80 * 2**30, binary=True), "80 GiB"),
        (show_bytes(80e9, binary=True), "74.5 GiB"),
        (show_bytes(0), "0 B"),
        (show_flops(51.47e9), "51.5 GFLOP"),
        (show_rate(400e12), "400 TFLOP/s"),
        (show_rate(450e9, "B"), "450 GB/s"),
        (show_count(405e9), "405B"),
        (show_count(16e6), "16M"),
        (show_count(512), "512"),
        (show_seconds(6.2292), "6.23 s"),
        (show_seconds(0.0746), "74.6 ms"),
        (show_seconds(3e-9), "3 ns"),
        (show_seconds(67 * 86400), "67 days"),
        (show_seconds(0), "0 s"),
        (show_seconds(math.inf), "inf s"),
        (show_share(0.4044), "40.4 %"),
    ],
)
def test_numbers_are_shown_with_three_digits_and_the_right_prefix(shown: str, expected: str):
    assert shown == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("16M", 16e6),
        ("16Mi", 16 * 2**20),
        ("4e6", 4e6),
        ("1_000", 1000),
        ("16,777,216", 2**24),
        ("15.6T", 15.6e12),
        ("405B", 405e9),
        ("8 k", 8000),
    ],
)
def test_a_count_means_what_is_written(text: str, value: float):
    assert parse_count(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("80GB", 80e9), ("76GiB", 76 * 2**30), ("76 gib", 76 * 2**30), ("1T", 1e12), ("512", 512)],
)
def test_gb_and_gib_are_kept_apart(text: str, value: float):
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    "text", ["", "many", "-3", "0", "nan", "inf", "1e999", "16X", "1.2.3", "M"]
)
def test_what_is_not_a_positive_number_is_refused(text: str):
    with pytest.raises(UsageError, match="tokens is"):
        parse_count(text, "tokens")
    with pytest.raises(UsageError, match="memory is"):
        parse_bytes(text, "memory")


@given(st.floats(1, 1e20))
def test_a_shown_size_is_within_half_a_percent(size: float):
    number, unit = show_bytes(size).split(" ")
    factor = 1000.0 ** ("", "k", "M", "G", "T", "P", "E").index(unit[:-1])
    assert float(number) * factor == pytest.approx(size, rel=0.0051)


@given(st.integers(1, 10**6))
def test_a_count_reads_back_with_every_suffix(number: int):
    assert parse_count(f"{number}M") == number * 1e6
    assert parse_count(f"{number}Ki") == number * 2**10
