"""The doctor sees what is there and only that, in order, and its gains are the planner's."""

import json
import resource
from pathlib import Path

import pytest
from recorded_runs import RECORDED, read_lines, rewrite, write_lines

import phalanx
from phalanx.cli.main import main
from phalanx.core.layout import Layout
from phalanx.reports.finding import Finding
from phalanx.reports.machine import examine
from phalanx.reports.report import report_on

ORDER = [
    *("data", "kernels and batch size", "tp within the domain", "overlap", "bubble", "stragglers"),
    *("saves", "restarts", "skipped steps"),
]


def finding(path: Path, cause: str) -> Finding:
    return next(found for found in phalanx.doctor(path).findings if found.cause == cause)


def slowed(line: dict, kind: str, factor: float, rank: int | None = None) -> dict:
    """A window in which ranks spent more on one kind, and so much longer on the whole."""
    more = line["seconds"] * factor
    line["seconds"] += more
    line["mean"][kind] = line["mean"].get(kind, 0.0) + more
    for each in line["ranks"]:
        if rank in (None, each["rank"]):
            each[kind] = each.get(kind, 0.0) + more
    return line


def test_causes_come_in_the_order_in_which_to_check_them():
    assert [found.cause for found in phalanx.doctor(RECORDED).findings] == ORDER


def test_a_run_that_waits_for_data_says_so_and_how_much(copied: Path):
    assert not finding(copied, "data").seen
    rewrite(copied / "ranks.jsonl", lambda line: slowed(line, "reading batches", 1.0))
    found = finding(copied, "data")
    assert found.seen
    assert found.expected_gain == pytest.approx(0.5, abs=0.01)
    assert "50." in found.evidence


def test_exposed_messages_are_seen_with_their_axis(copied: Path):
    rewrite(copied / "ranks.jsonl", lambda line: slowed(line, "waiting for data", 1.0))
    found = finding(copied, "overlap")
    assert found.seen
    assert "data 50." in found.evidence


def test_a_slow_rank_is_found_among_its_peers(copied: Path):
    """Two ranks of one stage, one of which computes much longer."""
    layout = "dp=2 pp=1 tp=1 precision=fp32"
    for name in ("env.json", "summary.json"):
        (copied / name).write_text(json.dumps({"layout": layout}))
    rewrite(copied / "ranks.jsonl", lambda line: slowed(line, "compute", 1.0, rank=1))
    found = finding(copied, "stragglers")
    assert found.seen
    assert found.evidence.startswith("rank 1 (dp=1 pp=0 cp=0 tp=0)")


def test_an_expected_gain_is_the_planners(copied: Path):
    rewrite(copied / "ranks.jsonl", lambda line: slowed(line, "waiting for pipeline", 1.0))
    found = finding(copied, "bubble")
    assert found.seen
    line = found.change.partition('"')[2].rstrip('"')
    report = report_on(copied)
    run = report.plan.run
    other = report.plan.price(
        phalanx.Run(model=run.model, layout=Layout.parse(line), recipe=run.recipe)
    )
    before = report.plan.estimate.step_seconds
    assert found.expected_gain == pytest.approx(1 - other.estimate().step_seconds / before)
    assert found.expected_gain > 0


def test_a_change_that_is_proposed_is_one_that_trains(copied: Path):
    rewrite(copied / "ranks.jsonl", lambda line: slowed(line, "waiting for pipeline", 1.0))
    line = finding(copied, "bubble").change.partition('"')[2].rstrip('"')
    arguments = ["train", str(copied / "run.toml"), "--layout", line, "--dry-run"]
    assert main(arguments) == 0


@pytest.mark.parametrize(
    ("noticed", "change"),
    [(1, "find out why ranks die"), (30, "--set recipe.checkpoint_every=2")],
)
def test_restarts_that_cost_are_seen_with_what_they_cost(noticed: int, change: str, copied: Path):
    events = read_lines(copied / "events.jsonl")
    lines = read_lines(copied / "metrics.jsonl")
    middle = lines[5]["time"] + noticed
    told = {**events[0], "kind": "restart", "time": middle, "text": "rank 1 was killed"}
    write_lines(copied / "events.jsonl", [events[0], told])
    write_lines(
        copied / "metrics.jsonl",
        [{**line, "time": line["time"] + 60 * (line["step"] > 6)} for line in lines],
    )
    found = finding(copied, "restarts")
    assert found.seen
    assert "rank 1 was killed" in found.evidence
    assert found.change == change


def test_every_change_that_is_seen_has_evidence_in_numbers(copied: Path):
    rewrite(copied / "ranks.jsonl", lambda line: slowed(line, "waiting for pipeline", 3.0))
    for found in phalanx.doctor(copied).findings:
        assert found.evidence
        assert any(c.isdigit() for c in found.evidence)
        assert found.change or not found.seen


def test_a_machine_is_looked_at_and_left_as_it_was(tmp_path: Path):
    found = examine(tmp_path / "not" / "there")
    assert [each.cause for each in found][:4] == [
        *("versions", "cores and threads", "open files", "memory")
    ]
    assert {"room on the disk", "speed of the disk", "clock"} <= {each.cause for each in found}
    assert list(tmp_path.iterdir()) == []


def test_few_open_files_are_seen_with_the_command_that_helps(tmp_path: Path):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        found = next(each for each in examine(tmp_path) if each.cause == "open files")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert found.seen
    assert "256" in found.evidence
    assert found.change.startswith("ulimit -n ")


def test_more_threads_than_cores_are_seen(tmp_path: Path):
    found = examine(tmp_path, {"OMP_NUM_THREADS": "4096"})[1]
    assert found.seen
    assert "OMP_NUM_THREADS" in found.change


def test_the_command_prints_every_cause(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", str(RECORDED)]) == 0
    shown = capsys.readouterr().out
    assert all(cause in shown for cause in ORDER)
