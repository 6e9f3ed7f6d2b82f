import json
from pathlib import Path

import pytest
from explorer_client import get
from written_runs import HOSTILE, LAYOUT, write_run

import phalanx
from phalanx.explore.copies import run_file_of
from phalanx.explore.run_view import listing, view
from phalanx.explore.runs import found_in, newest, read_run, series, split
from phalanx.explore.state import State


def test_a_run_is_read_with_all_that_it_says(tmp_path: Path):
    run = read_run(write_run(tmp_path / "small"))
    assert (run.name, run.layout, len(run.steps), run.done) == ("small", LAYOUT, 4, False)
    assert series(run, "loss") == [(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)]
    assert newest(run, "mfu") == 0.4
    assert split(run) == pytest.approx({"pipeline": 0.1, "data wait": 0.01, "computing": 0.39})
    assert len(run.spans) == 4
    assert run.problems == ()


def test_runs_are_found_by_name_and_by_their_folder(tmp_path: Path):
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    (tmp_path / "other").mkdir()
    assert found_in([tmp_path]) == [first, second]
    assert found_in([second, tmp_path]) == [second, first]
    assert found_in([tmp_path / "missing"]) == []


def test_a_line_that_is_being_written_and_broken_files_do_no_harm(tmp_path: Path):
    folder = write_run(tmp_path / "live")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    assert len(read_run(folder).steps) == 4
    (folder / "timeline.json").write_text("[[[")
    (folder / "summary.json").write_text("[1]")
    (folder / "run.toml").write_text("layout = ")
    run = read_run(folder)
    assert run.spans == ()
    assert "timeline.json is no JSON" in run.problems
    assert "run.toml is no TOML" in run.problems
    assert view([run])


@pytest.mark.parametrize("value", ["NaN", "Infinity", "null", '"x"', "true", "[1]", "1e999"])
def test_values_that_are_no_numbers_are_not_drawn(tmp_path: Path, value: str):
    folder = write_run(tmp_path / "odd")
    (folder / "metrics.jsonl").write_text(f'{{"step": 1, "loss": {value}, "seconds": {value}}}\n')
    html = view([read_run(folder)])
    assert "nan" not in html.lower().replace("explanan", "")
    assert "nothing was written yet" in html


def test_a_hostile_name_and_text_are_inert(tmp_path: Path):
    name = HOSTILE.replace("/", "∕")  # no file can have a slash
    run = read_run(write_run(tmp_path / name, text=HOSTILE))
    html = view([run]) + listing([run.name], [0])
    assert "<script" not in html
    assert "&lt;script&gt;" in html


def test_the_plan_stands_under_what_was_measured(tmp_path: Path):
    html = view([read_run(write_run(tmp_path / "small"))])
    assert "measured" in html
    assert "as planned: 1F1B, 1 micro-batches" in html


def test_several_runs_lie_over_each_other(tmp_path: Path):
    runs = [read_run(write_run(tmp_path / name)) for name in ("a", "b")]
    html = view(runs)
    assert html.count("s-d0") > 0
    assert html.count("s-d1") > 0


def test_the_server_shows_only_runs_of_its_list(address: str):
    found = json.loads(get(address, "/api/v1/runs").text)
    assert "&lt;script&gt;" in found["list"]
    assert "<script" not in found["list"] + found["view"]
    for asked in ("run=99", "run=-1", "run=/etc", "run=none"):
        assert json.loads(get(address, f"/api/v1/runs?{asked}").text)["view"] == ""


def test_memory_is_held_against_the_plan_where_a_cluster_is_named(tmp_path: Path):
    folder = write_run(tmp_path / "planned")
    state = State.parse("v1&model=llama-3.1-8b&dp=8&tp=8&pp=1&B=1M")
    (folder / "run.toml").write_text(run_file_of(state))
    run = read_run(folder)
    found = phalanx.estimate("llama-3.1-8b", "h100x64", "dp=8 tp=8", batch=120, seq=8192)
    assert run.planned == found.peak_bytes
    assert "planned, planned" in view([run])
