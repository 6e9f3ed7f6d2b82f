"""What a file of a machine says that was measured on it: shares of its peaks, and collectives."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from phalanx.catalog.typed import only, positive, typed
from phalanx.core.cluster import MeasuredCollective
from phalanx.core.errors import UsageError
from phalanx.core.sustained import Sustained

# Keys of a file whose unit is not that of the value.
IN_UNITS = {"launch": ("launch_us", 1e-6), "step": ("step_ms", 1e-3)}
_SHARES = ("product", "attention", "attention_first", "memory", "domain", "network", "update")
_COLLECTIVE_KEYS = ("name", "ranks", "latency_us", "gb_per_s", "latency_us_80", "gb_per_s_80")


def read_sustained(name: str, table: Any, where: str) -> Sustained:
    """The table [sustained] of an accelerator.

    Args:
        name: of the accelerator.
        table: its keys; `Sustained` says what they mean.
        where: for messages.

    Raises:
        UsageError: a key that is missing, unknown, or of the wrong kind; a share that no machine
            can have.
    """
    where, hints = f"[sustained] of {where}", get_type_hints(Sustained)
    keys = {IN_UNITS.get(field.name, (field.name,))[0]: field for field in fields(Sustained)}
    del keys["name"]
    only(where, table, tuple(keys))
    values: dict[str, Any] = {"name": name}
    for key, field in keys.items():
        if key in table:
            value = typed(f"{where}: {key}", table[key], hints[field.name])
            values[field.name] = (
                value * IN_UNITS[field.name][1] if field.name in IN_UNITS else value
            )
        elif field.default is MISSING:
            raise UsageError(f"{where} has no {key}; it needs one")
    for key in ("cores", *_SHARES):
        if key in values and not (values[key] > 0 or (key == "update" and values[key] == 0)):
            raise UsageError(f"{where}: {key} is {values[key]}; it must be positive")
    for key in ("depth", "launch", "interference", "jitter", "spread", "rows", "step"):
        if values.get(key, 0) < 0:
            raise UsageError(f"{where}: {key} is {values[key]}; it is at least 0")
    return Sustained(**values)


def read_collectives(tables: Any, where: str) -> tuple[MeasuredCollective, ...]:
    """The tables [[collectives]] of an accelerator.

    Args:
        tables: one for each collective and number of ranks.
        where: for messages.

    Raises:
        UsageError: a key that is missing, unknown, or of the wrong kind.
    """
    if not isinstance(tables, Sequence):
        raise UsageError(f"collectives of {where} is {tables!r}; it is a list of tables")
    return tuple(_collective(table, f"[[collectives]] of {where}") for table in tables)


def _collective(table: Mapping[str, Any], where: str) -> MeasuredCollective:
    only(where, table, _COLLECTIVE_KEYS)
    return MeasuredCollective(
        name=typed(f"{where}: name", table.get("name"), str),
        ranks=int(positive(where, table, "ranks")),
        latency=1e-6 * typed(f"{where}: latency_us", table.get("latency_us", 0.0), float),
        bandwidth=1e9 * positive(where, table, "gb_per_s"),
    )
