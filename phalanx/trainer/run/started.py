"""Finds out whether somebody else's launcher started this process as one rank of several.

| launcher | says so by |
|---|---|
| torchrun | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` |
| srun | `SLURM_PROCID`, `SLURM_NTASKS`, `SLURM_LOCALID`, the list of nodes |
| mpirun | `OMPI_COMM_WORLD_RANK`, `_SIZE`, `_LOCAL_RANK`, `_LOCAL_SIZE` |

A set is complete, or it is not that launcher: a stray `RANK` starts nothing.
"""

import os
import re
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

from phalanx.core.errors import UsageError

_FIRST_PORT, _PORTS = 15_000, 15_000  # below those that systems hand out by themselves


class Started(NamedTuple):
    """This process as the rank that a launcher made it.

    Attributes:
        launcher: its name.
        rank: among all ranks.
        ranks: how many there are.
        local_rank: among the ranks of this machine.
        local_ranks: how many this machine has.
        address: of the machine of rank 0.
        port: where ranks meet there.
    """

    launcher: str
    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    address: str
    port: int

    def tell_torch(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Say it in the words in which torch.distributed asks for it."""
        environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.ranks),
            LOCAL_RANK=str(self.local_rank),
            LOCAL_WORLD_SIZE=str(self.local_ranks),
            MASTER_ADDR=self.address,
            MASTER_PORT=str(self.port),
        )


class Node(NamedTuple):
    """This machine among those of a run with one launcher each.

    Attributes:
        number: of this machine, from 0.
        total: how many there are.
        address: of machine 0.
        port: where launchers meet there.
    """

    number: int
    total: int
    address: str
    port: int


def node_of(
    count: int, number: int | None, rendezvous: str, environ: Mapping[str, str] = os.environ
) -> Node:
    """Which machine this is; Slurm and Kubernetes say what the arguments do not.

    Args:
        count: how many machines there are.
        number: of this one, from 0; None where the environment says it.
        rendezvous: `HOST:PORT` of machine 0; empty where the environment says it.
        environ: the environment variables.

    Raises:
        UsageError: the number or the address is missing, or makes no sense.

    Example:
        >>> node_of(2, 1, "node01:29400")
        Node(number=1, total=2, address='node01', port=29400)
    """
    if number is None:
        number = _number(environ, "SLURM_NODEID")
    if number is None:
        number = _number(environ, "JOB_COMPLETION_INDEX")
    if number is None:
        raise UsageError(
            f"--nodes {count}, but nothing says which of them this is; give --node-rank, from 0"
        )
    if not 0 <= number < count:
        raise UsageError(f"--node-rank is {number}; with --nodes {count} it is 0 to {count - 1}")
    address, colon, port = rendezvous.rpartition(":")
    if rendezvous and not (colon and address and port.isdecimal() and int(port) < 1 << 16):
        raise UsageError(f"--rendezvous is {rendezvous!r}; write HOST:PORT, such as node01:29400")
    if not rendezvous:
        nodes = _first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
        address = environ.get("MASTER_ADDR") or first_node(nodes)
    if not address:
        raise UsageError(
            f"--nodes {count}, but nothing says where they meet; give --rendezvous HOST:PORT of "
            "machine 0"
        )
    return Node(number, count, address, int(port) if rendezvous else _port(environ))


def started_by(environ: Mapping[str, str] = os.environ) -> Started | None:
    """Who started this process as one of several; None where nobody did.

    Raises:
        UsageError: somebody did, and does not say all that is needed.
    """
    return _torchrun(environ) or _srun(environ) or _mpirun(environ)


def started_again(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun has started the ranks of this machine before."""
    return (_number(environ, "TORCHELASTIC_RESTART_COUNT") or 0) > 0


def _torchrun(environ: Mapping[str, str]) -> Started | None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    numbers = [_number(environ, name) for name in names]
    address, port = environ.get("MASTER_ADDR", ""), _number(environ, "MASTER_PORT")
    if None in numbers or not address or port is None:
        ranks = numbers[1]
        if numbers[0] is not None and ranks is not None and ranks > 1:
            everything = (*names, "MASTER_ADDR", "MASTER_PORT")
            missing = next(name for name in everything if not environ.get(name))
            raise UsageError(
                f"RANK and WORLD_SIZE={ranks} are set, but {missing} is not: start with torchrun, "
                "which sets all of them, or unset both"
            )
        return None
    rank, ranks, local_rank, local_ranks = (n for n in numbers if n is not None)
    return Started("torchrun", rank, ranks, local_rank, local_ranks, address, port)


def _srun(environ: Mapping[str, str]) -> Started | None:
    """The steps of a job have several tasks; its batch script and an salloc shell are one process.

    Source: srun(1), "OUTPUT ENVIRONMENT VARIABLES".
    """
    rank, local_rank = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_LOCALID")
    ranks = _number(environ, "SLURM_STEP_NUM_TASKS") or _number(environ, "SLURM_NTASKS")
    in_script = "SLURM_STEP_ID" not in environ and environ.get("ENVIRONMENT") == "BATCH"
    if rank is None or ranks is None or ranks < 2 or in_script:
        return None
    nodes = _first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    tasks = _first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    local_ranks = _tasks_here(tasks, _number(environ, "SLURM_NODEID") or 0)
    alone = _number(environ, "SLURM_NNODES") == 1 or (nodes and not re.search(r"[,\[]", nodes))
    if local_ranks is None and alone:
        local_ranks = ranks
    if local_rank is None or local_ranks is None or not (nodes or alone):
        lacking = "SLURM_LOCALID" if local_rank is None else "SLURM_JOB_NODELIST"
        raise UsageError(
            f"this is task {rank} of {ranks} of Slurm, but {lacking} is not set, so that ranks "
            "cannot find each other: start with srun, or one torchrun per node"
        )
    first = "127.0.0.1" if local_ranks == ranks else first_node(nodes)
    address = environ.get("MASTER_ADDR") or first
    return Started("srun", rank, ranks, local_rank, local_ranks, address, _port(environ))


def _mpirun(environ: Mapping[str, str]) -> Started | None:
    words = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    numbers = [_number(environ, f"OMPI_COMM_WORLD_{word}") for word in words]
    if None in numbers:
        return None
    rank, ranks, local_rank, local_ranks = (n for n in numbers if n is not None)
    if ranks < 2:
        return None
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if ranks == local_ranks else "")
    if not address:
        raise UsageError(
            f"mpirun started {ranks} ranks on several machines; set MASTER_ADDR to that of rank 0, "
            "such as mpirun -x MASTER_ADDR=node01"
        )
    return Started("mpirun", rank, ranks, local_rank, local_ranks, address, _port(environ))


def first_node(nodes: str) -> str:
    """The first machine of a list as Slurm writes it: `node[03-04,7],big` begins with `node03`."""
    found = re.match(r"([^\[,]*)(?:\[([^\],-]*)[^\]]*\])?([^,\[]*)", nodes)
    assert found is not None  # every part may be empty
    return "".join(part or "" for part in found.groups())


def _tasks_here(tasks: str, node: int) -> int | None:
    """Tasks of one machine, from a list as Slurm writes it: `8(x3),4`."""
    counts: list[int] = []
    for part in tasks.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not found:
            return None
        counts += [int(found[1])] * int(found[2] or 1)
    return counts[node] if node < len(counts) else None


def _port(environ: Mapping[str, str]) -> int:
    """One that all ranks of a job step choose alike, and other jobs hardly ever."""
    port = _number(environ, "MASTER_PORT")
    if port is not None:
        return port
    job = _number(environ, "SLURM_JOB_ID") or _number(environ, "SLURM_JOBID") or 0
    step = _number(environ, "SLURM_STEP_ID") or 0
    return _FIRST_PORT + (job * 31 + step) % _PORTS


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    return int(text) if text.isdecimal() else None


def _first(environ: Mapping[str, str], *names: str) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")
