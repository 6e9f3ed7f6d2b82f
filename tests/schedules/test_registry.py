"""The registry is the only place that knows schedules by name."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import phalanx
from phalanx.cli.main import main
from phalanx.schedules.registry import NAMES, SPECS
from phalanx.schedules.spec import ScheduleSpec

PACKAGE = Path(phalanx.__file__).parent
# The default of a layout, what authors of published runs call theirs, and a problem about one.
MAY_NAME = {"core/layout.py", "planner/published/row_layout.py", "explore/problems.py"}


def test_names_and_titles_are_unique() -> None:
    assert len(set(NAMES)) == len({spec.title for spec in SPECS}) == len(SPECS)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_schedule_says_what_it_is_and_who_thought_of_it(spec: ScheduleSpec) -> None:
    assert spec.description
    assert any(digit in spec.source for digit in "0123456789")


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_rows_split_backward_exactly_where_the_schedule_says_so(spec: ScheduleSpec) -> None:
    rows = spec.build(4, spec.micro_batches(4).fewest(8)).rows
    kinds = {action.kind.value for row in rows for action in row}
    assert ("I" in kinds) is ("W" in kinds) is spec.splits_backward


def strings(path: Path) -> Iterator[str]:
    """Every string in a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_no_other_room_knows_a_schedule_by_name() -> None:
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    naming = {
        name
        for name, path in files.items()
        if not name.startswith("schedules/") and not set(NAMES).isdisjoint(strings(path))
    }
    assert naming <= MAY_NAME


@pytest.mark.parametrize(
    "words",
    [
        ["schedule", "1f1"],
        ["estimate", "llama-3-8b", "h100x8", "--batch", "8", "--layout", "pp=2 schedule=1f1"],
        ["plan", "llama-3-8b", "h100x8", "--tokens", "1M", "--fixed", "schedule=1f1"],
        ["verify", "--layout", "pp=2 schedule=1f1"],
        ["train", "--layout", "pp=2 schedule=1f1", "--dry-run"],
    ],
    ids=lambda words: words[0],
)
def test_every_command_refuses_an_unknown_schedule_with_the_nearest(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert "unknown schedule '1f1'; did you mean 1f1b?" in capsys.readouterr().err
