"""Lets ranks that torchrun starts again find each other, and not the addresses of the dead.

torchrun's agents keep one store for all starts of a job, and gloo looks for its peers under names
that are the same in every start: after a rank has died, the others would wait for the dead. So the
ranks of one start agree on its number first, and meet under names that begin with it.

The store keeps what the dead wrote, so a number that simply stands there says nothing. Each rank
calls under a name that nobody used before, and waits for the answer to that call; rank 0 looks
until every call that it sees has been answered and taken. It counts its own starts in the store,
whichever machine it is on.
"""

import os
import time
import uuid
from datetime import timedelta
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from phalanx.core.errors import StartError

PREFIX = "phalanx"
_FIRST_PAUSE, _LAST_PAUSE = 0.002, 0.1  # seconds between two looks


class Meeting(NamedTuple):
    """Where the ranks of one start meet.

    Attributes:
        store: theirs alone.
        attempt: which start of the job this is, from 0.
        job: a store that all starts of the job share.
    """

    store: Store
    attempt: int
    job: Store


def agent_store(timeout: timedelta) -> Store | None:
    """The store of the torchrun that started this process; None where there is none to share."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return TCPStore(address, port, is_master=False, timeout=timeout)
    except (RuntimeError, OSError) as error:
        rank = os.environ.get("RANK", "0")
        raise StartError(f"rank {rank} cannot reach {address}:{port}: {error}") from error


def restart_count() -> int:
    """How often torchrun's agent on this machine has started its ranks again."""
    text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(text) if text.isdecimal() else 0


def meet(job: Store, rank: int, ranks: int, timeout: timedelta) -> Meeting:
    """Agree with the other ranks of this start on its number.

    Args:
        job: the store that all starts share.
        rank: of this process.
        ranks: how many there are.
        timeout: to wait for the last of them.

    Raises:
        StartError: they did not all come.
    """
    shared = PrefixStore(PREFIX, job)
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        attempt = max(shared.add("starts", 1) - 1, restart_count())
        _answer(shared, attempt, range(1, ranks), deadline)
    else:
        attempt = _call(shared, rank, timeout)
    return Meeting(PrefixStore(f"{PREFIX}/start-{attempt}", job), attempt, shared)


def _call(shared: Store, rank: int, timeout: timedelta) -> int:
    call = uuid.uuid4().hex
    shared.set(f"call/{rank}", call)
    try:
        shared.wait([f"answer/{call}"], timeout)
    except RuntimeError as error:
        raise StartError(f"rank {rank} had no answer from rank 0: {error}") from error
    attempt = int(shared.get(f"answer/{call}"))
    shared.set(f"taken/{attempt}/{rank}", call)
    return attempt


def _answer(shared: Store, attempt: int, others: range, deadline: float) -> None:
    waiting, answered, pause = set(others), set[bytes](), _FIRST_PAUSE
    while waiting:
        for rank in sorted(waiting):
            if shared.check([f"taken/{attempt}/{rank}"]):
                waiting.discard(rank)
            elif shared.check([f"call/{rank}"]):
                call = shared.get(f"call/{rank}")
                if call not in answered:  # it may be that of a dead one; then a new one follows
                    shared.set(f"answer/{call.decode()}", str(attempt))
                    answered.add(call)
        if waiting and time.monotonic() > deadline:
            raise StartError(f"rank 0 waited in vain for ranks {sorted(waiting)[:8]}")
        if waiting:
            time.sleep(pause)
            pause = min(pause * 1.5, _LAST_PAUSE)
