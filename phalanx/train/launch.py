"""Starts the ranks of a run on this machine, and brings home what became of them.

Workers are forked from one clean process that has imported torch once (multiprocessing's
forkserver), so that four ranks are ready in the time that one needs. Nothing here imports torch
until ranks are started: that import runs while the forkserver does its own.
"""

import importlib.util
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker
from typing import Any

from phalanx.core.errors import PhalanxError

PRELOAD = ("phalanx.train.worker", "torch.distributed.fsdp", "torch.distributed.tensor")
INSTALL = "pip install 'phalanx[train]'"


def require_torch() -> None:
    """Say what to install if torch is missing.

    Raises:
        PhalanxError: it is.
    """
    if importlib.util.find_spec("torch") is None:
        raise PhalanxError(f"this needs PyTorch, which is not installed: {INSTALL}")


def under_torchrun() -> bool:
    """Whether this process is already one rank of several that somebody else started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def count_gpus() -> int:
    """GPUs that this machine offers; 0 also where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


def warm_up(modules: Sequence[str] = ()) -> None:
    """Begin to import torch in the process that workers will be forked from; returns at once.

    A program calls it first thing. SIGTERM and SIGINT are held back in that process, and in all
    that are forked from it until they listen (`StopSignal.listen`): a signal to the whole process
    group, such as Ctrl-C in a terminal, must not take away the ranks that are saving.

    Args:
        modules: what else the workers will need.
    """
    multiprocessing.set_forkserver_preload([*PRELOAD, *modules])
    resource_tracker.ensure_running()  # first, since it leaves the signals unblocked
    signals = {signal.SIGTERM, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def launch(
    entry: Callable[..., int],
    args: tuple[Any, ...],
    ranks: int,
    on_stop: Callable[[], None] | None = None,
) -> int:
    """Run `entry(worker, *args)` on `ranks` local processes, and wait for them.

    SIGTERM, SIGHUP and Ctrl-C are passed on as a request to save and stop, for which the workers
    have all the time they need; a second Ctrl-C ends them at once.

    Args:
        entry: a function of some module; returns an exit code, the same on every rank.
        args: must pickle.
        ranks: processes to start; each on its own GPU if there are enough, else all on the CPU.
        on_stop: called when such a request has been passed on.

    Returns:
        The largest exit code of all ranks; 75 if they had to be ended at once.

    Raises:
        PhalanxError: the one that a rank raised, with its exit code.
        supervise.WorkerCrashError: a rank failed in another way, or was killed.
    """
    require_torch()
    multiprocessing.set_forkserver_preload(list(PRELOAD))  # no matter if it runs already
    from phalanx.train.supervise import supervise

    return supervise(entry, args, ranks, on_stop)
