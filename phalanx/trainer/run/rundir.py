"""The folder of one run: what was asked, what happened, and the checkpoints to go on from.

    runs/<name>/run.toml       every value, resolved
                env.json       versions, hardware, layout, git commit
                metrics.jsonl  one object per step
                ranks.jsonl    where the time of some steps in a row went, by rank
                timeline.json  opens in Perfetto
                kernels.json   kernels of profiled steps; kernels-trace.json opens in Perfetto
                events.jsonl   one object for each thing that happened
                checkpoints/   step-00000100/ ...
                summary.json
                done           only after the last step

One process at a time uses a folder: it holds a lock on the file `.lock` for as long as it lives.
Where a lock does not reach, on a file system that has none or in a rank that outlived its launcher,
the number in `.fence` does: every start takes the next one, and only the last one taken may write.
"""

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from phalanx.core.errors import PhalanxError, RefusedError, UsageError, unknown
from phalanx.core.run import Run
from phalanx.core.timeline import Timeline
from phalanx.trainer.run.events import read_events
from phalanx.trainer.run.goodput import Goodput, goodput
from phalanx.trainer.run.report import Summary, Validation, finite

LOCK = ".lock"
FENCE = ".fence"
_NAME = re.compile(r"\w[\w .+=@-]{0,98}[\w.+=@-]|\w")
MOST_LINE_BYTES = 1 << 16
WRITTEN_AT_ONCE = ("run.toml", "env.json", "metrics.jsonl", "events.jsonl", LOCK, FENCE)


