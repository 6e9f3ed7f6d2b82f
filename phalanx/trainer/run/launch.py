"""Starts the ranks of a run on this machine, and brings home what became of them.

Workers are forked from one clean process that has imported torch once (multiprocessing's
forkserver), so that four ranks are ready in the time that one needs. Nothing here imports torch
until ranks are started: that import runs while the forkserver does its own.
"""

import importlib.util
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker
from typing import Any

from phalanx.core.errors import PhalanxError, RefusedError, StartError
from phalanx.data.processes import leaving_main_alone
from phalanx.trainer.run.restart import Restarter, may_pass
from phalanx.trainer.run.signals import INTERRUPTED, EndedError, Requests, held_back, listening
from phalanx.trainer.run.sockets import keep_socket_paths_short

# Imported once, in the process that all ranks of all starts are forked from: else each of them
# would take a second to import the trainer.
PRELOAD = (
    "phalanx.trainer.run.worker",
    "phalanx.trainer.run.trainer",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)
FILES, FILES_OF_A_RANK = 48, 8  # that a launcher opens; the ranks themselves open fewer
ATTEMPTS = 3  # to connect; a busy machine may cut a connection
INSTALL = "pip install 'phalanx[train]'"


def require_torch() -> None:
    """Say what to install if torch is missing.

    Raises:
        PhalanxError: it is.
    """
    if importlib.util.find_spec("torch") is None:
        raise PhalanxError(f"this needs PyTorch, which is not installed: {INSTALL}")


def count_gpus() -> int:
    """GPUs that this machine offers; 0 also where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


def require_files(ranks: int) -> None:
    """Let this process open as many files as it needs to watch over its ranks.

    Raises:
        RefusedError: the system does not let it.
    """
    needed = FILES + FILES_OF_A_RANK * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise RefusedError(
            f"a process may open {hard} files here (ulimit -n), and {ranks} ranks need "
            f"{needed}; use ulimit -n {needed} or more, or fewer ranks"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class WarmStart:
    """The clean process that workers are forked from: it imports torch while we get ready."""

    def __init__(self) -> None:
        self._pid: int | None = None

    def begin(self, modules: Sequence[str] = ()) -> None:
        """Start it, unless it runs; returns at once.

        The signals that ask to stop are held back in it, and in all that are forked from it until
        they listen (`StopSignal.listen`): a signal to the whole process group, such as Ctrl-C in
        a terminal, must not take away the ranks that are saving.

        Args:
            modules: what the workers will need, besides torch.
        """
        keep_socket_paths_short()
        ran_before = _forkserver_pid()
        multiprocessing.set_forkserver_preload([*PRELOAD, *modules])
        with held_back():
            resource_tracker.ensure_running()  # first, since it leaves two of them unblocked
        with held_back():
            forkserver.ensure_running()
        if _forkserver_pid() != ran_before:
            self._pid = _forkserver_pid()

    def abandon(self) -> None:
        """End it at once: it would go on importing, and keep our output open for whoever reads."""
        if self._pid is not None and self._pid == _forkserver_pid():
            os.kill(self._pid, signal.SIGKILL)


def _forkserver_pid() -> int | None:
    """The standard library knows it, and has no public way to say it."""
    pid: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)
    return pid


def launch(
    entry: Callable[..., int],
    args: tuple[Any, ...],
    ranks: int,
    on_stop: Callable[[], None] | None = None,
    on_event: Callable[[str], None] = lambda _: None,
    restarter: Restarter | None = None,
) -> int:
    """Run `entry(worker, *args)` on `ranks` local processes, and wait for them.

    SIGTERM, SIGUSR1, SIGHUP and Ctrl-C are passed on as a request to save and stop, for which the
    workers have all the time they need; a second Ctrl-C ends them at once.

    Args:
        entry: a function of some module; returns an exit code, the same on every rank.
        args: must pickle.
        ranks: processes to start; each on its own GPU if there are enough, else all on the CPU.
        on_stop: called when such a request has been passed on.
        on_event: is told in a line when ranks that could not connect are started once more.
        restarter: says after a failure whether the ranks are started again; None never does.

    Returns:
        The largest exit code of all ranks; 75 if they had to be ended and can be resumed.

    Raises:
        EndedError: they had to be ended, and nothing was saved.
        PhalanxError: the one that a rank raised, with its exit code.
        restart.WorkerCrashError: a rank failed in another way, or was killed.
    """
    require_torch()
    require_files(ranks)
    keep_socket_paths_short()
    multiprocessing.set_forkserver_preload(list(PRELOAD))  # no matter if it runs already
    number = unconnected = 0
    with listening() as requests:
        while True:
            attempt = (entry, args, ranks, number, restarter.grace if restarter else 0.0)
            try:
                return _supervised(attempt, requests, on_stop)
            except EndedError as error:
                return _interrupted(restarter, error)
            except StartError as error:
                unconnected += 1
                if requests.stop:
                    return _interrupted(restarter, error)
                if unconnected == ATTEMPTS:
                    raise
                on_event(f"starting {ranks} ranks once more: {str(error).splitlines()[0]}")
            except PhalanxError as error:
                if restarter is None or not may_pass(error):
                    raise
                if requests.stop:
                    return _interrupted(restarter, error)
                if not restarter.again(error):
                    raise
                number, unconnected = number + 1, 0


def _interrupted(restarter: Restarter | None, error: PhalanxError) -> int:
    """Ranks were asked to stop, and ended unsaved: 75 promises that one can go on all the same.

    Raises:
        EndedError: nothing was saved, so that one cannot.
    """
    if restarter is not None:
        restarter.stopped(error)
    if restarter is None or restarter.resumable():
        return INTERRUPTED
    raise EndedError("ended before anything was saved: there is nothing to resume")


def _supervised(
    attempt: tuple[Any, ...], requests: Requests, on_stop: Callable[[], None] | None
) -> int:
    from phalanx.trainer.run.supervise import Attempt, supervise

    try:
        with leaving_main_alone():
            return supervise(Attempt(*attempt), requests, on_stop)
    except (EOFError, ConnectionError) as error:  # the clean process is gone
        raise PhalanxError(
            "the process that ranks are forked from has ended, as it does when memory runs out; "
            "see what ulimit -v and free say"
        ) from error
