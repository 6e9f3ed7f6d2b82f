"""Reads run directories, live or finished, ours or copied from elsewhere; nothing in them is believed.

Whatever cannot be read is left out, and said. Names and texts of a run are only ever shown, escaped.
"""

import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.api.planning import estimate
from phalanx.core.errors import PhalanxError
from phalanx.core.layout import Layout
from phalanx.core.run import Run

MOST_STEPS = 200_000  # lines of metrics that are read
POINTS = 400  # that are drawn
MOST_EVENTS = 200
MOST_SPANS = 4000
MOST_BYTES = 256 * 2**20  # of one file
FILES = ("metrics.jsonl", "run.toml", "summary.json")


class RanSpan(NamedTuple):
    """One stretch of a measured timeline."""

    rank: int
    name: str
    start: float  # seconds
    seconds: float


class RunFolder(NamedTuple):
    """What a run directory says.

    Attributes:
        name: of the directory.
        steps: objects of metrics.jsonl.
        events: objects of events.jsonl, newest last.
        summary: of the last session, if there is one.
        layout: a line, or empty where it is unknown.
        spans: of timeline.json.
        planned: bytes of the worst rank by the estimate, where the run file names a cluster.
        done: whether the last step is done.
        problems: what could not be read.
    """

    name: str
    steps: tuple[dict[str, Any], ...]
    events: tuple[dict[str, Any], ...]
    summary: dict[str, Any]
    layout: str
    spans: tuple[RanSpan, ...]
    planned: float | None
    done: bool
    problems: tuple[str, ...]


def found_in(paths: Iterable[Path]) -> list[Path]:
    """Run directories among paths, or in the folders that paths are.

    Args:
        paths: as they were given.
    """
    found: dict[Path, None] = {}
    for path in paths:
        inside = [path] if _is_run(path) else sorted(_children(path))
        found |= dict.fromkeys(inside)
    return list(found)


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in FILES)


def _children(path: Path) -> Iterator[Path]:
    try:
        yield from (child for child in path.iterdir() if child.is_dir() and _is_run(child))
    except OSError:
        return


def read_run(path: Path) -> RunFolder:
    """Everything that a run directory says.

    Args:
        path: of the directory.
    """
    problems: list[str] = []
    steps = _lines(path / "metrics.jsonl", problems)
    summary = _object(path / "summary.json", problems)
    return RunFolder(
        name=path.resolve().name,
        steps=tuple(step for step in steps if isinstance(step.get("step"), int)),
        events=tuple(_lines(path / "events.jsonl", problems)[-MOST_EVENTS:]),
        summary=summary,
        layout=_layout(path / "run.toml", summary, problems),
        spans=tuple(_spans(_object(path / "timeline.json", problems))),
        planned=planned_bytes(path / "run.toml"),
        done=(path / "done").is_file(),
        problems=tuple(problems),
    )


def _text(path: Path, problems: list[str]) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            problems.append(f"{path.name} has more than {MOST_BYTES >> 20} MiB; it is left out")
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        problems.append(f"{path.name}: {error.strerror}")
        return ""


def _lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The objects of a file with one to a line; a line that is being written is left out."""
    lines = _text(path, problems).splitlines()
    if len(lines) > MOST_STEPS:
        problems.append(f"{path.name} has {len(lines):,} lines; the last {MOST_STEPS:,} are shown")
    found, bad = [], 0
    for line in lines[-MOST_STEPS:]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            bad += 1
            continue
        if isinstance(value, dict):
            found.append(value)
    if bad > 1:
        problems.append(f"{path.name}: {bad:,} lines are no JSON")
    return found


def _object(path: Path, problems: list[str]) -> dict[str, Any]:
    text = _text(path, problems)
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        problems.append(f"{path.name} is no JSON")
        return {}
    return value if isinstance(value, dict) else {}


def _layout(path: Path, summary: dict[str, Any], problems: list[str]) -> str:
    """The layout of a run, if it is one."""
    try:
        table = tomllib.loads(_text(path, problems)).get("layout", {})
    except tomllib.TOMLDecodeError:
        problems.append(f"{path.name} is no TOML")
        table = {}
    line = summary.get("layout")
    try:
        if isinstance(line, str):
            return str(Layout.parse(line))
        return str(Layout.parse(table)) if isinstance(table, str) else str(Layout(**table))
    except (PhalanxError, TypeError, ValueError):
        return ""


def planned_bytes(path: Path) -> float | None:
    """What the worst rank of a run should need by our estimate; None where nobody can say.

    Args:
        path: of a run file; without a cluster there is no estimate.
    """
    try:
        tables = tomllib.loads(_text(path, []))
        cluster = tables.pop("cluster", {}).get("name", "")
        run = Run.from_tables(tables)
        if not cluster:
            return None
        recipe = run.recipe
        found = estimate(run.model, cluster, run.layout, batch=recipe.batch, seq=recipe.seq)
    except (PhalanxError, TypeError, ValueError, AttributeError):
        return None
    return found.peak_bytes


def _spans(trace: dict[str, Any]) -> Iterator[RanSpan]:
    """Computing spans of a Chrome trace: whole events of the first thread of each process."""
    events = trace.get("traceEvents")
    shown = 0
    for event in events if isinstance(events, list) else []:
        if not isinstance(event, dict) or event.get("ph") != "X" or event.get("tid", 0) != 0:
            continue
        rank, start, lasts = (
            event.get("pid"),
            number_of(event.get("ts")),
            number_of(event.get("dur")),
        )
        if isinstance(rank, int) and 0 <= rank < 4096 and start is not None and lasts is not None:
            shown += 1
            if shown > MOST_SPANS:
                return
            yield RanSpan(rank, str(event.get("name", ""))[:80], start / 1e6, max(lasts, 0.0) / 1e6)


def number_of(value: object) -> float | None:
    """A finite number, or None.

    Args:
        value: whatever stands in a file.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def series(run: RunFolder, key: str) -> list[tuple[int, float]]:
    """One quantity by step, thinned to what a picture can show.

    Args:
        run: the directory.
        key: of metrics.jsonl.
    """
    points = [
        (step["step"], value)
        for step in run.steps
        if (value := number_of(step.get(key))) is not None
    ]
    every = max(1, -(-len(points) // POINTS))
    return [*points[::every], *(points[-1:] if (len(points) - 1) % every else [])]


def split(run: RunFolder) -> dict[str, float]:
    """Mean seconds of a step by what they go to: axes waited for, data, and the rest.

    Args:
        run: the directory.
    """
    totals: dict[str, float] = {}
    steps = [step for step in run.steps if number_of(step.get("seconds"))]
    for step in steps:
        exposed = step.get("exposed_seconds")
        parts = dict(exposed) if isinstance(exposed, dict) else {}
        parts["data wait"] = step.get("data_wait_seconds")
        known = {
            str(name): value for name, v in parts.items() if (value := number_of(v)) is not None
        }
        known["computing"] = max((number_of(step["seconds"]) or 0.0) - sum(known.values()), 0.0)
        for name, seconds in known.items():
            totals[name] = totals.get(name, 0.0) + seconds
    return {name: seconds / len(steps) for name, seconds in totals.items()} if steps else {}


def newest(run: RunFolder, key: str) -> float | None:
    """The last value of a quantity.

    Args:
        run: the directory.
        key: of metrics.jsonl.
    """
    found: Sequence[tuple[int, float]] = series(run, key)
    return found[-1][1] if found else None
