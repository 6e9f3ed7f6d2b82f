"""Kernels of profiled steps: from the trainer's file to the report."""

import json

import pytest

from phalanx.cli.main import main
from phalanx.core.units import show_share
from phalanx.reports.kernels import by_kind, read_kernels

SMALL = (
    *("--layout", "dp=1 mb=2", "--quiet", "--name", "profiled", "--set", "recipe.steps=8"),
    *("--set", "recipe.seq=32", "--set", "recipe.batch=2", "--set", "recipe.warmup=2"),
    *("--set", "model.layers=1", "--set", "model.hidden=32", "--set", "model.heads=2"),
    *("--set", "recipe.evaluate_batches=0", "--set", "recipe.sample_tokens=0"),
)


@pytest.mark.ranks
def test_a_run_that_profiles_keeps_its_kernels_and_the_report_shows_them(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("a phalanx is a formation of ranks that moves as one. " * 200)
    assert main(["train", *SMALL, "--data", str(text), "--profile", "2"]) == 0
    folder = tmp_path / "runs" / "profiled"
    table = json.loads((folder / "kernels.json").read_text())
    assert (table["first"], table["last"]) == (4, 5)
    assert json.loads((folder / "kernels-trace.json").read_text())["traceEvents"]
    capsys.readouterr()
    assert main(["report", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kernels"]
    assert sum(k["share"] for k in found["kernels"]) == pytest.approx(1.0)
    assert found["kernel_seconds"]["matrix products"] > 0
    assert found["kernel_seconds"]["optimizer"] > 0
    assert sum(found["kernel_seconds"].values()) == pytest.approx(
        sum(k["seconds"] for k in found["kernels"])
    )
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    profiled = [step["seconds"] for step in steps if 4 <= step["step"] <= 5]
    assert sum(found["kernel_seconds"].values()) <= max(profiled)
    assert main(["report", str(folder)]) == 0
    assert "kernels of rank 0" in capsys.readouterr().out
    page = tmp_path / "page.html"
    assert main(["report", str(folder), "--html", str(page)]) == 0
    assert "Kernels of rank 0" in page.read_text()


def written(tmp_path, kernels):
    (tmp_path / "kernels.json").write_text(json.dumps({"kernels": kernels}))
    return tmp_path


def test_kernels_are_added_up_by_what_they_are_for(tmp_path):
    rows = [
        {"name": "small", "kind": "copies", "times": 4, "seconds": 1.0},
        {"name": "large", "kind": "attention", "times": 2, "seconds": 6.0},
        {"name": "other", "kind": "copies", "times": 1, "seconds": 3.0},
    ]
    notes: list[str] = []
    kernels = read_kernels(written(tmp_path, rows), notes)
    assert [kernel.name for kernel in kernels] == ["large", "other", "small"]
    assert by_kind(kernels) == {"attention": 6.0, "copies": 4.0}
    assert show_share(kernels[0].share) == show_share(0.6)
    assert not notes


@pytest.mark.parametrize(
    "rows", [[{"name": "x"}], [{"name": "x", "kind": "y", "times": 1, "seconds": "z"}], 3]
)
def test_a_file_of_kernels_that_cannot_be_read_is_a_note(tmp_path, rows):
    notes: list[str] = []
    assert read_kernels(written(tmp_path, rows), notes) == ()
    assert "kernels.json" in notes[0]


def test_a_run_without_a_profile_has_no_kernels(tmp_path):
    assert read_kernels(tmp_path, []) == ()
