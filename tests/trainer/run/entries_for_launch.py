"""What the ranks of test_launch.py run."""

import json
import os
import signal
import socket
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.core.errors import DataError, StartError
from phalanx.trainer.parallel.comm import DirectGroup
from phalanx.trainer.parallel.ledger import Ledger
from phalanx.trainer.run.worker import Worker


def listening_addresses() -> list[str]:
    """Where this process listens, and the store that it was sent to."""
    inodes = set()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            inodes.add(str(fd.readlink()))
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            words = line.split()
            address, port = words[1].split(":")
            ours = f"socket:[{words[9]}]" in inodes or int(port, 16) == int(
                os.environ["MASTER_PORT"]
            )
            if words[3] == "0A" and ours:
                parts = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                found.append(socket.inet_ntop(family, b"".join(parts)))
    return found


def note(worker: Worker, folder: str) -> int:
    """Write what this rank found, and add it up with the others."""
    total = torch.tensor([float(worker.rank)])
    dist.all_reduce(total)
    found = {
        "pid": os.getpid(),
        "ranks": worker.ranks,
        "local": [worker.local_rank, worker.local_ranks],
        "device": worker.device.type,
        "threads": torch.get_num_threads(),
        "total": total.item(),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "listens": listening_addresses(),
    }
    Path(folder, f"{worker.rank}.json").write_text(json.dumps(found))
    return 0


def return_codes(worker: Worker, codes: list[int]) -> int:
    return codes[worker.rank]


def refuse_on_one_rank(worker: Worker, rank: int) -> int:
    if worker.rank == rank:
        raise DataError("the text ends here; give a longer one")
    dist.all_reduce(torch.ones(1))
    return 0


def refuse_on_all_ranks(worker: Worker) -> int:
    raise DataError("nobody can read this")


def crash_on_one_rank(worker: Worker, rank: int) -> int:
    if worker.rank == rank:
        raise ZeroDivisionError("a bug of ours")
    dist.all_reduce(torch.ones(1))
    return 0


def die_on_one_rank(worker: Worker, rank: int) -> int:
    if worker.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    return 0


def connect_at_the_second_start(worker: Worker, folder: str) -> int:
    """The first time, rank 1 finds nobody."""
    flag = Path(folder, "flag")
    if worker.rank == 1 and not flag.exists():
        flag.touch()
        raise StartError("rank 1 cannot connect to the others: connectFullMesh failed\nin C++")
    dist.all_reduce(torch.ones(1))
    return 0


def never_connect(worker: Worker) -> int:
    raise StartError("nobody is there")


def sleep_through_a_message(worker: Worker, rank: int) -> int:
    """One rank does not come to what the others wait for, a second long."""
    every = list(range(worker.ranks))
    handle = dist.new_group(every, timeout=timedelta(seconds=1))
    if worker.rank == rank:
        time.sleep(60)
    DirectGroup("data", every, handle, Ledger()).all_reduce(torch.ones(1), "gradients").wait()
    return 0


def miss_a_file(worker: Worker) -> int:
    return len(Path("/nowhere/at/all").read_text())


def save_when_asked(worker: Worker, folder: str, seconds: float) -> int:
    """Step until somebody asks to stop, then save, slowly."""
    Path(folder, f"pid-{worker.rank}").write_text(str(os.getpid()))
    steps = 0
    while True:
        wish = torch.tensor([float(worker.stop.requested)])
        dist.all_reduce(wish, op=dist.ReduceOp.MAX)
        if wish.item():
            break
        steps += 1
        time.sleep(0.02)
    time.sleep(seconds)
    Path(folder, f"saved-{worker.rank}").write_text(str(steps))
    return 75
