"""Reads single cells of a table of published runs."""

import math
from collections.abc import Mapping

Row = Mapping[str, str]


class UnusableError(Exception):
    """A row that says too little; the message says what is missing."""


def needed(row: Row, key: str) -> int:
    """A whole number that nothing can be said without.

    Args:
        row: cells by column.
        key: of the column.

    Raises:
        UnusableError: the cell is empty, or no number.
    """
    value = whole(row, key)
    if value is None:
        raise UnusableError(f"no {key}")
    return value


def degree(row: Row, key: str) -> int | None:
    """A whole number of at least 1, or None where the cell is empty.

    Args:
        row: cells by column.
        key: of the column.

    Raises:
        UnusableError: it says something else; a guess would price another run.
    """
    text = (row.get(key) or "").strip()
    value = number(row, key)
    if text and (value is None or value < 1 or value != round(value)):
        raise UnusableError(f"{key} is {text!r}")
    return None if value is None else round(value)


def whole(row: Row, key: str) -> int | None:
    """The nearest whole number, or None where the cell is empty or says something else.

    Args:
        row: cells by column.
        key: of the column.
    """
    value = number(row, key)
    return None if value is None else round(value)


def number(row: Row, key: str) -> float | None:
    """A finite number, or None where the cell is empty, missing, or says something else.

    Args:
        row: cells by column.
        key: of the column.

    Example:
        >>> [number({"mfu_pct": cell}, "mfu_pct") for cell in ("43.5", "", "n/a")]
        [43.5, None, None]
    """
    try:
        value = float(row.get(key) or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def from_recipe(row: Row, column: str) -> str:
    """A cell that was read off a public recipe; nothing where that recipe is not what ran.

    Args:
        row: cells by column.
        column: its name.
    """
    match = row.get("recipe_match", "").strip().lower()
    return row.get(column, "").strip().lower() if match.startswith("exact") or not match else ""
