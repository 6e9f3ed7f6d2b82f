"""Predictions of published runs as rows of a table, as one JSON document, and in a few words."""

import statistics
from dataclasses import asdict
from typing import Any

from phalanx.core.units import show_bytes, show_seconds, show_share
from phalanx.planner.published.runs import Prediction
from phalanx.planner.published.scores import Errors, Score, Summary

SCHEMA = 1
ROW_HEADERS = ("row", "predicted", "published", "error", "baseline", "memory", "published", "error")
SCORE_HEADERS = (
    "group",
    "rows",
    "time mean",
    "median",
    "90 %",
    "worst",
    "bias",
    "baseline mean",
    "median",
    "peaks",
    "memory mean",
    "worst",
    "bias",
)


def document(predictions: list[Prediction], summary: Summary) -> dict[str, Any]:
    """What `--json` prints; see the interface page for the fields that scripts rely on."""
    return {
        "schema": SCHEMA,
        "rows": [_record(prediction) for prediction in predictions],
        "summary": {
            "groups": {score.name: _score(score) for score in summary.groups},
            "rankings": [asdict(ranking) for ranking in summary.rankings],
            "within_80_percent": summary.within,
            "memory_under_by_3_percent": summary.underestimated,
            "skipped": summary.skipped,
        },
    }


def _record(prediction: Prediction) -> dict[str, Any]:
    return {
        "id": prediction.id,
        "predicted_step_seconds": prediction.seconds,
        "predicted_step_seconds_80_percent": prediction.interval,
        "published_step_seconds": prediction.published_seconds,
        "time_error": prediction.time_error,
        "baseline_step_seconds": prediction.baseline_seconds,
        "baseline_error": prediction.baseline_error,
        "predicted_peak_bytes": prediction.peak_bytes,
        "published_peak_bytes": prediction.published_peak_bytes,
        "memory_error": prediction.memory_error,
        "spread": prediction.spread,
        "fits": prediction.fits,
        "layout": prediction.layout,
        "complete": prediction.complete,
        "assumptions": list(prediction.assumptions),
        "skipped": prediction.skipped or None,
    }


def _score(score: Score) -> dict[str, Any]:
    parts = {"time": score.time, "baseline": score.baseline, "memory": score.memory}
    return {name: None if part is None else asdict(part) for name, part in parts.items()}


def row(prediction: Prediction) -> tuple[str, ...]:
    """One prediction as the cells of a table."""
    return (
        prediction.id,
        _seconds(prediction.seconds),
        _seconds(prediction.published_seconds),
        _signed(prediction.time_error),
        _signed(prediction.baseline_error),
        _bytes(prediction.peak_bytes if prediction.published_peak_bytes else None),
        _bytes(prediction.published_peak_bytes),
        _signed(prediction.memory_error),
    )


def score_row(score: Score) -> tuple[str, ...]:
    """The errors of one group as the cells of a table."""
    time, baseline, memory = score.time, score.baseline, score.memory
    return (
        score.name,
        str(time.count) if time else "-",
        *(_share(time, key) for key in ("mean", "median", "p90", "worst")),
        _signed(time.bias if time else None),
        *(_share(baseline, key) for key in ("mean", "median")),
        str(memory.count) if memory else "-",
        *(_share(memory, key) for key in ("mean", "worst")),
        _signed(memory.bias if memory else None),
    )


def skipped(predictions: list[Prediction]) -> list[str]:
    """What was left out, and why."""
    return [f"skipped {p.id}: {p.skipped}" for p in predictions if p.skipped]


def closing(predictions: list[Prediction], summary: Summary) -> list[str]:
    """What holds over all rows."""
    lines = [
        f"rank correlation {ranking.correlation:.2f} of {ranking.count} rows: {ranking.source}, "
        f"{ranking.model} on {ranking.devices} devices"
        for ranking in summary.rankings
    ]
    if summary.within is not None:
        spreads = [p.spread for p in predictions if p.seconds is not None]
        lines.append(
            f"{show_share(summary.within)} of the step times lie in the interval that should hold "
            f"80 % (spread {show_share(statistics.fmean(spreads))} on the rows of the fit)"
        )
    if summary.underestimated is not None:
        lines.append(
            f"{show_share(summary.underestimated)} of the peaks lie more than 3 % over ours"
        )
    filled = sum(bool(p.assumptions) for p in predictions if not p.skipped)
    lines.append(
        f"{filled} rows leave something open; --json says for each what was assumed. The baseline "
        "is executed FLOP at one share of the peak per accelerator, fitted on the rows of the fit"
    )
    return lines


def _seconds(value: float | None) -> str:
    return "-" if value is None else show_seconds(value)


def _bytes(value: float | None) -> str:
    return "-" if value is None else show_bytes(value, binary=True)


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def _share(errors: Errors | None, key: str) -> str:
    return "-" if errors is None else show_share(getattr(errors, key))
