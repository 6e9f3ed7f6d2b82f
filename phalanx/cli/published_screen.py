"""Predictions of published runs as rows of a table, and in a few words."""

import statistics
from collections.abc import Iterable, Sequence

from phalanx.core.units import show_bytes, show_seconds, show_share
from phalanx.planner.published.runs import Prediction
from phalanx.planner.published.scores import Accuracy, Errors, Score

ROW_HEADERS = ("row", "predicted", "published", "error", "baseline")
PEAK_HEADERS = ("row", "peak", "published", "error")
SCORE_HEADERS = ("seconds of a step", "rows", "mean", "median", "90 %", "worst", "bias", "baseline")
PEAK_SCORE_HEADERS = ("bytes at the peak", "rows", "mean", "median", "worst", "bias")
MOST_OF_ID, MOST_OF_GROUP = 40, 22  # characters, so that a row fits into 80 columns


def row(prediction: Prediction) -> tuple[str, ...]:
    """The seconds of one prediction as the cells of a table."""
    return (
        _short(prediction.id),
        _seconds(prediction.seconds),
        _seconds(prediction.published_seconds),
        _signed(prediction.time_error),
        _signed(prediction.baseline_error),
    )


def peak_row(prediction: Prediction) -> tuple[str, ...]:
    """And its bytes, where some were published."""
    return (
        _short(prediction.id),
        _bytes(prediction.peak_bytes),
        _bytes(prediction.published_peak_bytes),
        _signed(prediction.memory_error),
    )


def score_row(score: Score) -> tuple[str, ...]:
    """The errors of the seconds of one group as the cells of a table."""
    time, baseline = score.time, score.baseline
    return (
        _short(score.name, MOST_OF_GROUP),
        str(time.count) if time else "-",
        *(_share(time, key) for key in ("mean", "median", "p90", "worst")),
        _signed(time.bias if time else None),
        _share(baseline, "mean"),
    )


def peak_score_row(score: Score) -> tuple[str, ...]:
    """And those of its bytes."""
    memory = score.memory
    return (
        _short(score.name, MOST_OF_GROUP),
        str(memory.count) if memory else "-",
        *(_share(memory, key) for key in ("mean", "median", "worst")),
        _signed(memory.bias if memory else None),
    )


def _short(name: str, most: int = MOST_OF_ID) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def skipped(predictions: Iterable[Prediction]) -> list[str]:
    """What was left out, and why."""
    return [f"skipped {p.id}: {p.skipped}" for p in predictions if p.skipped]


def closing(predictions: Sequence[Prediction], accuracy: Accuracy) -> list[str]:
    """What holds over all rows.

    Args:
        predictions: of every row.
        accuracy: how far off they are.
    """
    lines = [
        f"rank correlation {ranking.correlation:.2f} of {ranking.count} rows: {ranking.source}, "
        f"{ranking.model} on {ranking.devices} devices"
        for ranking in accuracy.rankings
    ]
    if accuracy.within is not None:
        spreads = [p.spread for p in predictions if p.seconds is not None]
        lines.append(
            f"{show_share(accuracy.within)} of the step times lie in the interval that should hold "
            f"80 % (mean spread {show_share(statistics.fmean(spreads))})"
        )
    if accuracy.underestimated is not None:
        lines.append(
            f"{show_share(accuracy.underestimated)} of the peaks lie more than 3 % over ours"
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
