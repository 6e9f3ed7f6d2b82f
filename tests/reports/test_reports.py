"""A report says where the time went: its terms add up, and every number is said once."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from recorded_runs import RECORDED, read_lines, rewrite, write_lines

import phalanx
from phalanx.catalog import load
from phalanx.cli.main import main
from phalanx.core.errors import UsageError
from phalanx.core.units import show_seconds
from phalanx.reports.record import number
from phalanx.reports.report import report_on
from phalanx.reports.waterfall import AT_PEAK, BELOW, DATA, REST


def test_terms_add_up_to_the_measured_step():
    found = report_on(RECORDED)
    assert math.fsum(term.measured for term in found.terms) == pytest.approx(
        found.step_seconds, rel=1e-9
    )
    assert math.fsum(term.share for term in found.terms) == pytest.approx(1.0)


def test_planned_terms_add_up_to_the_planned_step():
    found = report_on(RECORDED)
    planned = found.plan.estimate.step_seconds
    assert math.fsum(term.planned for term in found.terms) == pytest.approx(planned, rel=1e-9)
    below = next(term for term in found.terms if term.name == BELOW)
    assert math.fsum(below.parts.values()) == pytest.approx(below.planned)


@pytest.mark.parametrize(
    ("layout", "cluster"),
    [
        ("dp=2 pp=4 tp=4 ep=2 mb=2 recompute=full", "h100x32"),
        ("dp=4 pp=2 cp=2 tp=2 zero=3", "h100x32"),
        ("dp=8 pp=4 schedule=zb-h1", "a100x32"),
        ("dp=16 tp=2 zero=3 offload=activations", "h100x32"),
        ("dp=8 pp=4 schedule=pipedream", "h100x32"),
    ],
)
def test_planned_terms_add_up_under_every_axis(layout: str, cluster: str, copied: Path):
    model = "mixtral-8x7b" if "ep=" in layout else "llama-3.1-8b"
    run = phalanx.Run.from_tables(
        {"layout": layout, "recipe": {"batch": 64, "seq": 2048, "clip": 0.0}}
    )
    run = phalanx.Run(model=load.model(model), layout=run.layout, recipe=run.recipe)
    (copied / "run.toml").write_text(run.to_toml())
    for name in ("env.json", "summary.json"):
        (copied / name).write_text(json.dumps({"layout": f"{layout} precision=bf16"}))
    found = report_on(copied, load.cluster(cluster))
    assert found.plan is not None, found.notes
    planned = math.fsum(term.planned for term in found.terms)
    assert planned == pytest.approx(found.plan.estimate.step_seconds, rel=1e-9)
    rest = next(term for term in found.terms if term.name == REST)
    assert rest.planned == 0, "the planner has a term that a report does not know"


def test_wall_clock_adds_up_and_is_that_of_the_events():
    found = report_on(RECORDED)
    assert math.fsum(t.measured for t in found.wall.terms) == pytest.approx(found.wall.seconds)
    times = [event.time for event in found.events]
    assert found.wall.seconds == pytest.approx(max(times) - min(times), rel=1e-3)


def test_the_step_is_the_mean_of_the_metrics_of_its_steps():
    found = report_on(RECORDED)
    counted = [
        line["seconds"]
        for line in read_lines(RECORDED / "metrics.jsonl")
        if found.step.first <= line["step"] <= found.step.last
    ]
    assert found.step_seconds == pytest.approx(sum(counted) / len(counted), rel=1e-9)


def test_mfu_is_the_first_term_over_the_step_and_flop_over_the_peak():
    found = report_on(RECORDED)
    document = found.to_dict()
    assert found.terms[0].name == AT_PEAK
    assert found.terms[0].share == pytest.approx(document["mfu"])
    line = read_lines(RECORDED / "metrics.jsonl")[-1]
    flops = line["flops_per_second"] / line["tokens_per_second"] * document["tokens_per_second"]
    assert flops / document["flops_per_second_at_peak"] == pytest.approx(document["mfu"])


def test_goodput_is_the_steps_over_the_wall_clock():
    found = report_on(RECORDED)
    seconds = sum(line["seconds"] for line in read_lines(RECORDED / "metrics.jsonl"))
    assert found.to_dict()["goodput"] == pytest.approx(seconds / found.wall.seconds)


def test_rank_0_sent_what_the_planner_says_to_the_byte():
    found = report_on(RECORDED)
    assert found.traffic
    assert all(message.equal for message in found.traffic)
    sent = {message.purpose: message.sent for message in found.traffic}
    # 8 micro-batches of 64 tokens of 64 numbers of 4 bytes
    assert sent == {"activations": 8 * 64 * 64 * 4, "gradient norm": 8, "loss": 8}


def test_a_message_that_is_not_as_planned_is_said(copied: Path):
    rewrite(copied / "ranks.jsonl", lambda line: {**line, "messages": line["messages"][:1]})
    found = report_on(copied)
    assert [message.equal for message in found.traffic] == [True, False, False]


def test_every_form_says_the_same_step(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    page = tmp_path / "page.html"
    texts = {}
    for form in ("table", "markdown", "csv"):
        main(["report", str(RECORDED), "--format", form])
        texts[form] = capsys.readouterr().out
    main(["report", str(RECORDED), "--html", str(page)])
    texts["html"] = page.read_text()
    for term in report_on(RECORDED).terms:
        for form, text in texts.items():
            assert term.name in text, form
            assert show_seconds(term.measured) in text, (form, term.name)


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]):
    assert main(["report", str(RECORDED), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report_on(RECORDED).to_dict()


def test_a_run_that_was_killed_says_so(copied: Path):
    (copied / "done").unlink()
    (copied / "summary.json").unlink()
    lines = (copied / "events.jsonl").read_text().splitlines()
    (copied / "events.jsonl").write_text(lines[0] + "\n")
    found = report_on(copied)
    assert found.state == "going on, or ended without a word"
    assert math.fsum(t.measured for t in found.terms) == pytest.approx(found.step_seconds)


def test_torn_lines_are_left_out_and_said(copied: Path):
    whole = report_on(copied)
    for name in ("metrics.jsonl", "ranks.jsonl", "events.jsonl"):
        with (copied / name).open("ab") as file:
            file.write(
                b'{"step": 13, "seconds": 0.0\xff\n[1]\n{"step": "x", "seconds": null}\n{"st'
            )
    found = report_on(copied)
    assert found.step_seconds == whole.step_seconds
    assert sum("torn" in note for note in found.notes) == 3


@pytest.mark.parametrize("bad", ["1e999", "NaN", '"seven"', "true", "[]", "{}", "-1", "null"])
def test_a_value_that_is_no_number_is_as_none(bad: str, copied: Path):
    keys = ("seconds", "mfu", "flops_per_second", "loss", "time", "peak_bytes", "tokens")
    lines = (copied / "metrics.jsonl").read_text().splitlines()
    for key in keys:
        odd = json.loads(lines[-1]) | {"step": 13, key: 0.123454321}
        lines.append(json.dumps(odd).replace("0.123454321", bad))
    (copied / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    rewrite(copied / "ranks.jsonl", lambda line: {**line, "ranks": json.loads(f"[{bad}]")})
    document = report_on(copied).to_dict()
    json.dumps(document, allow_nan=False)
    assert document["step_seconds"] > 0


def test_a_run_of_another_version_is_reported_without_a_plan(copied: Path):
    file = copied / "run.toml"
    file.write_text(file.read_text() + "\n[telepathy]\nlevel = 9\n")
    found = report_on(copied)
    assert found.plan is None
    assert any("of another version" in note for note in found.notes)
    assert math.fsum(t.measured for t in found.terms) == pytest.approx(found.step_seconds)
    assert [t.planned for t in found.terms] == [None] * len(found.terms)


@pytest.mark.parametrize("name", ["run.toml", "env.json", "summary.json", "events.jsonl"])
def test_a_run_that_lost_a_file_is_reported(name: str, copied: Path):
    (copied / name).unlink()
    found = report_on(copied)
    json.dumps(found.to_dict(), allow_nan=False)
    assert found.step_seconds > 0
    (copied / name).mkdir()
    report_on(copied)


def test_without_ranks_the_summary_says_where_a_step_went(copied: Path):
    (copied / "ranks.jsonl").unlink()
    found = report_on(copied)
    assert math.fsum(t.measured for t in found.terms) == pytest.approx(found.step_seconds)
    assert found.step.source.startswith("summary.json")
    (copied / "summary.json").unlink()
    bare = report_on(copied)
    assert {term.name for term in bare.terms if term.measured} == {AT_PEAK, DATA, REST}
    assert math.fsum(t.measured for t in bare.terms) == pytest.approx(bare.step_seconds)


def test_without_a_peak_there_is_arithmetic_and_no_mfu(copied: Path):
    rewrite(copied / "metrics.jsonl", lambda line: {**line, "mfu": None, "hfu": None})
    found = report_on(copied)
    assert found.plan is None
    assert found.terms[0].name == "arithmetic"
    assert math.fsum(t.measured for t in found.terms) == pytest.approx(found.step_seconds)


def test_a_run_without_a_step_says_so(copied: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("metrics.jsonl", "ranks.jsonl", "summary.json", "done"):
        (copied / name).unlink()
    found = report_on(copied)
    assert found.terms == ()
    assert found.state == "no step is done"
    assert any("nothing to explain" in note for note in found.notes)
    for words in (["report", str(copied)], ["doctor", str(copied)]):
        assert main(words) == 0
    assert main(["report", str(copied), "--html", str(copied / "page.html")]) == 0
    assert "no step is done" in capsys.readouterr().out


def test_a_folder_that_is_no_run_is_refused_with_those_it_holds(tmp_path: Path):
    shutil.copytree(RECORDED, tmp_path / "one")
    with pytest.raises(UsageError, match="it holds one"):
        phalanx.report(tmp_path)
    with pytest.raises(UsageError, match="no such folder"):
        phalanx.report(tmp_path / "two")


def test_a_cluster_of_another_size_plans_nothing():
    found = phalanx.report(RECORDED, cluster="h100x8")
    assert found.plan is None
    assert any("8 devices, and the run has 2 ranks" in note for note in found.notes)


def test_steps_that_were_done_again_count_once(copied: Path):
    lines = read_lines(copied / "ranks.jsonl")
    again = {**lines[-1], "seconds": 70.0, "first": 6, "last": 12}
    write_lines(copied / "ranks.jsonl", [*lines, again])
    assert report_on(copied).step_seconds == pytest.approx(10.0)


def test_windows_of_steps_that_a_run_went_back_behind_do_not_count(copied: Path):
    lines = read_lines(copied / "ranks.jsonl")
    behind = [{**lines[-1], "first": 13, "last": 62, "seconds": 1e6}, *lines]
    write_lines(copied / "ranks.jsonl", [lines[0], *behind])
    assert report_on(copied).step_seconds == report_on(RECORDED).step_seconds


def test_reading_a_run_brings_no_torch():
    code = f"""
import sys
from phalanx.cli.main import main
assert main(["report", {str(RECORDED)!r}]) == 0
assert main(["doctor", {str(RECORDED)!r}]) == 0
assert main(["doctor"]) == 0
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_number_is_finite_or_none():
    assert number(10**400) is None
