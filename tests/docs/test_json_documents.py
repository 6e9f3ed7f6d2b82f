"""One quantity has one name in all documents, and every name is in the reference."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import ROOT

import phalanx
from phalanx.api.documents import DOCUMENTS, legend_of
from phalanx.cli.main import COMMANDS, main
from phalanx.core.quantities import QUANTITIES
from phalanx.trainer.checkpoint import Piece, Saver
from phalanx.trainer.run.report import StepMetrics

HOME = tempfile.TemporaryDirectory(prefix="phalanx-", ignore_cleanup_errors=True)
SAVED = HOME.name
RECORDED = str(Path(SAVED) / "recorded")
KERNEL = {"name": "aten::mm", "kind": "matrix products", "times": 2, "seconds": 0.1}
PUBLISHED = ROOT / "benchmarks" / "published" / "runs_validate.csv"
PLAN = ("plan", "llama-3.1-8b", "h100x64", "--tokens", "1Mi")
ASKED = {  # command lines whose documents have between them every field
    "plan": [
        (*PLAN, "--train-tokens", "1T", "--price", "2", "--why", "dp=64 pp=1 tp=1 zero=0 mb=2"),
        (*PLAN, "--why", "dp=32 pp=1 tp=3"),
        ("plan", "llama-3.1-405b", "h100x16384", "--tokens", "16M"),  # splits the backward
    ],
    "estimate": [
        (
            "estimate",
            "llama-3.1-8b",
            "h100x64",
            "--layout",
            "tp=4 pp=2",
            "--batch",
            "64",
            "--train-tokens",
            "1T",
        ),
    ],
    "published": [("published", str(PUBLISHED))],
    "schedule": [("schedule", "interleaved", "-p", "2", "-m", "4")],
    "data tokenize": [
        ("data", "tokenize", str(ROOT / "README.md"), "-o", str(Path(SAVED) / "tokens"), "--quiet")
    ],
    "data show": [("data", "show", str(ROOT / "LICENSE"))],
    "verify": [("verify", "--layout", "tp=2", "--steps", "1")],
    "report": [("report", RECORDED)],
    "report RUN RUN2": [("report", RECORDED, str(Path(SAVED) / "other"))],
    "doctor": [("doctor", RECORDED), ("doctor",)],
    "drill": [("drill", str(Path(SAVED) / "drill.toml"), "--faults", "crash", "--steps", "6")],
    "checkpoints": [("checkpoints", SAVED)],
    "checkpoints --show": [("checkpoints", SAVED, "--show", "1")],
    "checkpoints --diff": [("checkpoints", SAVED, "--diff", "1", "2")],
    "train --dry-run": [("train", str(ROOT / "examples" / "demo.toml"), "--dry-run")],
    "models": [("models",), ("models", "llama-3.1-8b", "--on", "h100x64")],
    "clusters": [("clusters",)],
    "clusters NAME": [("clusters", "h100x64")],
    "explore": [("explore", "--state", "v1&speed=7")],
    "help": [("help", "zero")],
}
DRILLED = """
layout = "dp=2"
model = {layers = 2, hidden = 32, heads = 2}
recipe = {seq = 16, batch = 4, steps = 6, warmup = 2, evaluate_batches = 1}
"""
RARE = {  # what few documents have
    "heuristic.refused",  # where the textbook finds nothing that fits
    "resumes",  # with --resume
}
WITHOUT = {"convert"}  # writes a folder; its document is the summary of the run


@pytest.fixture(autouse=True, scope="module")
def saved() -> Iterator[None]:
    """Two checkpoints to list, open and compare, and one set aside."""
    with HOME:
        saver = Saver(Path(SAVED) / "checkpoints", 0, 1, attempt="a")
        for step in (1, 2):
            data = torch.full((4,), step)
            saver.save(step, [Piece("w", "weight", (4,), (0,), (4,), 0, 4, data)], {"batch": step})
            saver.wait()
        recorded = shutil.copytree(ROOT / "tests" / "reports" / "recorded", RECORDED)
        (Path(recorded) / "kernels.json").write_text(json.dumps({"kernels": [KERNEL]}))
        other = shutil.copytree(RECORDED, Path(SAVED) / "other")
        file = other / "run.toml"
        file.write_text(file.read_text().replace("batch = 8", "batch = 16"))
        (Path(SAVED) / "checkpoints" / "corrupt-step-00000001").mkdir()
        (Path(SAVED) / "drill.toml").write_text(DRILLED)
        yield


def paths(value: Any, command: str, prefix: str = "") -> Iterator[str]:
    """The path of every value, as the reference writes it."""
    if isinstance(value, list):
        for item in value:
            yield from paths(item, command, f"{prefix}[]")
        if not any(isinstance(item, dict) for item in value):
            yield prefix
    elif isinstance(value, dict) and prefix:
        if f"{prefix}{{}}" in DOCUMENTS[command]:
            yield f"{prefix}{{}}"
            return
        data = any(path.startswith(f"{prefix}{{}}.") for path in DOCUMENTS[command])
        for key, item in value.items():
            inner = f"{prefix}{{}}" if data else f"{prefix}.{key}"
            yield from paths(item, command, inner)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from paths(item, command, key)
    else:
        yield prefix


def tree_pruned(found: set[str], command: str) -> set[str]:
    """Without what lies below the children of a tree, and lists whose items are plain."""
    pruned = set()
    for path in found:
        cut = path.partition(".children[]")[0]
        shown = f"{cut}.children" if cut != path else path
        while shown.endswith("[]"):
            shown = shown.removesuffix("[]")
        pruned.add(shown)
    return pruned


def document(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    main([*words, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("command", ASKED)
def test_a_document_has_the_fields_of_the_reference_and_no_others(
    command: str, capsys: pytest.CaptureFixture[str]
):
    found: set[str] = set()
    for words in ASKED[command]:
        shown = document(words, capsys)
        assert shown["schema"] == 1
        found |= tree_pruned(set(paths(shown, command)), command)
    declared = set(DOCUMENTS[command])
    empty = {path for path in found if any(known.startswith(f"{path}.") for known in declared)}
    assert found - declared - empty == set(), "phalanx/api/documents.py does not have these"
    assert declared - found - RARE == set(), "the command does not print these"


def test_every_command_is_in_the_reference():
    assert {re.split(r"[ ,]", command)[0] for command in DOCUMENTS} == set(COMMANDS) - WITHOUT


def test_a_summary_has_the_fields_of_the_reference():
    summary = phalanx.Summary(
        layout="dp=1 pp=1 tp=1",
        parameters=1,
        last_step=1,
        steps=1,
        first_loss=1.0,
        last_loss=1.0,
        tokens=1,
        seconds=1.0,
        tokens_per_second=1.0,
        flops_per_second=1.0,
    )
    names = [path.removesuffix("{}") for path in DOCUMENTS["train"]]
    assert set(summary.to_dict()) == set(names)
    assert phalanx.Summary.from_dict(summary.to_dict()) == summary


def test_a_line_of_metrics_has_the_fields_of_the_reference():
    values = {field.name: 1 for field in fields(StepMetrics) if field.default is MISSING}
    values["exposed_seconds"] = {}
    names = [path.removesuffix("{}") for path in DOCUMENTS["train, metrics.jsonl"]]
    assert set(StepMetrics(**values).to_json()) == set(names)


def test_where_the_textbook_finds_nothing_the_plan_says_so():
    found = phalanx.plan("llama-3.1-8b", "h100x8", batch=8, seq=1024)
    refused = replace(found, heuristic="no pipeline depth fits")
    assert refused.to_dict()["heuristic"] == {"refused": "no pipeline depth fits"}


def test_every_quantity_is_in_some_document():
    used = {path for command in DOCUMENTS for path, _, _ in legend_of(command)}
    names = {part.strip("[]{}") for path in used for part in path.split(".")}
    elsewhere = {"error", "exit_code", "messages"}  # of a command that fails; of the API
    assert {quantity.name for quantity in QUANTITIES} - names - elsewhere == set()


def test_a_command_that_fails_prints_a_document_too(capsys: pytest.CaptureFixture[str]):
    shown = document(("plan", "lama", "h100x64", "--tokens", "1Mi"), capsys)
    assert set(shown) == {"schema", "error", "exit_code"}
