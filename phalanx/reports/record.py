"""Reads the folder of a run: what was asked, and what its ranks wrote down.

A run may be going on, may have been killed while it wrote, and may be of another version: what
cannot be read is left out and said in a note, and only a folder that is no run is refused.
"""

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.core.errors import PhalanxError, UsageError
from phalanx.core.layout import Layout
from phalanx.core.message import Message
from phalanx.core.run import Run
from phalanx.reports.kernels import Kernel, read_kernels


class StepRecord(NamedTuple):
    """One line of `metrics.jsonl`; what is missing or no number is None.

    Attributes:
        step: how many were done with it.
        time: when, in seconds since 1970.
        seconds: that it took.
        loss: nats per token.
        grad_norm: of the whole gradient.
        tokens: in it.
        flops_per_second: of the model itself.
        mfu: share of the peak.
        hfu: the same with what is computed again.
        data_wait_seconds: of the rank that waited longest for a batch.
        peak_bytes: most that any rank held.
        skipped: whether the weights did not move.
        validation_loss: measured after it.
        validation_seconds: that this took.
    """

    step: int
    time: float | None
    seconds: float
    loss: float | None
    grad_norm: float | None
    tokens: float | None
    flops_per_second: float | None
    mfu: float | None
    hfu: float | None
    data_wait_seconds: float | None
    peak_bytes: float | None
    skipped: bool
    validation_loss: float | None
    validation_seconds: float | None

    @property
    def begun(self) -> float:
        """When it began, in seconds since 1970; nan where nobody knows."""
        return math.nan if self.time is None else self.time - self.seconds


class Window(NamedTuple):
    """Some steps in a row: one line of `ranks.jsonl`.

    Attributes:
        first: of its steps, from 1.
        last: of its steps.
        seconds: that rank 0 took for all of them.
        mean: seconds by kind, mean over all ranks.
        between: seconds of rank 0 between steps since the window before, by kind.
        ranks: seconds by kind of the ranks that are listed.
        messages: of rank 0 in one step; empty but in the first window of a session.
    """

    first: int
    last: int
    seconds: float
    mean: Mapping[str, float]
    between: Mapping[str, float]
    ranks: Mapping[int, Mapping[str, float]]
    messages: tuple[Message, ...]

    @property
    def steps(self) -> int:
        """How many."""
        return self.last - self.first + 1


class EventRecord(NamedTuple):
    """One line of `events.jsonl`; see docs/run_directory.md."""

    time: float
    kind: str
    step: int | None
    rank: int | None
    text: str

    def to_dict(self) -> dict[str, Any]:
        """The event, as `--json` prints it."""
        return self._asdict()


@dataclass(frozen=True)
class RunRecord:
    """What the folder of a run says.

    Attributes:
        path: the folder.
        settings: the tables of its run file as they stand there.
        run: the run; None where its file is of another version or cannot be read.
        environment: `env.json`, or nothing.
        steps: in order; of a step that was done again, the last time.
        windows: in order, none of whose steps are in two.
        events: in order of time.
        summary: of the last session, or nothing.
        is_done: whether the last step is done.
        kernels: of the steps that were profiled, longest first.
        notes: what could not be read.
    """

    path: Path
    settings: Mapping[str, Any]
    run: Run | None
    environment: Mapping[str, Any]
    steps: tuple[StepRecord, ...]
    windows: tuple[Window, ...]
    events: tuple[EventRecord, ...]
    summary: Mapping[str, Any]
    is_done: bool
    kernels: tuple[Kernel, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What the run is called."""
        return self.path.resolve().name

    @cached_property
    def layout(self) -> Layout | None:
        """How the step was cut, the precision resolved where the run says to what."""
        texts = (self.summary.get("layout"), self.environment.get("layout"))
        for text in texts:
            try:
                if isinstance(text, str):
                    return Layout.parse(text)
            except PhalanxError:
                continue
        return self.run.layout if self.run else None

    @property
    def steady(self) -> tuple[Window, ...]:
        """The windows without the first of each session, which warms up, where others are left."""
        warm = tuple(window for window in self.windows if not window.messages)
        return warm or self.windows


def read_run(path: Path) -> RunRecord:
    """Read the folder of a run.

    Args:
        path: the folder, or a file in it.

    Raises:
        UsageError: there is none, or it is no run.
    """
    folder = path.parent if path.is_file() else path
    if not folder.is_dir():
        raise UsageError(f"{path}: no such folder; give that of a run, such as runs/NAME")
    if not any((folder / name).exists() for name in ("run.toml", "metrics.jsonl")):
        inside = sorted(file.parent.name for file in folder.glob("*/run.toml"))[:5]
        hint = f"it holds {', '.join(inside)}" if inside else "it has no run.toml"
        raise UsageError(f"{folder} is not a run: {hint}; give the folder of one, as runs/NAME")
    notes: list[str] = []
    settings, run = _read_settings(folder / "run.toml", notes)
    events = sorted(_events(_lines(folder / "events.jsonl", notes)), key=lambda event: event.time)
    return RunRecord(
        path=folder,
        settings=settings,
        run=run,
        environment=_document(folder / "env.json", notes),
        steps=_steps(_lines(folder / "metrics.jsonl", notes)),
        windows=_windows(_lines(folder / "ranks.jsonl", notes)),
        events=tuple(events),
        summary=_document(folder / "summary.json", notes),
        is_done=(folder / "done").exists(),
        kernels=read_kernels(folder, notes),
        notes=tuple(notes),
    )


def _read_settings(path: Path, notes: list[str]) -> tuple[Mapping[str, Any], Run | None]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        notes.append(f"run.toml cannot be read ({_first_line(error)}): nothing is planned from it")
        return {}, None
    try:
        return tables, Run.from_tables(tables)
    except PhalanxError as error:
        notes.append(f"run.toml is of another version ({_first_line(error)}): nothing is planned")
        return tables, None


def _document(path: Path, notes: list[str]) -> Mapping[str, Any]:
    """A JSON object, or nothing."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read ({_first_line(error)})")
        return {}
    return found if isinstance(found, Mapping) else {}


