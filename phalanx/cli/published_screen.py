"""Predictions of published runs as rows of a table, and in a few words."""

import statistics
from collections.abc import Iterable, Sequence

from phalanx.core.units import show_bytes, show_seconds, show_share
from phalanx.planner.published.runs import Prediction
from phalanx.planner.published.scores import Accuracy, Errors, Score

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
            f"80 % (spread {show_share(statistics.fmean(spreads))} on the rows of the fit)"
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
