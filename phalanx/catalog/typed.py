"""Values of a file, each checked against what it must be."""

import math
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from phalanx.core.errors import UsageError, unknown


def typed(key: str, value: Any, kind: Any) -> Any:
    """Check one value of a file against the type it must have; an int may stand for a float.

    Args:
        key: for messages.
        value: as it was read.
        kind: a type, a union whose first counts, or a Literal.

    Raises:
        UsageError: another kind of value, or a number that is not finite.
    """
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            options = ", ".join(str(a) for a in get_args(kind))
            raise UsageError(f"{key} is {value!r}; it can be {options}")
        return value
    if isinstance(kind, UnionType):
        kind = get_args(kind)[0]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
        raise UsageError(f"{key} is {value!r}; it is {words[kind]}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{key} is {value}; it is a finite number")
    return value


def positive(where: str, table: Mapping[str, Any], key: str) -> float:
    """A number that has to be there, and above 0.

    Args:
        where: for messages.
        table: that was read.
        key: of the number.

    Raises:
        UsageError: it is missing, no number, or not above 0.
    """
    if key not in table:
        raise UsageError(f"{where} has no {key}; it needs one")
    value = float(typed(f"{where}: {key}", table[key], float))
    if not value > 0:
        raise UsageError(f"{where}: {key} is {value}; it must be positive")
    return value


def only(where: str, table: Any, known: tuple[str, ...]) -> None:
    """See that a table has no other keys.

    Args:
        where: for messages.
        table: that was read.
        known: the keys it may have.

    Raises:
        UsageError: it has another, or is no table.
    """
    if not isinstance(table, Mapping):
        raise UsageError(f"{where} is {table!r}; it is a table of keys")
    for key in table:
        if key not in known:
            raise unknown(f"key in {where}", key, known)
