"""Events are in a file, whoever looks on, and whoever else writes there."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from trainer_jobs import small_run, train_job

from phalanx.oracle.pool import RankPool
from phalanx.trainer.run.continuity import Resume
from phalanx.trainer.run.events import KINDS, EventLog, read_events


def test_an_event_is_shown_and_written_with_all_that_is_known_of_it(tmp_path: Path) -> None:
    shown: list[str] = []
    log = EventLog(tmp_path / "events.jsonl", shown.append)
    log.tell("restart", "rank 1 was ended by SIGKILL", step=7, rank=1, signal="SIGKILL")
    log.note("a line")
    assert shown == ["rank 1 was ended by SIGKILL", "a line"]
    first, second = read_events(tmp_path / "events.jsonl")
    assert list(first) == ["time", "kind", "step", "rank", "text", "data"]
    assert (first["kind"], first["step"], first["rank"]) == ("restart", 7, 1)
    assert first["data"] == {"signal": "SIGKILL"}
    assert (second["kind"], second["step"], second["data"]) == ("note", None, {})


def test_lines_of_several_writers_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    logs = [EventLog(path) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for log in logs:
            pool.submit(lambda log=log: [log.note("x" * 3000) for _ in range(50)])
    assert [len(json.loads(line)["text"]) for line in path.read_text().splitlines()] == [3000] * 200


def test_what_cannot_be_written_is_shown_all_the_same_and_written_later(tmp_path: Path) -> None:
    shown: list[str] = []
    log = EventLog(tmp_path / "later" / "events.jsonl", shown.append)
    log.note("the folder is not there")
    (tmp_path / "later").mkdir()
    log.note("now it is")
    texts = [event["text"] for event in read_events(tmp_path / "later" / "events.jsonl")]
    assert texts == shown == ["the folder is not there", "now it is"]


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path).note("whole")
    with path.open("a") as file:
        file.write('{"time": 1, "ki')
    assert [event["text"] for event in read_events(path)] == ["whole"]


@pytest.mark.ranks
def test_a_run_that_shows_nothing_keeps_what_was_set_aside(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("In the beginning was the word.\n" * 100)
    run = small_run(tmp_path / "book.txt")
    ranks.run(1, train_job, run, tmp_path)
    shard = tmp_path / "checkpoints" / "step-00000008" / "rank-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    ranks.run(1, train_job, run, tmp_path, Resume())
    events = read_events(tmp_path / "events.jsonl")
    kinds = [event["kind"] for event in events]
    assert kinds == ["start", "stop", "set aside", "resume", "start", "stop"]
    assert "step-00000008 is damaged" in events[2]["text"]
    assert {event["kind"] for event in events} <= set(KINDS)
