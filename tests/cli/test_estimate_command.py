import json
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli.main import main

PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "published"
FITS = ["llama-3.1-8b", "h100x16", "--layout", "tp=2 pp=2 zero=1", "--batch", "64"]
TOO_LARGE = ["llama-3.1-8b", "h100x8", "--layout", "dp=8 zero=0", "--batch", "64"]


def run(capsys, *words):
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def test_an_estimate_shows_seconds_bytes_and_messages(capsys):
    code, out, _ = run(capsys, "estimate", *FITS)
    assert code == 0
    for words in (
        "a step (80 %",
        "matrix products: at the peak",
        "rank 1",
        "reduce-scatter",
        "MFU",
    ):
        assert words in out
    assert "dp=4 pp=2 tp=2" in out


def test_json_has_the_fields_that_scripts_rely_on(capsys):
    code, out, _ = run(capsys, "estimate", *FITS, "--json")
    document = json.loads(out)
    assert code == 0
    assert document["schema"] == 1
    assert document["layout"] == "dp=4 pp=2 tp=2 precision=bf16"
    total = sum(child["seconds"] for child in document["terms"]["children"])
    assert total == pytest.approx(document["step_seconds"])
    memory = document["memory"]
    assert set(memory["by_class"]) == {
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "logits",
        "buffers",
        "reserve",
    }
    assert memory["peak_bytes"] == pytest.approx(sum(memory["by_class"].values()))
    assert len(memory["stages"]) == 2
    axes = {message["axis"] for message in document["traffic"]}
    assert axes == {"data", "tensor", "pipeline", "world"}
    for message in document["traffic"]:
        assert 0 <= message["exposed_seconds"] <= message["seconds"] * 1.01
        assert 0 < message["bytes_per_rank"] <= 2 * message["bytes"]


def test_markdown_is_a_table_of_the_tree(capsys):
    code, out, _ = run(capsys, "estimate", *FITS, "--format", "markdown")
    assert code == 0
    assert out.startswith("| part | seconds | share | worth |\n| --- |")
    assert "pipeline axis" in out


def test_what_does_not_fit_is_shown_and_refused_with_a_cure(capsys):
    code, out, err = run(capsys, "estimate", *TOO_LARGE)
    assert code == 3
    assert "rank 0" in out
    assert "too much" in err
    assert "it fits with zero=" in err
    assert len(err.splitlines()) == 1


def test_dp_is_what_the_other_axes_leave(capsys):
    _, out, _ = run(capsys, "estimate", *TOO_LARGE[:3], "tp=4", "--tokens", "1Mi", "--json")
    assert json.loads(out)["layout"] == "dp=2 pp=1 tp=4 precision=bf16"


def test_frameworks_have_other_prices(capsys):
    words = [
        "estimate",
        "llama-2-7b",
        "a100x8",
        "--layout",
        "zero=3 recompute=full",
        "--batch",
        "64",
    ]
    times = {}
    for framework in ("phalanx", "fsdp", "megatron"):
        _, out, _ = run(capsys, *words, "--framework", framework, "--json")
        times[framework] = json.loads(out)["step_seconds"]
    assert len(set(times.values())) == 3


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["llama-9", "h100x8", "--layout", "zero=3", "--batch", "8"], 2, "unknown model"),
        (["llama-3.1-8b", "h10x8", "--layout", "zero=3", "--batch", "8"], 2, "unknown accelerator"),
        (
            ["llama-3.1-8b", "h100x8", "--layout", "tp=3", "--batch", "8"],
            3,
            "the nearest that fits",
        ),
        (
            ["llama-3.1-8b", "h100x8", "--layout", "zero=3", "--batch", "0"],
            2,
            "at least 1 sequence",
        ),
        (["llama-3.1-8b", "h100x8", "--layout", "zero=3", "--tokens", "-4"], 2, "--tokens"),
        (["llama-3.1-8b", "h100x8", "--layout", "zero=3", "--tokens", "1e30"], 2, "at most"),
        (["llama-3.1-8b", "h100x8", "--layout", "zero=9", "--batch", "8"], 2, "zero can be"),
        (["llama-3.1-8b", "a100x8", "--layout", "precision=fp8", "--batch", "8"], 3, "no fp8"),
        (["llama-3.1-8b", "h100x8", "--layout", "zero=3"], 2, "--batch --tokens is required"),
    ],
)
def test_bad_questions_get_one_line(capsys, words, code, message):
    found, out, err = run(capsys, "estimate", *words)
    assert (found, out) == (code, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_published_runs_are_compared_row_by_row(capsys, tmp_path):
    lines = (PUBLISHED / "runs_fit.csv").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith(("SX-", "K22-"))]
    file = tmp_path / "some.csv"
    file.write_text("\n".join([lines[0], *rows]) + "\n", encoding="utf-8")
    code, out, _ = run(capsys, "published", str(file))
    assert code == 0
    assert "SX-llama3_70b_l12_tp8_pp1_dp1_mbc4_cef" in out
    assert "baseline" in out
    code, out, _ = run(capsys, "published", str(file), "--json")
    document = json.loads(out)
    assert code == 0
    assert len(document["rows"]) == len(rows) == 22
    for row in document["rows"]:
        assert row["skipped"] is None
        assert row["time_error"] == pytest.approx(
            row["predicted_step_seconds"] / row["published_step_seconds"] - 1
        )
    assert set(document["summary"]["groups"]["all"]) == {"time", "baseline", "memory"}


def test_a_file_that_is_not_there_is_said_in_one_line(capsys):
    code, out, err = run(capsys, "published", "nowhere.csv")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1


def test_help_needs_no_torch():
    words = [sys.executable, "-X", "importtime", "-m", "phalanx", "estimate", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "--layout" in done.stdout
    assert "torch" not in done.stderr
