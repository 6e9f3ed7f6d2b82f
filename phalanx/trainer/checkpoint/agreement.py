"""One save as one rank sees it, and how ranks that share only a file system agree on its outcome.

All ranks write into one hidden directory. Rank 0 renames it to its final name when every part is
there; the first rank that fails renames it to a failed one instead. A rename happens once, so a
save is committed or failed for all ranks alike, even on a disk too full for another byte.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import CheckpointError
from phalanx.trainer.checkpoint.disk import Disk
from phalanx.trainer.checkpoint.names import hidden_name, step_name

FIRST_POLL, LAST_POLL = 0.001, 0.2  # seconds between two looks at the directory
UNSAID = "a rank failed and could not write down why; see its own message, and if the disk is full"


@dataclass(frozen=True)
class Save:
    """Who saves what, where they meet, and how long they wait for each other.

    Attributes:
        directory: where checkpoints live.
        step: what is saved.
        attempt: a name for this start of the run, the same on all ranks and never used before.
        count: how many saves this attempt has begun, this one included.
        rank: this rank.
        world: number of ranks.
        disk: the file system.
        patience: seconds to wait for the slowest rank.
    """

    directory: Path
    step: int
    attempt: str
    count: int
    rank: int
    world: int
    disk: Disk
    patience: float

    @property
    def final(self) -> Path:
        """Its name once it is committed."""
        return self.directory / step_name(self.step)

    @property
    def partial(self) -> Path:
        """Its name while it is being written."""
        return self._hidden(step_name(self.step), "partial")

    @property
    def failed(self) -> Path:
        """Its name once some rank has failed."""
        return self._hidden(step_name(self.step), "failed")

    def discard(self, path: Path) -> None:
        """Delete a checkpoint that is no longer wanted; it stops being one all at once."""
        doomed = self._hidden(path.name, "discarded")
        self.disk.rename(path, doomed)
        self.disk.sync_directory(self.directory)  # or a power cut could leave half of it there
        self.disk.remove_tree(doomed)

    def check(self) -> None:
        """Stop early if another rank has failed.

        Raises:
            CheckpointError: with that rank's reason.
        """
        if self.failed.exists():
            raise CheckpointError(self.reason() or self.sentence(UNSAID))

    def reason(self) -> str:
        """Why the first rank failed; empty if none has, or if it could not say."""
        for path in sorted(self.failed.glob("reason-*.txt")):
            with suppress(OSError):
                return path.read_text(encoding="utf-8")
        return ""

    def sentence(self, problem: str) -> str:
        """One line that says what could not be done, where, and why."""
        return f"cannot save step {self.step} in {self.directory}: {problem}"

    def _hidden(self, name: str, kind: str) -> Path:
        return self.directory / hidden_name(name, self.attempt, self.count, kind)

    def wait_until(self, done: Callable[[], bool], missing: Callable[[], str]) -> None:
        """Look again and again until `done`, or until some rank fails.

        Args:
            done: whether it has come; asked at once, then after pauses of 1 ms that grow to 0.2 s.
            missing: what has not come, in a few words for the message; called only when patience
                ends.

        Raises:
            CheckpointError: a rank failed, or `patience` seconds are over.
        """
        deadline, pause = time.monotonic() + self.patience, FIRST_POLL
        while True:
            self.check()
            if done():
                return
            if time.monotonic() > deadline:
                waited = f"{missing()} after {self.patience:g} s"
                hint = "see whether that rank lives and has the same directory"
                raise CheckpointError(self.sentence(f"{waited}; {hint}"))
            time.sleep(pause)
            pause = min(pause * 1.5, LAST_POLL)


def await_commit(save: Save) -> None:
    """Wait until rank 0 has committed the save.

    Raises:
        CheckpointError: it failed, or rank 0 does not answer.
    """
    save.wait_until(lambda: not save.partial.exists(), lambda: "no word from rank 0")
    save.check()
    if not save.final.exists():
        problem = "another run has cleaned it; give each run a directory of its own"
        raise CheckpointError(save.sentence(problem))
