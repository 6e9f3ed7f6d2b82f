"""The saves of a run as its ranks agree on them: what became of each, and what follows.

A rank hears at its own moment that a save has failed. Every step all ranks agree on the number of
the last one that any of them knows to have failed, and act on that, all after the same step.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from phalanx.core.errors import CheckpointError
from phalanx.trainer.checkpoint import Saver
from phalanx.trainer.parallel.mesh import Mesh
from phalanx.trainer.run.events import EventLog

MOST_FAILED = 3  # in a row; then something is wrong that does not pass


class SaveReport(NamedTuple):
    """What one rank knows of the saves of this session, or all of them together: the largest.

    Attributes:
        failed: the number of the last that has failed, from 1; 0 if none has.
        spoiled: that of the last that failed because the run's state was not finite.
    """

    failed: int = 0
    spoiled: int = 0


@dataclass
class Saves:
    """What a session does about saves that fail.

    Attributes:
        saver: of this rank.
        events: where it is told.
        failed_in_a_row: how many, up to the last that is known to have failed.
        failed_step: of that one.
    """

    saver: Saver
    events: EventLog
    failed_in_a_row: int = 0
    failed_step: int = 0
    _heeded: int = 0

    def report(self) -> SaveReport:
        """What this rank knows; it costs nothing."""
        return SaveReport(self.saver.failed, self.saver.spoiled)

    def wait(self, mesh: Mesh, done: int) -> Literal["", "failed", "spoiled"]:
        """Wait for the last save, and let all ranks know what became of it.

        Args:
            mesh: all ranks; each of them calls this.
            done: steps, now.

        Returns:
            Empty if none has failed since the last call; else why it has.

        Raises:
            CheckpointError: it was one of several in a row.
        """
        self.saver.join()
        mine = torch.tensor(self.report(), dtype=torch.float64, device=mesh.device)
        mesh.world.all_reduce(mine, "saves", largest=True).wait()
        failed, spoiled = mine.tolist()
        return self.heed(SaveReport(int(failed), int(spoiled)), done)

    def heed(self, agreed: SaveReport, done: int) -> Literal["", "failed", "spoiled"]:
        """Tell of a save that has failed since the last call.

        Args:
            agreed: by all ranks.
            done: steps, now.

        Returns:
            Empty if none has; else why it has.

        Raises:
            CheckpointError: it was one of several in a row.
        """
        if agreed.failed <= self._heeded:
            return ""
        follows = self._heeded and agreed.failed == self._heeded + 1
        self.failed_in_a_row = self.failed_in_a_row + 1 if follows else 1
        spoiled = agreed.spoiled > self._heeded
        self.failed_step = self.saver.step_of(agreed.failed)
        self._heeded = agreed.failed
        reason = self.saver.reason(agreed.failed) if self.saver.rank == 0 else ""
        if spoiled:
            self.events.tell("save", reason, step=done, failed=True, spoiled=True)
            return "spoiled"
        if self.failed_in_a_row >= MOST_FAILED:
            raise CheckpointError(f"{self.failed_in_a_row} saves in a row have failed: {reason}")
        text = f"{reason}; training goes on, and earlier checkpoints stay"
        self.events.tell("save", text, step=done, failed=True)
        return "failed"
