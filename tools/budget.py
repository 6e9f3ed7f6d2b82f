"""Checks the size of files and functions: what is short can be read."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LINES, FUNCTION_LINES, PARAMETERS = 500, 60, 6
ROOTS = ("phalanx", "benchmarks", "tools")
SELF = {"self", "cls", "ctx"}


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the signature to the end."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters, without the instance."""
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([n for n in names if n not in SELF])


def over_budget(path: Path) -> Iterator[str]:
    """What in this file is too large, one line each."""
    text = path.read_text(encoding="utf-8")
    lines = text.count("\n")
    if lines > FILE_LINES:
        yield f"{path}: {lines} lines; a file has at most {FILE_LINES}"
    for node in functions(ast.parse(text)):
        where = f"{path}:{node.lineno} {node.name}"
        if length(node) > FUNCTION_LINES:
            yield f"{where}: {length(node)} lines; a function has at most {FUNCTION_LINES}"
        if parameters(node) > PARAMETERS:
            yield f"{where}: {parameters(node)} parameters; at most {PARAMETERS}"


def show_all(paths: list[Path]) -> None:
    """Print how the code stands: totals, the largest files and functions."""
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    sized = [
        (length(n), f"{p}:{n.lineno} {n.name}")
        for p, t in texts.items()
        for n in functions(ast.parse(t))
    ]
    lengths = sorted(size for size, _ in sized)
    lines = sum(t.count("\n") for t in texts.values())
    print(f"{lines:,} lines in {len(paths)} files; {len(sized)} functions, ", end="")
    print(f"median {lengths[len(lengths) // 2]} lines, p90 {lengths[len(lengths) * 9 // 10]}")
    for size, where in sorted(sized, reverse=True)[:10]:
        print(f"  {size:3} lines  {where}")
    for path in sorted(paths, key=lambda p: -texts[p].count("\n"))[:10]:
        print(f"  {texts[path].count(chr(10)):3} lines  {path}")


def main() -> int:
    """Print what is over budget; with --all, how everything stands."""
    paths = sorted(path for root in ROOTS for path in Path(root).rglob("*.py"))
    if "--all" in sys.argv:
        show_all(paths)
    found = [line for path in paths for line in over_budget(path)]
    print("\n".join(found) or f"budget: {len(paths)} files, all within")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
