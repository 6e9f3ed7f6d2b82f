"""What every rank does before and after its work: join the others, listen for a stop, say why not.

A rank is started by `phalanx.trainer.run.launch` on one machine, or by torchrun on many; either way
it finds its number in the environment variables that torchelastic sets.
"""

import errno
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import connection, parent_process
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _get_default_store

from phalanx.core.errors import PhalanxError, RankLeftError, StartError
from phalanx.trainer.faults.inject import PLAN, load_from_environment
from phalanx.trainer.parallel.mesh import group_timeout
from phalanx.trainer.run.agent_store import Meeting, agent_store, meet
from phalanx.trainer.run.cores import num_threads
from phalanx.trainer.run.heartbeat import LEFT, Heartbeat
from phalanx.trainer.run.orphans import die_with_parent
from phalanx.trainer.run.room import ran_out
from phalanx.trainer.run.signals import STOP_SIGNALS
from phalanx.trainer.run.watch import guard_each_other

FIRST_FAILURE = "first-failure.json"
PEER_GRACE_SECONDS = 3.0  # for ranks whose neighbour has failed to notice it by themselves
ECHO_SECONDS = 1.0
TIMEOUT = timedelta(minutes=10)  # after which a message that never came is an error

Entry = Callable[..., int]


class StopSignal:
    """Whether somebody asked this process to save and stop.

    Every rank hears the request at its own moment: agree on it (a maximum over all ranks) before
    acting on it, so that all of them stop after the same step.
    """

    def __init__(self) -> None:
        self.requested = False

    def listen(self) -> None:
        """Take every signal that asks for it as a request to stop.

        Call it from the main thread. Signals that arrived since the process was born were held
        back, and are delivered now.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


@dataclass(frozen=True)
class Worker:
    """One rank of a run, joined with the others.

    Attributes:
        rank: among all ranks.
        ranks: how many there are.
        local_rank: among the ranks of this machine.
        local_ranks: how many this machine has.
        device: where its tensors live.
        stop: whether it was asked to save and stop.
        attempt: which start of the run this is, from 0: more after a rank has died.
        job: a store that all starts of a job under torchrun share, or None.
        heart: tells the launcher what this rank is doing.
    """

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    device: torch.device
    stop: StopSignal
    attempt: int = 0
    job: Store | None = None
    heart: Heartbeat = field(default_factory=Heartbeat)


class Assignment(NamedTuple):
    """Where a rank that `launch` starts finds itself.

    Attributes:
        attempt: which start of the run this is, from 0.
        plan: the path of a plan of faults, or empty.
        beats: the folder in which the launcher looks for beats; empty where it does not look.
    """

    attempt: int = 0
    plan: str = ""
    beats: str = ""


ANYWHERE = Assignment()


def work(entry: Entry, args: tuple[Any, ...], place: Assignment = ANYWHERE) -> int:
    """Be one rank that `launch` started: join, work, and leave a note if it fails.

    Args:
        entry: called as `entry(worker, *args)`; what it returns becomes the exit code.
        args: must pickle.
        place: where it finds itself.
    """
    if place.plan:  # the process that this one was forked from may be older than the plan
        os.environ[PLAN] = place.plan
    die_with_parent()  # the clean process that it was forked from, which dies with the launcher
    _watch_the_others()
    try:
        return work_here(entry, args, place)
    except BaseException as error:
        leave_a_note(error)
        leave(exit_code(error))


def work_here(entry: Entry, args: tuple[Any, ...], place: Assignment = ANYWHERE) -> int:
    """Be one rank in this very process, as torchrun wants it.

    Args:
        entry: called as `entry(worker, *args)`; its result is returned.
        args: for `entry`.
        place: where it finds itself; under torchrun the environment says more.
    """
    stop = StopSignal()
    stop.listen()
    rank = int(os.environ.get("RANK", "0"))
    heart = Heartbeat(Path(place.beats), rank) if place.beats else _guarded(rank)
    worker = replace(_join(stop, place.attempt), heart=heart)
    load_from_environment(worker.rank, worker.attempt)
    code = entry(worker, *args)
    _wait_for_all(worker)
    heart.phase(LEFT)
    dist.destroy_process_group()
    return code


def _guarded(rank: int) -> Heartbeat:
    """Under torchrun ranks watch each other; where the environment says no folder, nobody does."""
    if parent_process() is not None or not os.environ.get("TORCHELASTIC_ERROR_FILE"):
        return Heartbeat()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    first = rank - int(os.environ.get("LOCAL_RANK", "0"))
    guard_each_other(_notes(), range(first, first + here), _shout)
    return Heartbeat(_notes(), rank)


def _shout(text: str) -> None:
    with suppress(OSError):
        os.write(sys.stderr.fileno(), f"{text}\n".encode())


def _wait_for_all(worker: Worker) -> None:
    """Return once every rank is done: one that leaves earlier cuts off whoever still sends."""
    store = _get_default_store()
    store.set(f"done {worker.rank}", "")
    store.wait([f"done {rank}" for rank in range(worker.ranks)], group_timeout() or TIMEOUT)


def init_process_group(
    local_ranks: int, timeout: timedelta = TIMEOUT, store: Store | None = None
) -> torch.device:
    """Join the other ranks: NCCL if this machine has a GPU for each of its ranks, else gloo.

    Args:
        local_ranks: of this machine.
        timeout: after which a collective that somebody never joined is an error.
        store: where they meet; None means where the environment says.

    Returns:
        The device of this rank.

    Raises:
        StartError: they cannot connect.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    alone = int(os.environ.get("WORLD_SIZE", "1")) == local_ranks
    if alone or os.environ.get("MASTER_ADDR", "").startswith("127."):
        _stay_on_loopback()
    if torch.cuda.device_count() < local_ranks:
        _connect("gloo", timeout, None, store)
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    _connect("cpu:gloo,cuda:nccl", timeout, device, store)
    return device


