"""Save while training goes on: copy first, write behind, commit all or nothing."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from phalanx.core.errors import CheckpointError
from phalanx.trainer import faults
from phalanx.trainer.checkpoint.agreement import Save, await_commit
from phalanx.trainer.checkpoint.commit import commit, write_part
from phalanx.trainer.checkpoint.disk import Disk
from phalanx.trainer.checkpoint.failure import acknowledge, clear_failed, explain, give_up
from phalanx.trainer.checkpoint.manifest import encode_state
from phalanx.trainer.checkpoint.names import ATTEMPT, shard_name
from phalanx.trainer.checkpoint.piece import Piece
from phalanx.trainer.checkpoint.retention import Retention, prune, sweep_others, sweep_own
from phalanx.trainer.checkpoint.shard import Shard, buffer_for, snapshot


class SpoiledError(CheckpointError):
    """What was to be saved is not finite."""


def _ignore(message: str) -> None:
    """Tell nobody."""


@dataclass(eq=False)
class Saver:
    """Saves checkpoints of one rank together with the other ranks, in the background.

    Ranks share a file system and nothing else: no collective is issued, so a save never
    disturbs training. All ranks call `save` for the same steps in the same order.

    Attributes:
        directory: where checkpoints live; it is made if it is missing.
        rank: this rank.
        world: number of ranks.
        keep: how many verified checkpoints stay.
        keep_every: one whose step is a multiple of this stays for good; 0 has none.
        attempt: a name for this start of the run (letters, digits, _), never used before: rank 0
            draws it (`secrets.token_hex(8)`) and broadcasts it. It tells this run's
            unfinished saves from those of a dead one, so ranks may start and save at any time.
        on_event: told, on rank 0, what was set aside or could not be tidied; called from a
            background thread.
        patience: seconds to wait for the slowest rank before a save is given up.
        disk: the file system.
        finite: a save fails whose tensors hold a nan or an infinity.
        known: how many of these this rank's tensors hold in any case, by field and name such as
            `weight of embedding.weight`.
        count: how many saves have begun.

    Raises:
        CheckpointError: the directory cannot be made.
    """

    directory: Path
    rank: int
    world: int
    keep: int = 2
    _: KW_ONLY
    keep_every: int = 0
    attempt: str
    on_event: Callable[[str], None] = _ignore
    patience: float = 1800.0
    disk: Disk = field(default_factory=Disk)
    finite: bool = False
    known: Mapping[str, int] = field(default_factory=dict)
    count: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Make the directory; rank 0 removes what a dead attempt left unfinished."""
        if self.keep < 1 or not ATTEMPT.fullmatch(self.attempt):
            raise CheckpointError(
                f"keep={self.keep} attempt={self.attempt!r}: keep at least 1 checkpoint, and name "
                f"the attempt with 1 to 64 letters, digits and _"
            )
        self._thread: Thread | None = None
        self._errors: dict[int, CheckpointError] = {}
        self._steps: dict[int, int] = {}
        self._buffer: torch.Tensor | None = None
        self._trusted: set[Path] = set()
        try:
            self.disk.make_directory(self.directory)
            if self.rank == 0:
                self.disk.sync_directory(self.directory.parent)
                sweep_others(self.directory, self.attempt, self.disk)
        except OSError as error:
            raise CheckpointError(
                f"cannot save checkpoints in {self.directory}: {error.strerror}; "
                f"make it a writable directory, or move the run elsewhere"
            ) from error

    def prepare(self, pieces: Sequence[Piece]) -> None:
        """Make the memory that saves of such pieces need, before the first one is due."""
        self._buffer = buffer_for(pieces)

    def save(self, step: int, pieces: Sequence[Piece], state: dict[str, Any]) -> None:
        """Copy the pieces to host memory, and write them while training goes on.

        The tensors may change as soon as this returns. A save that is still running is waited
        for. Nothing is raised here: whatever goes wrong is noted in `failed`, on every rank.

        Args:
            step: after how many optimizer steps this is.
            pieces: what this rank owns; over all ranks, each element of each tensor once.
            state: small values that JSON gives back unchanged; that of rank 0 is saved.
        """
        self.join()
        self.count += 1
        self._steps[self.count] = step
        save = Save(
            directory=self.directory,
            step=step,
            attempt=self.attempt,
            count=self.count,
            rank=self.rank,
            world=self.world,
            disk=self.disk,
            patience=self.patience,
        )
        try:
            shard = snapshot(pieces, shard_name(self.rank), self._buffer)
            self._buffer = shard.data
            work = partial(self._write, save, shard, json.loads(encode_state(state)))
        except Exception as error:  # the other ranks must hear of it, whatever it is
            work = partial(self._give_up, save, error, 0)
        self._thread = Thread(target=work, name=f"checkpoint-{step}", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Return when the last save is committed, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Return when the last save is committed.

        Raises:
            CheckpointError: it failed, on this rank or on another; raised once.
        """
        self.join()
        error = self._errors.pop(self.count, None)
        if error is not None:
            raise error

    @property
    def failed(self) -> int:
        """Which save is the last that is known to have failed, from 1; 0 if none has.

        Asking costs nothing. Ranks hear of it at their own moments: agree on the largest.
        """
        return max(self._errors, default=0)

    @property
    def spoiled(self) -> int:
        """The last that failed because this rank's tensors were not finite; 0 if none has."""
        bad = [count for count, e in self._errors.items() if isinstance(e, SpoiledError)]
        return max(bad, default=0)

    def step_of(self, count: int) -> int:
        """The step of a save that has begun."""
        return self._steps[count]

    def reason(self, count: int) -> str:
        """Why a save failed that some rank knows to have failed; this one waits until it knows."""
        if count == self.count:
            self.join()
        error = self._errors.get(count)
        return str(error) if error else f"save {count} failed on another rank"

    def _write(self, save: Save, shard: Shard, state: dict[str, Any]) -> None:
        try:
            if self.finite and (spoiled := shard.spoiled(self.known)):
                raise SpoiledError(save.sentence(f"{spoiled}, on rank {self.rank}"))
            write_part(save, shard)
            if self.rank == 0:
                commit(save, state, self.on_event)
        except Exception as error:
            self._give_up(save, error, shard.bytes)
            return
        if self.rank == 0:
            self._tidy(save)
        else:
            self._await(save)

    def _await(self, save: Save) -> None:
        try:
            await_commit(save)
        except (OSError, CheckpointError) as error:
            self._errors[save.count] = CheckpointError(explain(save, error, 0))
            acknowledge(save)

    def _give_up(self, save: Save, error: Exception, needed: int) -> None:
        told = give_up(save, error, needed)
        self._errors[save.count] = error if isinstance(error, SpoiledError) else told
        if self.rank == 0:
            clear_failed(save)

    def _tidy(self, save: Save) -> None:
        """After the commit: no failure here may undo it, so it is told and training goes on."""
        try:
            save.disk.sync_directory(save.directory)  # before anything older is deleted
            faults.point("save.tidy", step=save.step)
            sweep_own(save)
            retention = Retention(self.keep, self.keep_every)
            prune(save, retention, self._trusted, self.on_event)
        except (OSError, CheckpointError) as error:
            self.on_event(f"saved step {save.step}, but could not tidy {save.directory}: {error}")
