"""Numbers for people: bytes, seconds and FLOP with the right prefix, and back again.

Inside the program everything is bytes, seconds, FLOP and tokens. GB is 1e9 bytes and GiB is
2^30; a size is printed in the one that was asked for, never in both.
"""

import math
import re

from phalanx.core.errors import UsageError

_DECIMAL = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_COUNTS = ("", "K", "M", "B", "T", "Q")
_TIMES = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"))

_FACTORS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "b": 10**9,
    "t": 10**12,
    "p": 10**15,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def show_bytes(size: float, *, binary: bool = False) -> str:
    """A size: `6.48 TB`, or `74.5 GiB` where binary units are meant.

    Args:
        size: bytes.
        binary: in units of 1024, and not of 1000.

    Example:
        >>> show_bytes(80e9), show_bytes(80e9, binary=True)
        ('80 GB', '74.5 GiB')
    """
    prefixes, base = (_BINARY, 1024.0) if binary else (_DECIMAL, 1000.0)
    return f"{_scaled(size, prefixes, base)}B"


def show_flops(flops: float) -> str:
    """An amount of arithmetic: `51.5 GFLOP`."""
    return f"{_scaled(flops, _DECIMAL, 1000.0)}FLOP"


def show_rate(rate: float, unit: str = "FLOP") -> str:
    """An amount per second: `400 TFLOP/s`, `450 GB/s`.

    Args:
        rate: per second.
        unit: of the amount, such as FLOP or B.
    """
    return f"{_scaled(rate, _DECIMAL, 1000.0)}{unit}/s"


def show_count(number: float) -> str:
    """How many, with the letters of parameters and tokens: `405B`, `16M`.

    Example:
        >>> show_count(405e9), show_count(16_777_216)
        ('405B', '16.8M')
    """
    return _scaled(number, _COUNTS, 1000.0).replace(" ", "")


def show_seconds(seconds: float) -> str:
    """A duration in the largest unit that gives at least one: `6.23 s`, `67 days`.

    Example:
        >>> show_seconds(0.00042), show_seconds(5.8e6)
        ('420 us', '67.1 days')
    """
    if not math.isfinite(seconds) or seconds == 0:
        return f"{seconds:g} s"
    for size, name in _TIMES:
        if abs(seconds) >= size:
            return f"{_three(seconds / size)} {name}"
    return f"{_three(seconds / 1e-9)} ns"


def show_share(share: float) -> str:
    """A fraction as a percentage: `40.4 %`."""
    return f"{round(100 * share, 1) + 0.0:.1f} %"


def parse_count(text: str, what: str = "number") -> float:
    """Read `16M` as 16e6 and `16Mi` as 16 x 2^20: the one that is written is the one meant.

    Args:
        text: digits with an optional exponent, and a letter or two.
        what: is read, for the message.

    Raises:
        UsageError: not a number, or not a positive finite one.

    Example:
        >>> parse_count("16M"), parse_count("16Mi"), parse_count("4e6")
        (16000000.0, 16777216.0, 4000000.0)
    """
    match = re.fullmatch(r"\s*([0-9][0-9_,.]*(?:e[+-]?[0-9]+)?)\s*([a-z]{0,2})\s*", text.lower())
    if match is None or match[2] not in _FACTORS:
        raise UsageError(f"{what} is {text!r}; write it as 16M (16e6), 16Mi (16 x 2^20) or 4e6")
    try:
        value = float(match[1].replace(",", "").replace("_", "")) * _FACTORS[match[2]]
    except ValueError:
        raise UsageError(f"{what} is {text!r}; it is not a number") from None
    if not 0 < value < math.inf:
        raise UsageError(f"{what} is {text}; it must be positive and finite")
    return value


def parse_bytes(text: str, what: str = "size") -> float:
    """Read `80GB` as 80e9 and `76GiB` as 76 x 2^30; the B may be left out.

    Args:
        text: digits with an optional exponent, and a unit.
        what: is read, for the message.

    Raises:
        UsageError: not a size.

    Example:
        >>> parse_bytes("80GB"), parse_bytes("76GiB")
        (80000000000.0, 81604378624.0)
    """
    bare = text.strip()
    bare = bare[:-1] if bare.lower().endswith("b") else bare
    try:
        return parse_count(bare, what)
    except UsageError:
        raise UsageError(f"{what} is {text!r}; write it as 80GB (80e9) or 76GiB") from None


def _scaled(number: float, prefixes: tuple[str, ...], base: float) -> str:
    if not math.isfinite(number):
        return f"{number:g} "
    index = 0
    while abs(number) >= base and index < len(prefixes) - 1:
        number /= base
        index += 1
    return f"{_three(number)} {prefixes[index]}"


def _three(number: float) -> str:
    """Three significant digits, without an exponent and without trailing zeros."""
    if number == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(number))))
    shown = f"{number:.{decimals}f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown
