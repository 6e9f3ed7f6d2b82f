"""The notebook of the examples runs from top to bottom, and what its cells show shows as HTML."""

import ast
import json
from pathlib import Path

NOTEBOOK = Path(__file__).parents[2] / "examples" / "plan.ipynb"


def cells() -> list[str]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def show(cell: str, names: dict[str, object]) -> object:
    """Run a cell as a notebook does; the value of its last line, if that is one."""
    tree = ast.parse(cell)
    last = tree.body[-1]
    if isinstance(last, ast.Expr):
        exec(compile(ast.Module(tree.body[:-1], []), "cell", "exec"), names)
        return eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    exec(compile(tree, "cell", "exec"), names)
    return None


def test_every_cell_runs_and_results_show_as_tables():
    names: dict[str, object] = {}
    shown = [show(cell, names) for cell in cells()]
    results = [value for value in shown if value is not None and not isinstance(value, float)]
    assert len(results) >= 2
    for value in results:
        html = value._repr_html_()  # type: ignore[attr-defined]  # of whatever a cell gave
        assert "<table" in html or "<pre" in html


def test_no_output_is_kept_in_the_file():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert not any(cell.get("outputs") for cell in notebook["cells"])
