"""Where a run starts from, as --resume, --from and --name say."""

from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from phalanx.api.runfile import load_run
from phalanx.core.errors import RefusedError, UsageError
from phalanx.core.run import Run
from phalanx.trainer.run.continuity import Resume
from phalanx.trainer.run.rundir import find_run, require_name
from phalanx.trainer.run.started import started_again


class Origin(NamedTuple):
    """Where a run starts from.

    Attributes:
        fresh: a new folder is made.
        runs, name: the folder.
        resume: what the trainer goes on from; None starts anew.
        stored: the run file of the run that it goes on from, or None.
    """

    fresh: bool
    runs: Path
    name: str
    resume: Resume | None = None
    stored: Path | None = None


def origin_of(args: Namespace) -> Origin:
    """Read the options of a command line.

    Raises:
        UsageError: there is no such run or checkpoint, or the options contradict each other.
        RefusedError: the run has gone on from that checkpoint.
    """
    if args.name:
        require_name(args.name)
    if args.fork is not None:
        return _fork(args)
    if args.resume is None:
        if args.force:
            raise UsageError("--force goes with --resume: nothing is gone on with here")
        return Origin(True, args.runs_dir, args.name)
    if args.resume == "auto":
        anew = args.name and args.run_file and not (args.runs_dir / args.name / "run.toml").exists()
        if anew:  # so that one command line both starts a job and restarts it
            return Origin(True, args.runs_dir, args.name)
        return _of_run(find_run(args.runs_dir, args.name), args)
    return _of_path(_folder(args.resume, "--resume", "auto, a run, or a checkpoint"), args)


def require_same_model(run: Run, origin: Origin) -> None:
    """Refuse another model than the weights are of, also where all have the same shapes.

    Args:
        run: what is to be trained; the name of its model may be another.
        origin: whose run file says what the weights are of; without one everything is accepted.

    Raises:
        RefusedError: naming the key.
    """
    if origin.stored is None:
        return
    before = load_run(origin.stored).model
    for key, value in asdict(before).items():
        now = getattr(run.model, key)
        if now != value and key != "name":
            raise RefusedError(
                f"{origin.stored.parent.name} has model.{key}={value}, not {now}; go on with "
                "that, or start another run from the beginning"
            )


def _fork(args: Namespace) -> Origin:
    if args.resume is not None:
        raise UsageError(
            "--resume goes on with a run, and --from makes another of it; give only one of them"
        )
    path = _folder(args.fork, "--from", "a run, or a checkpoint")
    home = path if (path / "run.toml").exists() else path.parent.parent
    stored = home / "run.toml"
    resume = Resume(str(path), may_differ=True)
    return Origin(True, args.runs_dir, args.name, resume, stored if stored.exists() else None)


def _of_path(path: Path, args: Namespace) -> Origin:
    if (path / "run.toml").exists():
        return _of_run(path, args)
    home = path.parent.parent
    stored = home / "run.toml" if (home / "run.toml").exists() else None
    resume = Resume(str(path), may_differ=args.force)
    if args.name or stored is None:
        return Origin(True, args.runs_dir, args.name, resume, stored)
    if not started_again():
        _require_newest(path, home.name)
    return Origin(False, home.parent, home.name, resume, stored)


def _require_newest(path: Path, run: str) -> None:
    """The run would hold two futures, and auto would take up the wrong one."""
    from phalanx.trainer.checkpoint.names import steps

    known = steps(path.parent)
    own = next((step for step, found in known if found.name == path.name), None)
    if own is None:
        raise UsageError(f"{path} is no checkpoint; one is named step-00000100, say")
    if known[0][0] > own:
        raise RefusedError(
            f"{run} has gone on to {known[0][1].name}; make another run of {path.name} with "
            f"--from {path} --name NAME, or go on with --resume auto"
        )


def _of_run(path: Path, args: Namespace) -> Origin:
    resume = Resume("auto", may_differ=args.force)
    return Origin(False, path.parent, path.name, resume, path / "run.toml")


def _folder(text: str, option: str, what: str) -> Path:
    path = Path(text).resolve()
    if not path.is_dir():
        raise UsageError(
            f"{option} {text}: no such folder; it can be {what} "
            "such as runs/NAME/checkpoints/step-00000100"
        )
    return path
