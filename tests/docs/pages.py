"""The pages that people read, and the source that says who is called what."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "phalanx"


def pages() -> list[Path]:
    """Every page in Markdown."""
    folders = ("docs", "benchmarks", "examples")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.md")]
    return sorted([*ROOT.glob("*.md"), *found])


def modules() -> list[Path]:
    """Every module of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def classes() -> Iterator[tuple[str, str]]:
    """Every class of the package that is not private: its name and its module."""
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name, path.relative_to(PACKAGE).as_posix()


def words_of(name: str) -> list[str]:
    """The words of an identifier, in lower case: `HeldRank` and `held_rank` have the same."""
    parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")
    return [part for part in parts if part]
