"""One job on one rank process: join the others, work, leave together."""

import gc
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store

from phalanx.core.errors import StartError

# Before a rank keeps to one of them.
_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

_TIMEOUT = timedelta(seconds=120)


def run_job(
    job: Callable[..., Any], arguments: tuple[Any, ...], rank: int, ranks: int, path: str
) -> Any:
    """Call `job(*arguments)` inside a process group of `ranks` processes on this machine.

    Args:
        job: what to call.
        arguments: for it.
        rank: of this process.
        ranks: in all; one needs no process group.
        path: of a file that does not exist yet, through which the ranks find each other.

    Raises:
        StartError: the ranks cannot connect.
    """
    torch.set_num_threads(1)
    _share_cores(rank, ranks)
    if ranks == 1:
        return job(*arguments)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = FileStore(path, ranks)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_TIMEOUT)
    except RuntimeError as error:
        raise StartError(f"rank {rank} of {ranks} cannot connect: {error}") from error
    try:
        result = job(*arguments)
        _wait_for_all(store, rank, ranks)
        return result
    finally:
        gc.collect()  # a group that a cycle keeps alive would poll its dead sockets for ever
        dist.destroy_process_group()


def _share_cores(rank: int, ranks: int) -> None:
    """Keep to one core where there are more ranks than cores.

    Else the thread of gloo that receives spins on another core for as long as this one holds the
    lock of a connection.
    """
    if _CORES:
        alone = {_CORES[rank % len(_CORES)]}
        os.sched_setaffinity(0, alone if ranks > len(_CORES) else _CORES)


def _wait_for_all(store: Store, rank: int, ranks: int) -> None:
    """Return once every rank is done: one that leaves earlier cuts off whoever still sends."""
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(ranks)], _TIMEOUT)
