"""Train a model on text, cut any way over data, tensor, context, experts and pipeline.

  phalanx train                                  four local ranks on what Python itself is made of
  phalanx train examples/demo.toml --data book.txt
  phalanx train run.toml --layout "dp=2 tp=2 zero=3" --set recipe.steps=500
  phalanx train --resume auto                    go on with the run that was written last
  phalanx train --from runs/a --data new.txt     a new run that goes on from the weights of another

On a machine with a GPU for each rank every rank takes one; otherwise all share the CPU. The same
command runs under torchrun, or as srun -n RANKS phalanx train ..., on any number of machines that
share a file system.
"""

import json
import signal
import sys
import traceback
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from phalanx.api.runfile import load_run
from phalanx.cli.console import Screen, open_console
from phalanx.cli.origin import Origin, origin_of, require_same_model
from phalanx.cli.sets import declare_sets
from phalanx.cli.stream import report_error, restore_terminal, say
from phalanx.cli.trial import describe_resume, describe_run, refuse_untrainable, show_run
from phalanx.core.errors import PhalanxError, UsageError
from phalanx.core.run import Run
from phalanx.trainer.run.continuity import Resume
from phalanx.trainer.run.events import EventLog
from phalanx.trainer.run.launch import (
    WarmStart,
    count_gpus,
    launch,
    require_files,
    require_torch,
)
from phalanx.trainer.run.orphans import die_with_parent
from phalanx.trainer.run.report import Reporter, Silent
from phalanx.trainer.run.restart import Restarter
from phalanx.trainer.run.room import Room
from phalanx.trainer.run.rundir import RunDirectory, require_free
from phalanx.trainer.run.signals import remembered
from phalanx.trainer.run.started import Started, started_by

if TYPE_CHECKING:
    from phalanx.trainer.run.worker import Worker

INTERRUPTED = 75
BATCH_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
DIRECTORY = "directory"  # of the run, in the store that all starts under torchrun share
PRELOAD = ("phalanx.cli.console", __name__)


def arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes."""
    resume = (
        "auto: go on from the newest intact checkpoint of --name, or of the run that was written "
        "last; PATH: of that run, or from that checkpoint"
    )
    fork = (
        "make a new run of a checkpoint, or of the newest of a run: it goes on from that step, "
        "with other data, batch or seed if you like, which is told"
    )
    force = "with --resume: go on also with other data, batch or seed, which is told"
    data = "learn from a text, a folder of texts, or a token file"
    restarts = "start ranks again N times at most after one has died (recipe.max_restarts, 100)"
    profile = "time the kernels of N steps, for phalanx report (recipe.profile)"
    prove = "first hold that many steps against one device, in fp64; stop if they differ"
    add = parser.add_argument
    add("run_file", nargs="?", type=Path, metavar="RUN.toml", help="what to train")
    add("--layout", help="how to cut a step, instead of the file's: 'dp=2 pp=2 tp=2 zero=3'")
    add("--ranks", type=int, help="local ranks, cut for you where no layout is given")
    declare_sets(parser)
    add("--data", metavar="PATH", action=_Once, help=data)
    add("--resume", metavar="auto|PATH", help=resume)
    add("--from", dest="fork", metavar="PATH", help=fork)
    add("--force", action="store_true", help=force)
    add("--prove", type=int, default=0, metavar="STEPS", help=prove)
    add("--max-restarts", type=int, metavar="N", help=restarts)
    add("--profile", type=int, metavar="N", help=profile)
    add("--dry-run", action="store_true", help="check and show what would run; start nothing")
    add("--name", default="", help="of the run's folder; by default the time of day")
    add("--runs-dir", type=Path, default=Path("runs"), help="where runs are written (./runs)")
    add("--quiet", action="store_true", help="write files only, and errors")
    add("--json", action="store_true", help="stdout is one JSON document: the summary")


class _Once(Action):
    """An option that may not be given twice: the first would be lost without a word."""

    def __call__(
        self,
        parser: ArgumentParser,
        namespace: Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            raise UsageError(
                f"{option_string} is given twice; a run learns from one text or token file: join "
                "them, or name a folder of texts"
            )
        setattr(namespace, self.dest, values)


def run(args: Namespace) -> int:
    """Train, and say what came of it."""
    origin = origin_of(args)
    started = started_by()
    if started is not None:
        return _run_as_started(args, origin, started)
    if args.dry_run:
        return _show_dry_run(args, origin, *_load(args, origin, args.ranks))
    require_torch()
    warm = WarmStart()
    try:
        with _stopping(), remembered(BATCH_SIGNALS):
            return _train_here(args, origin, warm)
    except BaseException as error:
        warm.abandon()
        if not isinstance(error, _StopError):
            raise
        if origin.fresh:  # 75 would promise that one can go on
            message = "interrupted before the first step: there is nothing to resume"
            return report_error(message, 1, args.json)
        return report_error("interrupted before the first step", INTERRUPTED, args.json)
    finally:
        restore_terminal()


@dataclass(frozen=True)
class Job:
    """What the command hands to every rank; it pickles.

    Attributes:
        run: every value, resolved.
        directory: where it is written; its lock is held elsewhere.
        resume: what to go on from, or None to start anew.
        screen: how rank 0 shows it.
        proof: how its first steps compared with one device, for the summary.
    """

    run: Run
    directory: RunDirectory
    resume: Resume | None
    screen: Screen
    proof: str = ""


def train_one_rank(worker: "Worker", job: Job) -> int:
    """What each rank does: all of it in `phalanx.trainer.run.trainer`, except for the screen.

    Args:
        worker: this process, joined with the others; rank 0 shows the run.
        job: what the command hands to every rank.

    Returns:
        The exit code: 0, or 75 if it was asked to stop and saved.

    Raises:
        PhalanxError: with one line that says what to change.
    """
    from phalanx.trainer.run.environment import describe_environment
    from phalanx.trainer.run.trainer import train

    reporter: Reporter = Silent()
    if worker.rank == 0:
        reporter = job.screen.reporter()
        if not worker.attempt:
            environment = describe_environment(job.run.layout, worker.device)
            job.directory.write_environment(environment)
    return train(worker, job.run, job.directory, reporter, job.resume, job.proof)


def _load(
    args: Namespace,
    origin: Origin,
    ranks: int | None,
    gpus: Callable[[], int] = count_gpus,
    local_ranks: int | None = None,
) -> tuple[Run, Room]:
    """Put the run together, and stop here if it cannot be trained."""
    run = load_run(
        args.run_file or origin.stored,
        layout=args.layout,
        ranks=ranks,
        sets=[*args.sets, *_recipe_options(args)],
        data=args.data,
        gpus=gpus,
    )
    require_same_model(run, origin)
    room = refuse_untrainable(run, local_ranks or run.layout.ranks)
    return run, room


def _recipe_options(args: Namespace) -> list[str]:
    """Keys of the recipe that have an option of their own."""
    return [
        f"recipe.{key}={getattr(args, key)}"
        for key in ("max_restarts", "profile")
        if getattr(args, key) is not None
    ]


def _train_here(args: Namespace, origin: Origin, warm: WarmStart) -> int:
    def count_gpus_meanwhile() -> int:
        warm.begin(PRELOAD)
        return count_gpus()

    require_files(args.ranks or 1)  # before anything is started that would miss them
    run, _ = _load(args, origin, args.ranks, count_gpus_meanwhile)
    require_files(run.layout.ranks)
    warm.begin(PRELOAD)
    with _directory(origin, run) as directory:
        job = Job(run, directory, origin.resume, _screen(args), _proof(args, run))
        events = EventLog(directory.events_file, _silent if args.quiet else _say)
        restarter = Restarter(directory, run.recipe, events)
        on_stop = _silent if args.quiet else _say_that_it_stops
        code = launch(train_one_rank, (job,), run.layout.ranks, on_stop, events.note, restarter)
        _print_summary(args, directory)
    return code


def _proof(args: Namespace, run: Run) -> str:
    """Hold the first steps against one device, if asked to, and show how they compare."""
    if not args.prove:
        return ""
    from phalanx.oracle.prove import prove

    proof = prove(run, args.prove)
    if not args.quiet:
        open_console(sys.stderr if args.json else sys.stdout).print(f"proof       {proof}")
    return proof


def _run_as_started(args: Namespace, origin: Origin, started: Started) -> int:
    """Be one rank of those that torchrun or srun started; of several that fail, one speaks."""
    from phalanx.trainer.run.worker import exit_code, leave_a_note, work_here

    if started.launcher == "torchrun":  # others may put a script in between, which ends first
        die_with_parent()
    try:
        if args.prove:
            raise UsageError(
                f"--prove starts ranks of its own; use phalanx verify, not {started.launcher}"
            )
        run, room = _load(args, origin, started.ranks, local_ranks=started.local_ranks)
        if args.dry_run:
            return _show_dry_run(args, origin, run, room) if started.rank == 0 else 0
    except PhalanxError as error:
        if started.local_rank == 0 and leave_a_note(error):
            raise
        return exit_code(error)  # rank 0 of this machine read the same, and says so
    try:
        started.tell_torch()
        return work_here(_train_one_rank_as_started, (run, args, origin))
    except Exception as error:
        _leave(error, as_json=args.json)


def _leave(error: Exception, *, as_json: bool) -> NoReturn:
    """End a rank that has failed: not by the usual way, where it would wait for the others."""
    from phalanx.trainer.run.worker import describe, exit_code, leave, leave_a_note

    if leave_a_note(error):
        told = describe(error)
        if told is None:
            traceback.print_exception(error)
        else:
            report_error(told, exit_code(error), as_json)
    leave(exit_code(error))


def _train_one_rank_as_started(worker: "Worker", run: Run, args: Namespace, origin: Origin) -> int:
    """Let rank 0 open the folder, and the others learn its name."""
    import torch.distributed as dist

    with ExitStack() as stack:
        told: list[Any] = [None]
        if worker.rank == 0:
            told[0] = stack.enter_context(_directory(_known(origin, worker), run))
            if worker.job is not None:
                worker.job.set(DIRECTORY, str(told[0].path.absolute()))
        dist.broadcast_object_list(told)
        code = train_one_rank(worker, Job(run, told[0], origin.resume, _screen(args)))
        if worker.rank == 0:
            _print_summary(args, told[0])
    return code


def _known(origin: Origin, worker: "Worker") -> Origin:
    """Where the run is that torchrun has started again: an earlier start has opened its folder."""
    if not worker.attempt or worker.job is None:
        return origin
    if not worker.job.check([DIRECTORY]):  # it died before it could
        fresh = origin.fresh and not (origin.runs / origin.name / "run.toml").exists()
        return origin._replace(fresh=fresh) if origin.name else origin
    path = Path(worker.job.get(DIRECTORY).decode())
    return origin._replace(fresh=False, runs=path.parent, name=path.name)


def _show_dry_run(args: Namespace, origin: Origin, run: Run, room: Room) -> int:
    """Say what would run, once everything is checked that the start would check."""
    if origin.fresh:
        require_free(origin.runs, origin.name)
    facts = describe_run(run, room)
    resumed = describe_resume(run, origin)
    facts |= {**resumed, "notes": [*facts["notes"], *resumed.get("notes", ())]}
    if args.json:
        print(json.dumps({"schema": 1, **facts}))
    else:
        open_console(sys.stdout).print(show_run(run, facts))
    return 0


@contextmanager
def _directory(origin: Origin, run: Run) -> Iterator[RunDirectory]:
    opened = RunDirectory.create if origin.fresh else RunDirectory.open_for_resume
    with opened(origin.runs, origin.name) as directory:
        if origin.fresh:
            directory.write_run(run)
        yield directory


def _screen(args: Namespace) -> Screen:
    return Screen(quiet=args.quiet, errors=args.json)


class _StopError(BaseException):
    """Asked to stop while nothing is trained yet, so that there is nothing to save."""


@contextmanager
def _stopping() -> Iterator[None]:
    """Clean up when somebody interrupts the command before the ranks are watched over.

    What batch systems send waits until then: the ranks take a step and save, so that the run can
    go on. It is not KeyboardInterrupt: Python remembers one that passed through `exec`, as in the
    dataclasses of a library, and then ends by SIGINT whatever the exit code was to be.
    """

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise _StopError

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _print_summary(args: Namespace, directory: RunDirectory) -> None:
    if args.json:
        say(directory.summary_file.read_text(encoding="utf-8").rstrip("\n"), sys.stdout)


def _say(event: str) -> None:
    restore_terminal()  # rank 0 may have died with its live line on it
    say(event)


def _silent(event: str = "") -> None:
    """What happens is in the folder of the run."""


def _say_that_it_stops() -> None:
    say("\nstopping: this step ends, then a checkpoint is saved; Ctrl-C again to leave without")
