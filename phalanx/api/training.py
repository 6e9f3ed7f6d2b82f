"""Training from Python: `phalanx.train` runs what `phalanx train` runs, without its screen."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.api.names import RunLike, run_of
from phalanx.core.run import Run
from phalanx.trainer.run.events import EventLog
from phalanx.trainer.run.launch import launch, require_torch
from phalanx.trainer.run.limits import refuse_untrainable
from phalanx.trainer.run.report import Silent, Summary
from phalanx.trainer.run.restart import Restarter
from phalanx.trainer.run.rundir import RunDirectory

if TYPE_CHECKING:
    from phalanx.trainer.run.worker import Worker

__all__ = ["Summary", "train"]


def train(run: RunLike, *, name: str = "", runs: str | Path = "runs") -> Summary:
    """Train on ranks of this machine, and wait until it is done.

    Args:
        run: the path of a run file, its tables, or a `Run`. Its layout says how many ranks are
            started: each on its own GPU if there are enough, else all on the CPU.
        name: of the run's folder; by default the time of day.
        runs: the folder of all runs.

    Returns:
        What it came to: losses in nats per token, seconds, tokens/s, MFU, peak bytes, checkpoints.
        Everything else is in the run's folder, `summary.directory`.

    Raises:
        UsageError: an unknown key, or a value of the wrong kind.
        RefusedError: the run cannot be cut so; the message says what can.
        DataError: the corpus cannot be read.
        PhalanxError: torch is missing, or a rank failed.

    Example:
        >>> import phalanx
        >>> recipe = phalanx.Recipe(seq=32, batch=2, steps=1, warmup=0, sample_tokens=0)
        >>> run = phalanx.Run(model=phalanx.ModelShape(hidden=64), recipe=recipe)
        >>> summary = phalanx.train(run, runs=tmp_path)
        >>> summary.last_step, summary.tokens
        (1, 64)
    """
    require_torch()
    resolved = run_of(run)
    refuse_untrainable(resolved)
    with RunDirectory.create(Path(runs), name) as directory:
        directory.write_run(resolved)
        events = EventLog(directory.events_file)
        restarter = Restarter(directory, resolved.recipe, events)
        ranks = resolved.layout.ranks
        launch(
            train_one_rank, (resolved, directory), ranks, on_event=events.note, restarter=restarter
        )
        document = json.loads(directory.summary_file.read_text(encoding="utf-8"))
    return Summary.from_dict(document)


def train_one_rank(worker: "Worker", run: Run, directory: RunDirectory) -> int:
    """What each rank does.

    Args:
        worker: this process, joined with the others.
        run: what to train.
        directory: where it is written; locked by whoever opened it.
    """
    from phalanx.trainer.run.environment import describe_environment
    from phalanx.trainer.run.trainer import train as train_here

    if worker.rank == 0 and not worker.attempt:
        directory.write_environment(describe_environment(run.layout, worker.device))
    return train_here(worker, run, directory, Silent())
