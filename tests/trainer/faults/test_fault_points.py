"""Every named point is declared, is in the code, and is come by in a run."""

import ast
import timeit
from pathlib import Path

import pytest
from fault_jobs import hit_points, small_run

from phalanx.core.errors import UsageError
from phalanx.oracle.pool import RankPool
from phalanx.trainer import faults
from phalanx.trainer.faults import POINTS, Fault, FaultPlan

PACKAGE = Path(faults.__file__).parents[2]


def called() -> set[str]:
    """The names of all points in the code."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "faults.point":
                name = node.args[0]
                assert isinstance(name, ast.Constant), f"{path}:{node.lineno}: name it literally"
                found.add(name.value)
    return found


def test_every_point_of_the_code_is_declared_and_every_declared_one_is_there():
    assert called() == set(POINTS)


@pytest.mark.ranks
def test_a_run_comes_by_every_point(ranks: RankPool, tmp_path: Path):
    (tmp_path / "book.txt").write_text("In the beginning was the word.\n" * 100)
    run = small_run(tmp_path / "book.txt")
    ranks.run(2, hit_points, run, tmp_path)
    hits = (tmp_path / "hits").glob("rank-0-*")
    assert {name for file in hits for name in file.read_text().split()} == set(POINTS)


def test_a_point_costs_less_than_a_hundred_nanoseconds_where_no_plan_is_loaded():
    times = timeit.repeat(lambda: faults.point("step.before", step=3), number=20_000, repeat=7)
    empty = timeit.repeat(lambda: None, number=20_000, repeat=7)
    assert (min(times) - min(empty)) / 20_000 < 100e-9


def test_a_plan_reads_what_it_writes():
    plan = FaultPlan((Fault(point="step.after", action="signal", value="SIGKILL", step=3),), "hits")
    assert FaultPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ('{"faults": [{"point": "step.befor", "action": "exit", "value": 1}]}', "step.before"),
        ('{"faults": [{"point": "start", "action": "explode"}]}', "known: "),
        ('{"faults": [{"point": "start", "action": "signal", "value": "SIGKIL"}]}', "SIGKILL"),
        ('{"faults": [{"point": "start", "action": "sleep"}]}', "a number"),
        ('{"faults": [{"point": "start", "action": "loop", "value": 1, "stp": 2}]}', "step"),
        ('{"faults": [3]}', "no plan"),
        ("[]", "no plan"),
    ],
)
def test_a_plan_that_could_not_happen_is_refused(text: str, hint: str):
    with pytest.raises(UsageError, match=hint):
        FaultPlan.from_json(text)
