"""`phalanx models` and `phalanx clusters`: what they print, in every form."""

import csv
import json
from argparse import ArgumentParser
from types import ModuleType
from typing import Any

import pytest

from phalanx.catalog import load
from phalanx.cli import clusters, models
from phalanx.cli.main import main
from phalanx.core.errors import UsageError


def call(command: ModuleType, *words: str) -> int:
    parser = ArgumentParser()
    command.arguments(parser)
    code: int = command.run(parser.parse_args(words))
    return code


def document(command: ModuleType, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert call(command, *words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_models_lists_every_model_in_one_line_each(capsys: pytest.CaptureFixture[str]):
    assert call(models) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [e.shape.name for e in load.models()]


def test_models_shows_one_with_its_source(capsys: pytest.CaptureFixture[str]):
    assert call(models, "llama-3-405b") == 0
    text = capsys.readouterr().out
    for part in ("406B", "6.49 TB", "maxtext", "N without the input embedding"):
        assert part in text


def test_experts_and_dense_layers_have_each_their_width(capsys: pytest.CaptureFixture[str]):
    assert call(models, "deepseek-v3") == 0
    assert "18432 in 3 dense layers, 2048 in each expert" in capsys.readouterr().out


def test_models_as_json_carries_counts_and_their_convention(capsys: pytest.CaptureFixture[str]):
    found = document(models, capsys, "deepseek-v3")
    (record,) = found["models"]
    shape = load.model("deepseek-v3")
    assert found["schema"] == 1
    assert record["parameters"] == shape.params()
    assert record["active_parameters"] == shape.active_params()
    assert "causal" in record["convention"]


@pytest.mark.parametrize("command", [models, clusters])
def test_json_is_one_document(command: ModuleType, capsys: pytest.CaptureFixture[str]):
    assert document(command, capsys)["schema"] == 1


def test_csv_reads_back(capsys: pytest.CaptureFixture[str]):
    call(models, "--format", "csv")
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert {row["model"] for row in rows} == {e.shape.name for e in load.models()}


def test_markdown_is_a_table(capsys: pytest.CaptureFixture[str]):
    call(clusters, "h100x16", "--format", "markdown")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "| --- | --- |"
    assert {line.count("|") for line in lines} == {3}


def test_clusters_lists_every_accelerator(capsys: pytest.CaptureFixture[str]):
    call(clusters)
    text = capsys.readouterr().out
    assert all(device.name in text for device in load.accelerators())


def test_clusters_shows_what_a_count_of_them_holds(capsys: pytest.CaptureFixture[str]):
    call(clusters, "h100x16384")
    text = capsys.readouterr().out
    assert "1.31 PB in all" in text
    assert "switch of 8" in text
    assert "50 GB/s one way each" in text


def test_a_torus_names_its_axes(capsys: pytest.CaptureFixture[str]):
    call(clusters, "tpu-v5p:16x16x16")
    assert "torus of 4,096 as 16x16x16" in capsys.readouterr().out


def test_a_cluster_as_json_has_bytes_and_seconds(capsys: pytest.CaptureFixture[str]):
    found = document(clusters, capsys, "h100x64")
    assert found["cluster"]["memory_bytes"] == 64 * 80e9
    assert found["accelerator"]["domain"]["bytes_per_second"] == 450e9


def test_unknown_names_and_silly_lengths_are_refused():
    with pytest.raises(UsageError, match="did you mean"):
        call(models, "lama-3-8b")
    with pytest.raises(UsageError, match="phalanx models lists"):
        call(models, "zzz")
    with pytest.raises(UsageError, match="at least 1 token"):
        call(models, "gpt2", "--seq", "0")


def test_a_model_on_a_cluster_has_limits_of_its_axes(capsys: pytest.CaptureFixture[str]):
    assert main(["models", "llama-3.1-70b", "--on", "h100x64"]) == 0
    shown = capsys.readouterr().out
    assert "up to tp=13" in shown
    assert "2,474 tokens a device" in shown  # the scaling book's 2,475 in round numbers


def test_limits_are_those_of_one_model(capsys: pytest.CaptureFixture[str]):
    assert main(["models", "--on", "h100x64"]) == 2
    assert "--on is for one model" in capsys.readouterr().err
