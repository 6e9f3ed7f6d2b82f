"""One job on one rank process: join the others, work, leave."""

import gc
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(seconds=120)


def run_job(
    job: Callable[..., Any], arguments: tuple[Any, ...], rank: int, ranks: int, store: str
) -> Any:
    """Call `job(*arguments)` inside a process group of `ranks` processes on this machine.

    Args:
        job: what to call.
        arguments: for it.
        rank: of this process.
        ranks: in all; one needs no process group.
        store: path of a file that does not exist yet, through which the ranks find each other.
    """
    torch.set_num_threads(1)
    if ranks == 1:
        return job(*arguments)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=_TIMEOUT
    )
    try:
        return job(*arguments)
    finally:
        gc.collect()  # a group that a cycle keeps alive would poll its dead sockets for ever
        dist.destroy_process_group()
