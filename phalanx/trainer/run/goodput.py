"""How much of the time that a run took has become training, and what the rest went to.

Told from the run's own events and metrics, over all of its starts: the seconds of steps that stand
in the metrics are training, each step once, but for those that moved no weights. Time between a
stop and the next start belongs to whoever stopped it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

RESTARTING, REPEATED, SKIPPED = "restarting", "steps done twice", "skipped steps"
VALIDATION, BETWEEN = "validation", "saves and reports"


class Goodput(NamedTuple):
    """What became of the time of a run.

    Attributes:
        training: seconds of steps whose result was kept.
        lost: seconds by what they went to.
        restarts: how long each took, from the failure until ranks trained again.
    """

    training: float
    lost: Mapping[str, float]
    restarts: tuple[float, ...] = ()

    @property
    def wall(self) -> float:
        """Seconds in which somebody trained, or tried to."""
        return self.training + sum(self.lost.values())

    @property
    def share(self) -> float | None:
        """Of the time that has become training; None before there was any."""
        return self.training / self.wall if self.wall > 0 else None


class _Stretch(NamedTuple):
    """From a start to its end."""

    begin: float
    end: float
    failed: bool


def goodput(
    events: Iterable[Mapping[str, Any]], steps: Iterable[Mapping[str, Any]], now: float
) -> Goodput:
    """Account for the time of a run.

    Args:
        events: of the run, oldest first.
        steps: lines of its metrics.
        now: the end of a start that has not ended, in seconds since 1970.
    """
    lines = list(steps)
    stretches, restarts = _stretches(events, [line["time"] for line in lines], now)
    training = 0.0
    lost = dict.fromkeys((RESTARTING, REPEATED, SKIPPED, VALIDATION, BETWEEN), 0.0)
    lost[RESTARTING] = sum(restarts)
    for stretch in stretches:
        within = [line for line in lines if stretch.begin < line["time"] <= stretch.end]
        busy = sum(line["seconds"] for line in within)
        validating = sum(line.get("validation_seconds") or 0.0 for line in within)
        rest = max(stretch.end - stretch.begin - busy - validating, 0.0)
        skipped = sum(line["seconds"] for line in within if line.get("skipped"))
        training += busy - skipped
        lost[SKIPPED] += skipped
        lost[VALIDATION] += validating
        lost[REPEATED if stretch.failed else BETWEEN] += rest
    told = {name: seconds for name, seconds in lost.items() if seconds > 0}
    return Goodput(training, told, tuple(restarts))


def _stretches(
    events: Iterable[Mapping[str, Any]], times: list[float], now: float
) -> tuple[list[_Stretch], list[float]]:
    """Every start with its end, and the seconds from each failure to the next start."""
    found: list[_Stretch] = []
    restarts: list[float] = []
    begin = failed_at = None
    for event in events:
        time, kind = float(event["time"]), event["kind"]
        if kind not in ("start", "restart", "stop"):
            continue
        if begin is not None:
            end = time if kind != "start" else _last(times, begin, time)  # its launcher was killed
            found.append(_Stretch(begin, end, kind != "stop"))
        if kind == "start":
            if failed_at is not None:
                restarts.append(time - failed_at)
            begin, failed_at = time, None
        else:
            begin = None
            failed_at = None if kind == "stop" else failed_at or time
    if begin is not None:
        found.append(_Stretch(begin, max(now, begin), failed=False))
    return found, restarts


def _last(times: list[float], begin: float, end: float) -> float:
    return max((time for time in times if begin < time < end), default=begin)