@dataclass(frozen=True)
class RunDirectory:
    """Where one run is written. A value that pickles; the lock is held by whoever opened it."""

    path: Path

    @classmethod
    @contextmanager
    def create(cls, runs: Path, name: str = "") -> Iterator["RunDirectory"]:
        """Make and lock the folder of a new run; take it away again if nothing came of it.

        Args:
            runs: the folder of all runs.
            name: of this run; by default the time of day, `run-20260131-093000`.

        Raises:
            UsageError: the name is not that of one folder.
            RefusedError: there is a run of that name, or the folder is in use.
        """
        path = runs / require_name(name) if name else _unused(runs)
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
        directory = cls(path)
        with directory._locked():
            directory._require_empty()
            try:
                yield directory
            finally:
                directory._remove_if_unused()

    @classmethod
    @contextmanager
    def open_for_resume(cls, runs: Path, name: str = "") -> Iterator["RunDirectory"]:
        """Lock the folder of a run that is to go on.

        Args:
            runs: the folder of all runs.
            name: of the run; by default the one that was written to last.

        Raises:
            UsageError: there is no such run.
            RefusedError: it is in use.
        """
        directory = cls(find_run(runs, name))
        with directory._locked():
            yield directory

    @property
    def name(self) -> str:
        """What the run is called."""
        return self.path.name

    @property
    def run_file(self) -> Path:
        """Every value of the run, resolved."""
        return self.path / "run.toml"

    @property
    def metrics_file(self) -> Path:
        """One JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def events_file(self) -> Path:
        """One JSON object for each thing that happened; see events.py."""
        return self.path / "events.jsonl"

    @property
    def ranks_file(self) -> Path:
        """One JSON object for some steps: where their time went, by rank; see shares.py."""
        return self.path / "ranks.jsonl"

    @property
    def summary_file(self) -> Path:
        """What the last session came to."""
        return self.path / "summary.json"

    @property
    def done_file(self) -> Path:
        """It exists once the last step is done, and only then."""
        return self.path / "done"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints; it need not exist."""
        return self.path / "checkpoints"

    def write_run(self, run: Run) -> None:
        """Write the run file."""
        write_text(self.run_file, run.to_toml())

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Write what the run runs on; what earlier sessions ran on stays below it."""
        path = self.path / "env.json"
        earlier: list[Any] = []
        with suppress(OSError, ValueError, AttributeError):
            before = json.loads(path.read_text(encoding="utf-8"))
            earlier = [*before.pop("earlier", []), before]
        document = {"schema": 1, **environment, "earlier": earlier}
        write_text(path, json.dumps(document, indent=2) + "\n")

    def write_validation(self, found: Validation) -> None:
        """Add what was measured to the line of its step, which is the last one, if it is there.

        Where that is not possible, the line stays as it was.
        """
        if not self.metrics_file.exists():
            return
        with _writing(self.metrics_file), self.metrics_file.open("r+b", buffering=0) as file:
            start = _last_line(file)
            file.seek(start)
            line = file.read()
            if _step_of(line.decode(errors="replace")) != found.step:
                return
            measured = {"validation_loss": finite(found.loss), "validation_seconds": found.seconds}
            try:
                _replace_end(file, start, (json.dumps(json.loads(line) | measured) + "\n").encode())
            except OSError:
                _replace_end(file, start, line)
                raise

    def forget_after(self, step: int) -> None:
        """Drop the metrics of later steps, which are about to be done again, and torn lines."""
        if not self.metrics_file.exists():
            return
        lines = self.metrics_file.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [line for line in lines if 0 < _step_of(line) <= step]
        write_text(self.metrics_file, "".join(line + "\n" for line in kept))

    def write_timeline(self, timeline: Timeline) -> None:
        """Write the spans of one step as a Chrome trace."""
        write_text(self.path / "timeline.json", json.dumps(timeline.chrome_trace()))

    def write_summary(self, summary: Summary) -> None:
        """Write what the session came to."""
        text = json.dumps(summary.to_dict(), indent=2, allow_nan=False)
        write_text(self.summary_file, text + "\n")

    def write_done(self, step: int) -> None:
        """Say that nothing is left to do: the last thing that a run writes."""
        write_text(self.done_file, json.dumps({"step": step, "time": time.time()}) + "\n")

    def forget_done(self) -> None:
        """A run that goes on is not done."""
        with _writing(self.done_file):
            self.done_file.unlink(missing_ok=True)

    def take_over(self) -> int:
        """Begin to write here: whoever did before may not any more.

        Returns:
            The number of this start, above that of every earlier one.
        """
        number = self._fence() + 1
        write_text(self.path / FENCE, f"{number}\n")
        return number

    def require_own(self, number: int) -> None:
        """Stop a writer whose place another has taken.

        Args:
            number: that `take_over` gave.

        Raises:
            RefusedError: a later start has begun to write here.
        """
        now = self._fence()
        if now != number:
            raise RefusedError(
                f"{self.path} was taken over by start {now} while start {number} still ran; "
                "that one goes on, and this one ends"
            )

    def _fence(self) -> int:
        try:
            return int((self.path / FENCE).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return 0

    def goodput(self) -> Goodput:
        """What became of the time of this run, until now."""
        events = read_events(self.events_file)
        lines = []
        with suppress(OSError):
            text = self.metrics_file.read_text(encoding="utf-8", errors="replace")
            lines = [json.loads(line) for line in text.splitlines() if _step_of(line) > 0]
        return goodput(events, lines, time.time())

    def last_step(self) -> int:
        """How many steps the metrics say are done; -1 where they say nothing."""
        with suppress(OSError), self.metrics_file.open("rb", buffering=0) as file:
            file.seek(_last_line(file))
            return _step_of(file.read().decode(errors="replace"))
        return -1

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with _writing(self.path):
            descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise RefusedError(
                f"{self.path} is in use by process {owner}; wait for it to end, "
                "or give this run another --name"
            ) from None
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
            yield
        finally:
            os.close(descriptor)

    def _require_empty(self) -> None:
        if self.run_file.exists():
            raise _taken(self.path)
        strangers = sorted(p.name for p in self.path.iterdir() if p.name != LOCK)
        if strangers:
            (self.path / LOCK).unlink()
            raise RefusedError(
                f"{self.path} is not a run and is not empty (it has {strangers[0]}); "
                "give this run another --name"
            )

    def _remove_if_unused(self) -> None:
        """Remove our files if no step was taken and nothing was saved, and only then."""
        if self.metrics_file.exists() and self.metrics_file.stat().st_size:
            return
        with suppress(OSError):
            if self.checkpoints.exists():
                self.checkpoints.rmdir()
            if {p.name for p in self.path.iterdir()} <= set(WRITTEN_AT_ONCE):
                for name in WRITTEN_AT_ONCE:
                    (self.path / name).unlink(missing_ok=True)
                self.path.rmdir()


def require_free(runs: Path, name: str) -> None:
    """Refuse what `RunDirectory.create` would refuse, without making anything.

    Args:
        runs: the folder of all runs; it need not exist.
        name: of the new run; empty where it gets the time of day.

    Raises:
        UsageError: the name is not that of one folder.
        RefusedError: there is a run of that name.
        PhalanxError: the folder of runs cannot be written.
    """
    if name:
        require_name(name)
        if (runs / name / "run.toml").exists():
            raise _taken(runs / name)
    nearest = next(
        folder for folder in (runs.absolute(), *runs.absolute().parents) if folder.exists()
    )
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise PhalanxError(
            f"cannot write {runs}: {nearest} is no folder that may be written; "
            "choose another --runs-dir"
        )


def _taken(path: Path) -> RefusedError:
    return RefusedError(
        f"{path} already holds a run; go on with it by --resume auto "
        f"--name {path.name}, or give this run another --name"
    )


def find_run(runs: Path, name: str = "") -> Path:
    """The folder of a run: by name, or the one that was written to last.

    Args:
        runs: the folder of all runs.
        name: of one; empty for the one that was written to last.

    Raises:
        UsageError: there is none, or the name is not that of one folder.
    """
    known = [file.parent for file in runs.glob("*/run.toml")]
    if not known:
        raise UsageError(f"there is no run in {runs} to resume; leave out --resume to start one")
    if not name:
        return max(known, key=_last_written)
    if runs / require_name(name) not in known:
        raise unknown(f"run in {runs}", name, [path.name for path in known])
    return runs / name


def write_text(path: Path, text: str) -> None:
    """Write a file so that whoever looks sees the old text or the new one, never half of it.

    Args:
        path: of the file; its folder has to exist.
        text: all of it, written as UTF-8 and synced.

    Raises:
        PhalanxError: it cannot be written; the old text is still there.
    """
    draft = path.with_name(f".{path.name}.tmp")
    try:
        with _writing(path):
            with draft.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn what the system says about a full disk or a forbidden folder into one line."""
    try:
        yield
    except OSError as error:
        raise PhalanxError(
            f"cannot write {path}: {error.strerror}; make room or permit it there, "
            "or choose another --runs-dir"
        ) from error


