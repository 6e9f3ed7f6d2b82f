"""A cluster file as text: plain keys first, then tables, then lists of tables, as TOML wants it."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

HEAD = "# A machine as it was measured by phalanx calibrate: every planning command takes it"


def to_toml(tables: Mapping[str, Any]) -> str:
    """The text that `tomllib` reads back to the same values.

    Args:
        tables: keys that are plain words; values that are texts, numbers, switches, lists of
            these, tables, or lists of tables.

    Example:
        >>> to_toml({"name": "cpu", "domain": {"size": 2}}).splitlines()[1:]
        ['name = "cpu"', '', '[domain]', 'size = 2']
    """
    return "\n".join([HEAD, *_lines(tables, "")]) + "\n"


def _lines(table: Mapping[str, Any], path: str) -> Iterator[str]:
    nested = {key: value for key, value in table.items() if _is_table(value)}
    for key, value in table.items():
        if key not in nested:
            yield f"{key} = {_value(value)}"
    for key, value in nested.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            yield from ("", f"[{name}]", *_lines(value, f"{name}."))
            continue
        for each in value:
            yield from ("", f"[[{name}]]", *_lines(each, f"{name}."))


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
    )


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_value(each) for each in value)}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
