"""A run that two ranks really took, as its folder stood, and how tests change a copy of it."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "recorded"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write a file of objects."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def rewrite(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change every line of a file of objects."""
    write_lines(path, [change(line) for line in read_lines(path)])
