"""How right the planner is: predictions of published runs, beside what was published."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.core.errors import require_type
from phalanx.core.html import html_table
from phalanx.core.units import show_share
from phalanx.planner.published.rows import read_rows
from phalanx.planner.published.runs import Prediction, predict_all
from phalanx.planner.published.scores import Accuracy, Errors, Score, summarize

SCHEMA = 1


@dataclass(frozen=True)
class Published:
    """Predictions of published runs.

    Attributes:
        predictions: one for each row of the file, in its order.
        accuracy: how far off they are, over all rows and over groups of them.

    Example:
        >>> import phalanx
        >>> found = phalanx.published("benchmarks/published/runs_fit.csv")
        >>> found.accuracy.groups[-1].name
        'all'
    """

    predictions: tuple[Prediction, ...]
    accuracy: Accuracy

    def to_dict(self) -> dict[str, Any]:
        """The document that `phalanx published --json` prints."""
        accuracy = self.accuracy
        return {
            "schema": SCHEMA,
            "rows": [_record(prediction) for prediction in self.predictions],
            "summary": {
                "groups": {score.name: _score(score) for score in accuracy.groups},
                "rankings": [asdict(ranking) for ranking in accuracy.rankings],
                "within_80": accuracy.within,
                "memory_under_by_3_percent": accuracy.underestimated,
                "skipped": accuracy.skipped,
            },
        }

    def _repr_html_(self) -> str:
        """The errors of each group as a table, for a notebook."""
        rows = [
            (
                group.name,
                group.time.count,
                show_share(group.time.median),
                show_share(group.time.p90),
            )
            for group in self.accuracy.groups
            if group.time is not None
        ]
        return html_table("errors of step_seconds", rows, ("group", "rows", "median", "90 %"))


def published(path: str | Path) -> Published:
    """Predict every row of a file of published runs, and compare.

    Args:
        path: of a CSV file with one run per row; `benchmarks/published/README.md` says which
            columns there are.

    Returns:
        A prediction for each row, or why it is skipped, and the errors over all of them.

    Raises:
        UsageError: the file cannot be read, or lacks a column.

    Example:
        >>> import phalanx
        >>> len(phalanx.published("benchmarks/published/runs_fit.csv").predictions) > 100
        True
    """
    require_type("path", path, (str, Path), "the path of a CSV file")
    predictions = predict_all(read_rows(Path(path)))
    return Published(tuple(predictions), summarize(predictions))


def _record(prediction: Prediction) -> dict[str, Any]:
    interval = prediction.interval
    return {
        "id": prediction.id,
        "predicted_step_seconds": prediction.seconds,
        "predicted_step_seconds_80": None if interval is None else list(interval),
        "published_step_seconds": prediction.published_seconds,
        "time_error": prediction.time_error,
        "baseline_step_seconds": prediction.baseline_seconds,
        "baseline_error": prediction.baseline_error,
        "predicted_peak_bytes": prediction.peak_bytes,
        "published_peak_bytes": prediction.published_peak_bytes,
        "memory_error": prediction.memory_error,
        "spread": prediction.spread,
        "spread_reason": prediction.spread_reason,
        "fits": prediction.fits,
        "layout": prediction.layout,
        "complete": prediction.complete,
        "assumptions": list(prediction.assumptions),
        "skipped": prediction.skipped or None,
    }


def _score(score: Score) -> dict[str, Any]:
    parts: dict[str, Errors | None] = {
        "time": score.time,
        "baseline": score.baseline,
        "memory": score.memory,
    }
    return {name: None if part is None else asdict(part) for name, part in parts.items()}