def _connect(
    backend: str, timeout: timedelta, device: torch.device | None, store: Store | None
) -> None:
    rank = int(os.environ.get("RANK", "0"))
    place: dict[str, Any] = {}
    if store is not None:
        place = {"store": store, "rank": rank, "world_size": int(os.environ["WORLD_SIZE"])}
    try:
        dist.init_process_group(backend, timeout=timeout, device_id=device, **place)
    except RuntimeError as error:
        raise StartError(f"rank {rank} cannot connect to the others: {error}") from error


def _join(stop: StopSignal, attempt: int) -> Worker:
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # a forked process has read OMP_NUM_THREADS already, before it knew its ranks: say it to torch
    torch.set_num_threads(num_threads(local_ranks))
    meeting = _meet()
    device = init_process_group(local_ranks, store=meeting.store if meeting else None)
    return Worker(
        rank=dist.get_rank(),
        ranks=dist.get_world_size(),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_ranks=local_ranks,
        device=device,
        stop=stop,
        attempt=meeting.attempt if meeting else attempt,
        job=meeting.job if meeting else None,
    )


def _meet() -> Meeting | None:
    """Under torchrun, which may start ranks again: agree on which start this is."""
    if parent_process() is not None:  # our own launcher has a new store for every start
        return None
    store = agent_store(TIMEOUT)
    if store is None:
        return None
    return meet(store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), TIMEOUT)


def _stay_on_loopback() -> None:
    """Keep gloo off the network when all ranks are on this machine, unless told otherwise."""
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _watch_the_others() -> None:
    """End this process when its launcher dies, or when another rank has failed.

    A rank that waits in a collective for a dead one may never return: NCCL does not notice. And a
    launcher that is killed can tell nobody.
    """
    launcher = parent_process()
    if launcher is not None:
        watch = threading.Thread(target=_watch, args=(launcher.sentinel,), daemon=True)
        watch.start()


def _watch(launcher: int) -> None:
    note = _notes() / FIRST_FAILURE
    while not note.exists():
        if connection.wait([launcher], timeout=0.5):
            os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(PEER_GRACE_SECONDS)
    leave(1)


def _notes() -> Path:
    """Where the ranks of one launch leave word: torchelastic gives each a file one level below."""
    return Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent.parent


def leave_a_note(error: BaseException) -> bool:
    """Write why this rank failed, where its launcher or torchrun looks for it.

    A crash, or the loss of another rank, waits a moment before it speaks: it may only be the echo
    of a failure elsewhere.

    Returns:
        Whether this was the first rank of this machine to fail; only that one need be shown.
    """
    message, kind = describe(error), type(error).__name__
    if message is None:
        message, kind = traceback.format_exc(), "crash"
    if kind == "crash" or isinstance(error, StartError | RankLeftError):
        time.sleep(ECHO_SECONDS)
    if not os.environ.get("TORCHELASTIC_ERROR_FILE"):
        return True
    rank = os.environ.get("RANK", "0")
    note = {"rank": int(rank), "kind": kind, "message": message, "exit_code": exit_code(error)}
    draft = _notes() / f"failure-{rank}.json"
    try:
        _tell_torchelastic(message)
        draft.write_text(json.dumps(note), encoding="utf-8")
        os.link(draft, _notes() / FIRST_FAILURE)
    except OSError:  # another was first, or there is no room even for this
        return False
    return True


def describe(error: BaseException) -> str | None:
    """An error that a user can mend, as one line; None for a mistake of ours, which is a crash.

    Besides our own errors these are refusals of the system: no such file, no permission, no room
    on the disk or in memory.
    """
    if isinstance(error, PhalanxError):
        return str(error)
    if short_of_memory := ran_out(error):
        return short_of_memory
    if not isinstance(error, OSError) or error.strerror is None:
        return None
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return error.strerror if error.errno in (errno.ENOSPC, errno.EDQUOT) else None


def exit_code(error: BaseException) -> int:
    """The exit code that says what kind of error it was."""
    return error.exit_code if isinstance(error, PhalanxError) else 1


def _tell_torchelastic(message: str) -> None:
    """Fill the file from which torchrun takes the text of its table of failures."""
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    report = {"message": {"message": message, "extraInfo": extra}}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(report), encoding="utf-8")


def leave(code: int) -> NoReturn:
    """End this process at once: other ranks are gone, and waiting for them would never end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
