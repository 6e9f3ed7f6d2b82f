import json
import math
import re
from pathlib import Path

import pytest

from phalanx.trainer.run.report import StepMetrics, Summary

# What scripts rely on.
METRICS_KEYS = {
    "step", "loss", "grad_norm", "lr", "tokens", "seconds", "tokens_per_second", "mfu", "hfu",
    "data_wait_seconds", "peak_bytes", "skipped", "loss_scale",
    "expert_load", "expert_dropped",
}  # fmt: skip


def metrics(**values: float) -> StepMetrics:
    known = {"loss": 2.0, "grad_norm": 1.0, **values}
    return StepMetrics(
        step=1,
        steps=2,
        learning_rate=1e-3,
        tokens=10,
        seconds=1.0,
        tokens_per_second=10.0,
        flops_per_second=1e9,
        **known,
    )


def summary(**values: float) -> Summary:
    return Summary(
        layout="dp=1 pp=1 tp=1",
        parameters=1,
        last_step=1,
        steps=1,
        first_loss=2 * math.log(2),
        last_loss=math.log(2),
        tokens=10,
        seconds=1.0,
        tokens_per_second=10.0,
        flops_per_second=1e9,
        **values,
    )


def test_a_line_of_metrics_has_the_keys_that_scripts_read() -> None:
    assert set(metrics().to_json()) >= METRICS_KEYS


def test_what_is_not_finite_becomes_null_in_json() -> None:
    document = metrics(loss=math.nan, grad_norm=math.inf).to_json()
    assert (document["loss"], document["grad_norm"]) == (None, None)
    json.dumps(document, allow_nan=False)
    json.dumps(
        summary(bytes_per_token=math.nan, validation_loss=math.nan).to_dict(), allow_nan=False
    )


def test_bits_per_byte_of_bytes_are_nats_over_the_logarithm_of_two() -> None:
    assert summary(bytes_per_token=1.0).bits_per_byte(math.log(2)) == pytest.approx(1.0)


def test_a_token_of_four_bytes_carries_a_quarter_of_its_bits_per_byte() -> None:
    document = summary(bytes_per_token=4.0).to_dict()
    assert document["first_bits_per_byte"] == pytest.approx(0.5)
    assert document["last_bits_per_byte"] == pytest.approx(0.25)


@pytest.mark.parametrize("unknown", [0.0, math.nan])
def test_without_a_known_text_there_are_no_bits_per_byte(unknown: float) -> None:
    assert summary(bytes_per_token=unknown).bits_per_byte(1.0) is None


def documented(heading: str) -> set[str]:
    """Fields that a section of the page about run folders describes."""
    page = (Path(__file__).parents[3] / "docs" / "run_directory.md").read_text()
    section = page.partition(f"## `{heading}`")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_every_field_of_the_metrics_is_documented_and_no_other() -> None:
    assert documented("metrics.jsonl") == set(metrics().to_json())


def test_every_field_of_the_summary_is_documented_and_no_other() -> None:
    assert documented("summary.json") == set(summary().to_dict())