def require_name(name: str) -> str:
    """Check the name of a run: one folder on every system, in an address and in a shell.

    Raises:
        UsageError: it is not.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"--name {name!r} is not the name of one folder: use letters, digits, spaces and any "
            "of . _ + = @ -, 1 to 100 of them, the first a letter or digit; --runs-dir says where "
            "runs are"
        )
    return name


def _unused(runs: Path) -> Path:
    name = time.strftime("run-%Y%m%d-%H%M%S")
    path, number = runs / name, 2
    while path.exists():
        path, number = runs / f"{name}-{number}", number + 1
    return path


def _last_written(path: Path) -> float:
    files = [path / "run.toml", path / "metrics.jsonl"]
    return max(file.stat().st_mtime for file in files if file.exists())


def _last_line(file: FileIO) -> int:
    """Where the last line of a file begins, in bytes."""
    size = file.seek(0, os.SEEK_END)
    tail = max(size - MOST_LINE_BYTES, 0)
    file.seek(tail)
    return tail + file.read()[:-1].rfind(b"\n") + 1


def _replace_end(file: FileIO, start: int, text: bytes) -> None:
    """Let a file end with `text`, from byte `start` on."""
    file.seek(start)
    while text:
        text = text[file.write(text) :]
    file.truncate()


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1