def _lines(path: Path, notes: list[str]) -> list[Mapping[str, Any]]:
    """The objects of a file of lines; torn ones are counted in a note."""
    try:
        texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({_first_line(error)})")
        return []
    found, torn = [], 0
    for text in filter(str.strip, texts):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, Mapping):
            found.append(line)
        else:
            torn += 1
    if torn:
        notes.append(f"{path.name}: {torn} of {len(texts)} lines are torn, and left out")
    return found


def number(value: object) -> float | None:
    """A finite number, or None for what is none.

    Example:
        >>> number(3), number("3"), number(float("nan")), number(True)
        (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _steps(lines: list[Mapping[str, Any]]) -> tuple[StepRecord, ...]:
    found: dict[int, StepRecord] = {}
    for line in lines:
        step, seconds = number(line.get("step")), number(line.get("seconds"))
        if step is None or seconds is None or step < 1 or seconds < 0:
            continue
        rest = {
            name: number(line.get(name))
            for name in StepRecord._fields
            if name not in ("step", "seconds", "skipped")
        }
        record = StepRecord(
            step=int(step), seconds=seconds, skipped=line.get("skipped") is True, **rest
        )
        found[record.step] = record
    return tuple(found[step] for step in sorted(found))


def _windows(lines: list[Mapping[str, Any]]) -> tuple[Window, ...]:
    """Those that nothing later goes back behind: a run that went back did their steps again."""
    kept: list[Window] = []
    lowest = math.inf  # of the steps of all that were written later
    for line in reversed(lines):
        window = _window(line)
        if window and window.last < lowest:
            kept.append(window)
            lowest = window.first
    return tuple(reversed(kept))


def _window(line: Mapping[str, Any]) -> Window | None:
    first, last = number(line.get("first")), number(line.get("last"))
    seconds = number(line.get("seconds"))
    if first is None or last is None or seconds is None or not 1 <= first <= last:
        return None
    listed = [each for each in _list(line.get("ranks")) if isinstance(each, Mapping)]
    return Window(
        int(first),
        int(last),
        seconds,
        _numbers(line.get("mean")),
        _numbers(line.get("between")),
        {int(number(each.get("rank")) or 0): _numbers(each) for each in listed},
        tuple(_messages(line.get("messages"))),
    )


def _numbers(value: object) -> dict[str, float]:
    if not isinstance(value, Mapping):
        return {}
    read = ((str(key), number(each)) for key, each in value.items())
    return {key: each for key, each in read if each is not None and key != "rank"}


def _messages(value: object) -> Iterator[Message]:
    for each in _list(value):
        try:
            message = Message(**each)
        except TypeError:
            continue
        if number(message.bytes) is not None and number(message.times) is not None:
            yield message


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _events(lines: list[Mapping[str, Any]]) -> Iterator[EventRecord]:
    for line in lines:
        time, kind = number(line.get("time")), line.get("kind")
        if time is not None and isinstance(kind, str):
            step, rank = number(line.get("step")), number(line.get("rank"))
            yield EventRecord(
                time,
                kind,
                None if step is None else int(step),
                None if rank is None else int(rank),
                str(line.get("text", "")),
            )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
