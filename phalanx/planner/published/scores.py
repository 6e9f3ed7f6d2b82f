"""How far predictions of published runs are off, over all of them and over like ones."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from phalanx.core.estimate import SIGMAS_OF_80_PERCENT
from phalanx.planner.published.runs import Prediction

FEWEST_TO_RANK = 5


@dataclass(frozen=True)
class Errors:
    """Absolute errors of some predictions, as fractions.

    Attributes:
        count: of predictions that have something to be compared with.
        mean, median, p90, worst: of the absolute errors.
        bias: median of the signed errors.
    """

    count: int
    mean: float
    median: float
    p90: float
    worst: float
    bias: float


@dataclass(frozen=True)
class Score:
    """The errors of one group of rows.

    Attributes:
        name: of the group.
        time: of our seconds; None where none were published, as of the others.
        baseline: of the baseline's seconds.
        memory: of our bytes.
    """

    name: str
    time: Errors | None
    baseline: Errors | None
    memory: Errors | None


@dataclass(frozen=True)
class Ranking:
    """Whether layouts of one model on so many devices come in the right order.

    Attributes:
        source, model, devices: which rows.
        count: how many.
        correlation: Spearman's, of predicted and published seconds.
    """

    source: str
    model: str
    devices: int
    count: int
    correlation: float


@dataclass(frozen=True)
class Accuracy:
    """All groups, and what holds over all rows.

    Attributes:
        groups: by source; then complete rows, then all.
        rankings: of all groups of rows that differ in their layout only.
        within: share of rows whose published seconds lie in the 80 % interval of ours.
        underestimated: share of rows with a published peak that lies more than 3 % over ours.
        skipped: rows without a prediction.
    """

    groups: tuple[Score, ...]
    rankings: tuple[Ranking, ...]
    within: float | None
    underestimated: float | None
    skipped: int


def summarize(predictions: Sequence[Prediction]) -> Accuracy:
    """The errors of all predictions, grouped."""
    made = [p for p in predictions if not p.skipped]
    sources: dict[str, list[Prediction]] = defaultdict(list)
    for prediction in made:
        sources[prediction.source or "no source"].append(prediction)
    groups = [score(name, rows) for name, rows in sources.items()]
    groups.append(score("complete layouts", [p for p in made if p.complete]))
    groups.append(score("all", made))
    return Accuracy(
        groups=tuple(groups),
        rankings=tuple(rankings(made)),
        within=_share(made, _is_within),
        underestimated=_share(made, _is_under),
        skipped=len(predictions) - len(made),
    )


def score(name: str, predictions: Iterable[Prediction]) -> Score:
    """The errors of one group; of a kind that nothing was published of, None.

    Args:
        name: of the group.
        predictions: of its rows.
    """
    rows = list(predictions)
    return Score(
        name,
        errors([e for p in rows if (e := p.time_error) is not None]),
        errors([e for p in rows if (e := p.baseline_error) is not None]),
        errors([e for p in rows if (e := p.memory_error) is not None]),
    )


def errors(signed: Sequence[float]) -> Errors | None:
    """Summarise signed errors; None if there are none.

    Args:
        signed: (predicted - published) / published, of each run.

    Example:
        >>> found = errors([0.1, -0.2, 0.3])
        >>> found.median, found.worst, found.bias
        (0.2, 0.3, 0.1)
    """
    if not signed:
        return None
    sizes = sorted(abs(error) for error in signed)
    return Errors(
        count=len(sizes),
        mean=statistics.fmean(sizes),
        median=statistics.median(sizes),
        p90=percentile(sizes, 0.9),
        worst=sizes[-1],
        bias=statistics.median(signed),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which a share of the values lies, interpolated between two of them.

    Args:
        ordered: at least one value, ascending.
        share: from 0, the first value, to 1, the last.

    Example:
        >>> percentile([1.0, 2.0, 4.0], 0.75)
        3.0
    """
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def rankings(predictions: Iterable[Prediction]) -> list[Ranking]:
    """The order of the rows in every group of one source, model and number of devices."""
    alike: dict[tuple[str, str, int], list[tuple[float, float]]] = defaultdict(list)
    for p in predictions:
        if p.seconds is not None and p.published_seconds is not None:
            alike[p.source, p.model, p.devices].append((p.seconds, p.published_seconds))
    return [
        Ranking(*group, len(pairs), spearman(pairs))
        for group, pairs in alike.items()
        if len(pairs) >= FEWEST_TO_RANK and len({published for _, published in pairs}) > 1
    ]


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Correlation of the ranks of two series; equal values share the mean of their ranks.

    Args:
        pairs: at least two, of which not all have the same second value.

    Example:
        >>> round(spearman([(1.0, 10.0), (2.0, 30.0), (3.0, 20.0)]), 3)
        0.5
    """
    left, right = (_ranks(side) for side in zip(*pairs, strict=True))
    return statistics.correlation(left, right) if len(set(left)) > 1 else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    places: dict[float, list[int]] = defaultdict(list)
    for place, value in enumerate(sorted(values)):
        places[value].append(place)
    return [statistics.fmean(places[value]) for value in values]


def _is_within(prediction: Prediction) -> bool | None:
    error = prediction.time_error
    if error is None:
        return None
    return abs(math.log1p(error)) <= SIGMAS_OF_80_PERCENT * prediction.spread


def _is_under(prediction: Prediction) -> bool | None:
    error = prediction.memory_error
    return None if error is None else error < -0.03


def _share(
    predictions: Iterable[Prediction], test: Callable[[Prediction], bool | None]
) -> float | None:
    results = [result for p in predictions if (result := test(p)) is not None]
    return statistics.fmean(results) if results else None
