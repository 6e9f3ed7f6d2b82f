"""A schedule that Phalanx does not know is drawn, checked, priced, proved and trained with.

It is named where Python finds it, as in `schedule=waves:WAVES`.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import waves

from phalanx.catalog import load
from phalanx.cli.main import main
from phalanx.core.errors import ScheduleError, UsageError
from phalanx.core.layout import Layout
from phalanx.core.schedule import Kind, Row
from phalanx.oracle.cases import CaseSpec
from phalanx.oracle.pool import RankPool
from phalanx.oracle.verify import verify
from phalanx.planner.estimate import estimate
from phalanx.planner.parse import read_limits
from phalanx.planner.search import search
from phalanx.planner.sweep import Request
from phalanx.schedules.build import build, lowered
from phalanx.schedules.check import check
from phalanx.schedules.play import UNIT, play
from phalanx.schedules.registry import find_schedule

NAME = "waves:WAVES"
RUN = """
layout = "pp=2 schedule=waves:WAVES"
[model]
layers = 2
hidden = 32
heads = 2
[recipe]
seq = 32
batch = 3
steps = 2
"""


def test_it_is_found_by_its_module_and_its_name() -> None:
    assert find_schedule(NAME) is waves.WAVES
    assert Layout.parse(f"pp=2 schedule={NAME}").schedule == NAME


def test_what_goes_wrong_in_its_rows_is_said_in_one_line() -> None:
    def rows(p: int, m: int, v: int) -> tuple[Row, ...]:
        return ((),)[m:][0]

    with pytest.raises(ScheduleError, match=r"^schedule waves .* p=2 m=4 v=1: IndexError: .*$"):
        replace(waves.WAVES, name="waves", rows=rows).build(2, 4)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere:WAVES", "cannot be imported .No module named 'nowhere'."),
        ("waves:WAVE", "has no attribute 'WAVE'"),
        ("waves:rows", "is no ScheduleSpec but a function"),
        (":WAVES", "write module:attribute"),
    ],
)
def test_a_name_that_leads_nowhere_is_wrong_usage(name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        find_schedule(name)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 5), (4, 8)])
def test_it_is_checked_as_any_other(p: int, m: int) -> None:
    check(build(NAME, p, m))
    lowered(Layout(pp=p, schedule=NAME), m, reduce_every=True)


@pytest.mark.parametrize(("p", "m"), [(2, 5), (4, 8), (3, 9)])
def test_its_formula_is_what_playing_it_takes(p: int, m: int) -> None:
    starts = play(build(NAME, p, m), UNIT)
    lasts = max(row[-1] for row in starts) + UNIT[Kind.BACKWARD]
    assert lasts == (m + -(-m // p) * (p - 1)) * 3


def test_it_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", NAME, "-p", "2", "-m", "4", "--json"]) == 0
    drawn = json.loads(capsys.readouterr().out)
    assert drawn["rows"][0] == ["0F0", "0F1", "0B0", "0B1", "0F2", "0F3", "0B2", "0B3"]
    assert (drawn["peak_in_flight"], drawn["makespan"]) == ([2, 2], 18)


def test_it_is_priced_and_searched() -> None:
    shape, cluster = load.model("llama-3-8b"), load.cluster("h100x8")
    layouts = [Layout(pp=4, tp=2, schedule=name) for name in (NAME, "1f1b")]
    ours, plain = (estimate(shape, cluster, layout, 4096, 16) for layout in layouts)
    assert ours.step_seconds > 1.2 * plain.step_seconds  # it fills the pipeline four times
    assert fastest(f"{NAME}|1f1b") == {"1f1b"}
    assert fastest(NAME) == {NAME}


def fastest(schedules: str) -> set[str]:
    """The schedules of the best layouts of llama-3-8b on 8 devices."""
    request = Request(
        shape=load.model("llama-3-8b"),
        cluster=load.cluster("h100x8"),
        seq=4096,
        batch=16,
        limits=read_limits(f"pp=4 tp=2 schedule={schedules}"),
    )
    return {ranked.estimate.layout.schedule for ranked in search(request).ranked}


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["pp=2", "dp=2 pp=2 zero=2 recompute=full"])
def test_it_takes_the_steps_of_one_device(ranks: RankPool, layout: str) -> None:
    case = CaseSpec(f"{layout} schedule={NAME}", ("tied",)).case()
    assert verify(ranks, case).complaints == []


@pytest.mark.ranks
def test_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(waves.__file__).parent))
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "book.txt").write_text("It was a dark and stormy night. " * 100)
    words = ["train", "run.toml", "--data", "book.txt", "--name", "a"]
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "runs" / "a" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_the_guide_shows_this_schedule_as_it_is() -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/add-a-schedule.md").read_text()
    shown = guide.partition("```python\n")[2].partition("```")[0]
    assert shown == Path(waves.__file__).read_text()
