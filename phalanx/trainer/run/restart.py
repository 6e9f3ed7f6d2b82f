"""Whether a run whose rank has died is started again, and from where.

It is, from the newest checkpoint that verifies, as long as it gets further: three starts in a row
that end no later than an earlier one end the run, and one of the three has begun one checkpoint
further back, in case the newest one is what breaks it. What a user has to change is not tried
again.
"""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.core.errors import LostMessageError, PhalanxError, RankLeftError
from phalanx.core.run import Recipe
from phalanx.trainer.run.events import EventLog
from phalanx.trainer.run.rundir import RunDirectory

if TYPE_CHECKING:
    from phalanx.trainer.run.nodes import Team

TRIES_WITHOUT_PROGRESS = 3
DOUBTED = "doubted-"  # before the name of a checkpoint that was gone back behind


class WorkerCrashError(PhalanxError):
    """A rank ended in a way that nobody foresaw; the message has its traceback, or its signal.

    Attributes:
        rank: which one.
        signal: the name of the signal that ended it, or empty.
    """

    def __init__(self, message: str, rank: int = 0, signal: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.signal = signal


def may_pass(error: PhalanxError) -> bool:
    """Whether ranks that are started anew may not meet this error: nobody has to change a thing."""
    return isinstance(error, WorkerCrashError | LostMessageError | RankLeftError)


class Restarter:
    """Decides after each failure of a run whether it is started again.

    Attributes:
        count: how often it was.
        grace: seconds that ranks have to save when they are asked to stop; 0 means no end.
        events: is told of every restart.
        team: the launchers of all machines; None where there is one machine.
    """

    team: "Team | None" = None

    def __init__(self, directory: RunDirectory, recipe: Recipe, events: EventLog) -> None:
        """Begin to count.

        Args:
            directory: of the run.
            recipe: says how many restarts there are at most, and how long a stop may take.
            events: is told of every restart.
        """
        self.count, self.grace = 0, recipe.grace
        self.events = events
        self._directory, self._most = directory, recipe.max_restarts
        self._furthest = -1
        self._vain = 0
        self._went_back = ""

    def again(self, error: PhalanxError) -> bool:
        """Whether to start the ranks again after a failure; then that is told.

        Args:
            error: what ended them.

        Raises:
            WorkerCrashError: it was tried often enough; the message says so, and all that is
                known of the last failure.
        """
        if not may_pass(error) or self._most == 0:
            return False
        step = max(self._directory.last_step(), 0)
        self._vain = 0 if step > self._furthest else self._vain + 1
        self._furthest = max(self._furthest, step)
        if self._vain >= TRIES_WITHOUT_PROGRESS or self.count >= self._most:
            raise self._given_up(error, step)
        if self._vain == TRIES_WITHOUT_PROGRESS - 1 and not self._went_back:
            self._go_back()
        self.count += 1
        self._tell(error, step)
        return True

    def stopped(self, error: PhalanxError) -> None:
        """Tell that ranks which were asked to stop ended in another way, unsaved.

        Args:
            error: how.
        """
        step = max(self._directory.last_step(), 0)
        text = f"asked to stop after step {step}, which is not saved: {_headline(error)}"
        self.events.tell("stop", text, step=step, rank=getattr(error, "rank", None))

    def resumable(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return bool(self._checkpoints())

    def _checkpoints(self) -> list[tuple[int, Path]]:
        from phalanx.trainer.checkpoint.names import steps  # its package brings torch

        return steps(self._directory.checkpoints)

    def _tell(self, error: PhalanxError, step: int) -> None:
        text = f"{_headline(error)} after step {step}; restart {self.count} of at most {self._most}"
        if self._vain:
            text += f", the {_ordinal(self._vain)} in a row that came no further"
        self.events.tell(
            "restart",
            text,
            step=step,
            rank=getattr(error, "rank", None),
            restart=self.count,
            signal=getattr(error, "signal", ""),
            cause=str(error),
            stalled_seconds=getattr(error, "stalled", 0.0),
        )

    def _go_back(self) -> None:
        """Rename the newest checkpoint, so that the next start begins with the one before."""
        known = self._checkpoints()
        if len(known) < 2:
            return
        newest, before = known[0][1], known[1][1]
        aside = newest.with_name(DOUBTED + newest.name)
        with suppress(OSError):
            newest.rename(aside)
            self._went_back = before.name
            text = f"going back to {before.name}; {newest.name} is set aside as {aside.name}"
            self.events.tell("set aside", text, step=known[0][0], checkpoint=str(aside))

    def _given_up(self, error: PhalanxError, step: int) -> WorkerCrashError:
        rank, signal = getattr(error, "rank", 0), getattr(error, "signal", "")
        if self._vain < TRIES_WITHOUT_PROGRESS:
            why = f"all {self._most} restarts are used up (--max-restarts)"
        else:
            why = f"{TRIES_WITHOUT_PROGRESS} restarts in a row came no further than step {step}"
            if self._went_back:
                why += f", one of them from {self._went_back}, a checkpoint further back"
        text = f"{why}; the last failure: {error}"
        headline = f"{why}; {_headline(error)}"
        self.events.write("stop", headline, step=step, rank=rank, signal=signal, cause=str(error))
        return WorkerCrashError(text, rank, signal)


def _headline(error: PhalanxError) -> str:
    """A failure in one line: its first, and of a crash also the last, which names the error."""
    lines = str(error).strip().splitlines()
    first = lines[0].partition(", as the system does")[0]
    crashed = len(lines) > 1 and lines[1].startswith("Traceback")
    return f"{first} {lines[-1].strip()}" if crashed else first


def _ordinal(count: int) -> str:
    return {1: "first", 2: "second"}.get(count, f"{count}th")
