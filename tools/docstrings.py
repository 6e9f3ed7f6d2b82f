"""Measures how many functions say what they take, what they give, and what they raise.

A public function with two parameters or more should have a section for its arguments, and one for
its errors if it raises any in its own body.

    python tools/docstrings.py           the share, by room
    python tools/docstrings.py --list    and every function that falls short
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("phalanx")
LEAST = 2  # parameters from which a function is worth a section


class Lack(NamedTuple):
    """What the docstring of one function leaves out."""

    where: str
    room: str
    missing: tuple[str, ...]


def public_functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods that others may call."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield inner


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Names of the parameters, without the instance."""
    args = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return [arg.arg for arg in args if arg.arg not in ("self", "cls", "ctx")]


def missing(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    """The sections that a docstring should have and has not."""
    text = ast.get_docstring(node) or ""
    raises = any(
        isinstance(inner, ast.Raise) and inner.exc is not None and _names_ours(inner.exc)
        for inner in ast.walk(node)
    )
    wanted = {"Args:": True, "Raises:": raises}
    return tuple(name for name, due in wanted.items() if due and name not in text)


def _names_ours(error: ast.expr) -> bool:
    """Whether an error is one that a caller may want to catch."""
    call = error.func if isinstance(error, ast.Call) else error
    return isinstance(call, ast.Name) and call.id.endswith("Error")


def lacks() -> Iterator[Lack]:
    """Every public function of two parameters or more, with what it leaves out."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        room = parts[0] if len(parts) > 1 else "."
        for node in public_functions(ast.parse(path.read_text(encoding="utf-8"))):
            if not node.name.startswith("_") and len(parameters(node)) >= LEAST:
                yield Lack(f"{path}:{node.lineno} {node.name}", room, missing(node))


def main() -> None:
    """Print the share of functions that leave nothing out."""
    found = list(lacks())
    rooms: dict[str, list[Lack]] = defaultdict(list)
    for lack in found:
        rooms[lack.room].append(lack)
    for room, functions in sorted(rooms.items()):
        complete = sum(not lack.missing for lack in functions)
        print(f"{room:10} {complete:4} of {len(functions):4}  {complete / len(functions):4.0%}")
    complete = sum(not lack.missing for lack in found)
    print(f"{'all':10} {complete:4} of {len(found):4}  {complete / len(found):4.0%}")
    if "--list" in sys.argv:
        for lack in found:
            if lack.missing:
                print(f"{lack.where}: no {', '.join(lack.missing)}")


if __name__ == "__main__":
    main()
