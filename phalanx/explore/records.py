"""A number on the page as a record: value, text, unit, where it comes from, and a verdict."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from phalanx.core.units import (
    show_bytes,
    show_count,
    show_flops,
    show_rate,
    show_seconds,
    show_share,
)

Verdict = Literal["", "good", "bad", "note"]

BOOK = "How to Parallelize a Transformer for Training"
SYSTEMS = "Large-Scale LLM Training Systems"
BEACON = "How one training step is cut into pieces that fit"


class Record(NamedTuple):
    """One number or word, and its reason.

    Attributes:
        id: the part of the page and its name in it: `dp.floor`.
        value: the number, in bytes, seconds, FLOP or tokens; None where there is none.
        text: as the page prints it.
        unit: of the value.
        formula: in letters.
        substituted: the formula with numbers.
        source: document and section, or our function.
        verdict: good, bad or note; empty where nothing is judged.
        reason: of the verdict, in words.
    """

    id: str
    value: float | str | None
    text: str
    unit: str = ""
    formula: str = ""
    substituted: str = ""
    source: str = ""
    verdict: Verdict = ""
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The record as `GET /api/v1/state` and `--json` have it."""
        return {name: value for name, value in self._asdict().items() if name != "id"}


class Picture(NamedTuple):
    """Something drawn, and the table that says the same.

    Attributes:
        id: the part of the page and its name in it.
        label: what a screen reader says.
        svg: the drawing.
        headers, rows: of the table.
    """

    id: str
    label: str
    svg: str
    headers: tuple[str, ...] = ()
    rows: Sequence[Sequence[str]] = ()


class Panel(NamedTuple):
    """What a part of the page shows for one state."""

    records: tuple[Record, ...]
    pictures: tuple[Picture, ...] = ()


def number(  # a record has that many sides
    id: str,  # the word of the document
    value: float,
    unit: str = "",
    *,
    formula: str = "",
    numbers: str = "",
    source: str = "",
) -> Record:
    """A record of a number; one that is not finite says so in words.

    Args:
        id: of the record.
        value: the number.
        unit: bytes, s, FLOP/s, B/s, share, tokens, x, or a word.
        formula: in letters.
        numbers: the formula with numbers.
        source: where it comes from.
    """
    finite = math.isfinite(value)
    return Record(
        id,
        value if finite else None,
        show(value, unit) if finite else "no limit",
        unit,
        formula,
        numbers,
        source,
    )


def word(
    id: str, text: str, *, reason: str = "", verdict: Verdict = "", source: str = ""
) -> Record:
    """A record of a word or a sentence.

    Args:
        id: of the record.
        text: the word.
        reason: why.
        verdict: good, bad or note.
        source: where it comes from.
    """
    return Record(id, text, text, source=source, verdict=verdict, reason=reason)


def show(value: float, unit: str) -> str:
    """A number with its unit, as the page prints it.

    Args:
        value: the number.
        unit: see `number`.

    Example:
        >>> show(2550.0, "tokens"), show(95e9, "bytes"), show(0.404, "share")
        ('2,550', '95 GB', '40.4 %')
    """
    shown: dict[str, Callable[[float], str]] = {
        "bytes": show_bytes,
        "s": show_seconds,
        "FLOP": show_flops,
        "FLOP/s": show_rate,
        "B/s": lambda rate: show_rate(rate, "B"),
        "share": show_share,
        "params": show_count,
        "x": lambda times: f"{_plain(times)}×",
    }
    return shown.get(unit, _plain)(value)


def _plain(value: float) -> str:
    """A count: in digits up to a million, then with letters; parts of one in three digits."""
    if abs(value) >= 1e6:
        return show_count(value)
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"
