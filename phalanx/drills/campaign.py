"""Carries a drill out: the undisturbed run first, then one run for each injury.

Every run goes the whole way of `phalanx train`: our launcher, its restarts, its watch. Where a run
was asked to stop it is resumed, as a batch system would.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.core.errors import PhalanxError, RefusedError
from phalanx.core.run import Run
from phalanx.drills.injuries import Injury
from phalanx.trainer.checkpoint.names import steps
from phalanx.trainer.faults.inject import HAPPENED, PLAN
from phalanx.trainer.faults.plan import FaultPlan
from phalanx.trainer.run.continuity import Resume
from phalanx.trainer.run.events import EventLog, read_events
from phalanx.trainer.run.launch import launch
from phalanx.trainer.run.report import Silent
from phalanx.trainer.run.restart import Restarter
from phalanx.trainer.run.rundir import RunDirectory
from phalanx.trainer.run.signals import INTERRUPTED

if TYPE_CHECKING:
    from phalanx.drills.compare import Fingerprint
    from phalanx.trainer.run.worker import Worker

MOST_RANKS = 4
MOST_RESUMES = 5
MOST_BETWEEN_SAVES = 3  # steps
MOST_RESTARTS = 100  # of a run that is killed again and again


class DrillEndedError(PhalanxError):
    """Somebody ended the drill; what came of earlier injuries is in its log."""


@dataclass(frozen=True)
class DrillCase:
    """What came of one injury.

    Attributes:
        fault, where, rank: the injury.
        happened: whether the run came by; a point that it never reaches proves nothing.
        noticed_seconds: from the fault until somebody acted on it.
        back_seconds: from then until the ranks trained again.
        steps_repeated: steps done twice.
        equal: whether the run came to the same bits.
        differences: what did not; or how it ended, if it did not come to its last step.
    """

    fault: str
    where: str
    rank: int | None
    happened: bool
    noticed_seconds: float | None
    back_seconds: float | None
    steps_repeated: int
    equal: bool
    differences: tuple[str, ...] = ()


def drilled(run: Run, length: int) -> Run:
    """A run as it is drilled: so many steps of it, with saves and a validation among them.

    Args:
        run: the user's own; its layout, model, data and learning rates stay.
        length: in steps.

    Raises:
        RefusedError: it is cut for more ranks than a drill starts on one machine.
    """
    if run.layout.ranks > MOST_RANKS:
        raise RefusedError(
            f"{run.layout} needs {run.layout.ranks} ranks, and a drill kills {MOST_RANKS} at most "
            "on one machine; give a smaller --layout, such as dp=4"
        )
    last = min(length, run.recipe.last_step)
    every = min(max(last // 4, 1), MOST_BETWEEN_SAVES)
    recipe = replace(
        run.recipe, stop_at=last, checkpoint_every=every, keep_every=0, keep=2, sample_tokens=0
    )
    most = max(recipe.max_restarts, MOST_RESTARTS)
    recipe = replace(recipe, evaluate_every=max(last // 2, 1), max_restarts=most)
    return replace(run, recipe=recipe)


class DrillRuns:
    """The runs of a drill, in one folder.

    Attributes:
        reference: what the undisturbed run came to.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        """Train the undisturbed run.

        Args:
            run: as it is drilled.
            folder: for all runs.
        """
        from phalanx.drills.compare import fingerprint

        self._run, self._folder, self._count = run, folder, 0
        with RunDirectory.create(folder, "undisturbed") as directory:
            if self._train(directory, None):
                raise _ended()
            self.reference: Fingerprint = fingerprint(directory.path)

    def suffer(self, injury: Injury) -> tuple[DrillCase, ...]:
        """Train once more, with an injury; a case for each of its faults."""
        from phalanx.drills.compare import fingerprint

        self._count += 1
        home = self._folder / f"plan-{self._count}"
        home.mkdir()
        (home / "plan.json").write_text(FaultPlan(injury.plan, str(home)).to_json())
        with RunDirectory.create(self._folder, f"injured-{self._count}") as directory:
            try:
                self._survive(injury, directory, home / "plan.json")
                found = self.reference.differences(fingerprint(directory.path))
            except DrillEndedError:
                raise
            except PhalanxError as error:
                found = [str(error).splitlines()[0]]
            make = _cases_of_kills if injury.kills else _case_of_all
            return make(injury, directory, home, tuple(found))

    def _survive(self, injury: Injury, directory: RunDirectory, plan: Path) -> None:
        """Train until it is done, resuming it whenever it was asked to stop."""
        resume: Resume | None = None
        for _ in range(MOST_RESUMES):
            with _planned(plan if resume is None else None):
                code = self._train(directory, resume)
            if code == 0:
                return
            if not injury.stops:
                raise _ended()
            if injury.corrupts and resume is None:
                _flip_a_bit(directory)
            resume = Resume()
        raise PhalanxError(f"was asked to stop, and resumed, {MOST_RESUMES} times in vain")

    def _train(self, directory: RunDirectory, resume: Resume | None) -> int:
        directory.write_run(self._run)
        restarter = Restarter(directory, self._run.recipe, EventLog(directory.events_file))
        args = (self._run, directory, resume)
        return launch(train_one_rank, args, self._run.layout.ranks, restarter=restarter)


def train_one_rank(
    worker: "Worker", run: Run, directory: RunDirectory, resume: Resume | None
) -> int:
    """What each rank of a drill does.

    Args:
        worker: this process, joined with the others.
        run: what is trained.
        directory: where it is written.
        resume: what it goes on from; None starts anew.
    """
    from phalanx.trainer.run.trainer import train

    return train(worker, run, directory, Silent(), resume)


def _ended() -> DrillEndedError:
    error = DrillEndedError("the drill was ended; with --log FILE it goes on where it was")
    error.exit_code = INTERRUPTED
    return error


@contextmanager
def _planned(plan: Path | None) -> Iterator[None]:
    """Let the ranks that are started meanwhile meet the faults of a plan."""
    before = os.environ.pop(PLAN, None)
    if plan is not None:
        os.environ[PLAN] = str(plan)
    try:
        yield
    finally:
        os.environ.pop(PLAN, None)
        if before is not None:
            os.environ[PLAN] = before


def _flip_a_bit(directory: RunDirectory) -> None:
    """In the middle of the largest file of the newest checkpoint."""
    known = steps(directory.checkpoints)
    if not known:
        return
    shard = max(known[0][1].glob("*.safetensors"), key=lambda path: path.stat().st_size)
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def _case_of_all(
    injury: Injury, directory: RunDirectory, home: Path, found: tuple[str, ...]
) -> tuple[DrillCase]:
    """Put together what the events and the ranks say about an injury."""
    happened = [json.loads(line) for line in _lines(home / HAPPENED)]
    events = read_events(directory.events_file)
    noticed = back = None
    if happened:
        fault_time = max(entry["time"] for entry in happened)
        noticed_at = _first(events, ("restart", "stop"), fault_time)
        noticed = noticed_at - fault_time if noticed_at else None
        back = _back(events, noticed_at) if noticed_at else None
    case = DrillCase(
        fault=injury.fault,
        where=injury.where,
        rank=injury.rank,
        happened=bool(happened),
        noticed_seconds=noticed,
        back_seconds=back,
        steps_repeated=sum(_repeated(events)),
        equal=not found,
        differences=found,
    )
    return (case,)


def _cases_of_kills(
    injury: Injury, directory: RunDirectory, home: Path, found: tuple[str, ...]
) -> tuple[DrillCase, ...]:
    """One case for each kill of a run; all of them come to what the run came to."""
    times = {e["attempt"]: e["time"] for e in map(json.loads, _lines(home / HAPPENED))}
    events = read_events(directory.events_file)
    restarts = [event for event in events if event["kind"] == "restart"]
    repeated = _repeated(events)
    cases = []
    for attempt, (fault, where) in enumerate(zip(injury.plan, injury.kills, strict=True)):
        # a rank may have been done before its time came: what counts is a start that followed
        happened = attempt in times and attempt < len(restarts)
        noticed_at = restarts[attempt]["time"] if happened else 0.0
        case = DrillCase(
            fault=injury.fault,
            where=where,
            rank=fault.rank,
            happened=happened,
            noticed_seconds=max(noticed_at - times[attempt], 0.0) if happened else None,
            back_seconds=_back(events, noticed_at) if happened else None,
            steps_repeated=repeated[attempt] if happened else 0,
            equal=not found,
            differences=found,
        )
        cases.append(case)
    return tuple(cases)


def _first(events: list[dict[str, Any]], kinds: tuple[str, ...], after: float) -> float | None:
    times = (e["time"] for e in events if e["kind"] in kinds and e["time"] >= after)
    return next(times, None)


def _back(events: list[dict[str, Any]], noticed_at: float) -> float | None:
    """Seconds until ranks trained again; None where something else came before."""
    later = [e for e in events if e["time"] >= noticed_at]
    kinds = [e["kind"] for e in later]
    if "start" not in kinds:
        return None
    first = kinds.index("start")
    again = any(kind in ("restart", "stop") for kind in kinds[1:first])
    return None if again else float(later[first]["time"]) - noticed_at


def _repeated(events: list[dict[str, Any]]) -> list[int]:
    """For each end of a start, the steps between where it ended, and where the next went on."""
    repeated: list[int] = []
    reached = None
    for event in events:
        if event["kind"] in ("restart", "stop"):
            reached = event["step"]
            repeated.append(0)
        elif event["kind"] == "resume" and reached is not None:
            repeated[-1] = max(reached - event["step"], 0)
            reached = None
    return repeated


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
