"""Watches over the ranks of one machine with torchelastic: starts them, passes signals on."""

import json
import logging
import os
import signal
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from phalanx.core import errors
from phalanx.core.errors import PhalanxError
from phalanx.trainer.faults.inject import PLAN
from phalanx.trainer.run.nodes import Team
from phalanx.trainer.run.restart import WorkerCrashError
from phalanx.trainer.run.signals import EndedError, Requests
from phalanx.trainer.run.watch import Watch
from phalanx.trainer.run.worker import FIRST_FAILURE, Assignment, Entry, work

POLL_SECONDS = 0.1
LOOPBACK = "127.0.0.1"


class Attempt(NamedTuple):
    """One start of all ranks.

    Attributes:
        entry: what each of them does.
        args: for `entry`; they must pickle.
        ranks: how many.
        number: which start of the run this is, from 0.
        grace: seconds that they have to save when they are asked to stop; 0 means no end.
        team: the launchers of all machines; None where there is one machine.
    """

    entry: Entry
    args: tuple[Any, ...]
    ranks: int
    number: int = 0
    grace: float = 0.0
    team: Team | None = None


def supervise(
    attempt: Attempt, requests: Requests, on_stop: Callable[[], None] | None = None
) -> int:
    """Start the ranks and stay until the last has ended; see `launch.launch`.

    Args:
        attempt: what to start.
        requests: to stop, which are passed on.
        on_stop: called once they have been.

    Returns:
        The largest exit code.

    Raises:
        EndedError: they were asked to stop, and ended before they had saved.
        PhalanxError: the one that a rank raised, with its exit code.
        WorkerCrashError: a rank failed in another way, or was killed.
    """
    with (
        tempfile.TemporaryDirectory(prefix="phalanx-", ignore_cleanup_errors=True) as notes,
        _without_logs("torch.distributed.elastic", "torch.multiprocessing"),
        ThreadPoolExecutor(max_workers=1) as pool,
    ):
        agent = _agent(attempt, notes)
        # Outside the main thread torchelastic leaves signals alone: its own way of handling them
        # kills workers that are still saving after 30 seconds.
        outcome = pool.submit(agent.run)
        watch = Watch(Path(notes), ranks_here(attempt))
        _wait(outcome, agent, _Stop(requests, attempt.grace, on_stop), _Watchers(watch, attempt))
        result = outcome.result()
        if result.is_failed():
            if requests.stop and _ended_unheard(result):
                raise EndedError("ended before the ranks could hear of it")
            raise _failure(result, Path(notes))
        return max(int(code or 0) for code in result.return_values.values())


def ranks_here(attempt: Attempt) -> range:
    """The ranks of this machine, as they are numbered among all."""
    first = attempt.team.node.number * attempt.ranks if attempt.team else 0
    return range(first, first + attempt.ranks)


class _Watchers(NamedTuple):
    """Who may say that the ranks of this machine have to be ended."""

    watch: Watch
    attempt: Attempt

    def look(self) -> PhalanxError | None:
        """Who hangs here, or that ranks of another machine are gone."""
        found, team = self.watch.look(), self.attempt.team
        if team is None:
            return found
        if found is not None and not found.waits:  # else another machine finds out why
            return found
        return team.failed_elsewhere()


class _Loopback(RendezvousHandler):
    """A meeting point for the ranks of this machine that no other machine can reach.

    Every meeting has a store of its own, so that after a restart nobody finds the addresses of
    the dead.
    """

    def __init__(self) -> None:
        self._run_id = uuid.uuid4().hex
        self._store: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server((LOOPBACK, 0), backlog=1024)
        port = listener.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _agent(attempt: Attempt, notes: str) -> LocalElasticAgent:
    place = Assignment(attempt.number, os.environ.get(PLAN, ""), notes)
    spec = WorkerSpec(
        role="phalanx",
        local_world_size=attempt.ranks,
        entrypoint=work,
        args=(attempt.entry, attempt.args, place),
        rdzv_handler=attempt.team.rendezvous() if attempt.team else _Loopback(),
        max_restarts=0,
        monitor_interval=POLL_SECONDS,
    )
    return LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=notes), start_method="forkserver")


class _Stop(NamedTuple):
    """How a request to stop is dealt with."""

    requests: Requests
    grace: float
    on_stop: Callable[[], None] | None

    @property
    def overdue(self) -> bool:
        """Whether the ranks have had their time to save."""
        late = time.monotonic() - self.requests.since > self.grace > 0
        return self.requests.hurried or (self.requests.stop and late)


def _wait(
    outcome: "Future[RunResult]", agent: LocalElasticAgent, stop: _Stop, watchers: _Watchers
) -> None:
    """Return when all ranks have ended, by themselves or for a reason.

    Raises:
        EndedError: they were asked to stop, and did not within their time.
        HangError: one of them did nothing any more.
        RankLeftError: ranks of another machine have ended.
    """
    passed_on = False
    ended: PhalanxError | None = None
    while not outcome.done():
        wait([outcome], timeout=POLL_SECONDS)
        if stop.requests.stop and not passed_on:
            passed_on = _send(agent, signal.SIGTERM)
            if passed_on and stop.on_stop is not None:
                stop.on_stop()
        if ended is None:
            late = EndedError("ended before the ranks could save") if stop.overdue else None
            ended = late or watchers.look()
        if ended is not None or watchers.watch.lingering():
            _send(agent, signal.SIGKILL)
    if ended is not None:
        raise ended


def _send(agent: LocalElasticAgent, number: signal.Signals) -> bool:
    """Signal every worker; False while they have not all been started."""
    workers = agent.get_worker_group().workers
    if not workers or any(worker.id is None for worker in workers):
        return False
    for worker in workers:
        try:
            os.kill(worker.id, number)
        except ProcessLookupError:
            continue
    return True


def _ended_unheard(result: RunResult) -> bool:
    """Whether the request to stop came before the ranks listened for it."""
    return any(failure.exitcode == -signal.SIGTERM for failure in result.failures.values())


def _failure(result: RunResult, notes: Path) -> PhalanxError:
    """Why the run failed: the first rank's own words, unless one was struck dumb by a signal."""
    rank, first = min(result.failures.items(), key=lambda item: item[1].timestamp)
    if first.exitcode < 0 and first.exitcode != -signal.SIGTERM:
        number = -first.exitcode
        return WorkerCrashError(_epitaph(rank, number), rank, signal.Signals(number).name)
    found = next(iter(sorted(notes.glob(f"*/*/{FIRST_FAILURE}"))), None)
    if found is None:
        return WorkerCrashError(f"rank {rank} ended with exit code {first.exitcode}", rank)
    note = json.loads(found.read_text(encoding="utf-8"))
    if note["kind"] == "crash":
        text = f"rank {note['rank']} crashed:\n{note['message'].rstrip()}"
        return WorkerCrashError(text, note["rank"])
    kind = getattr(errors, note["kind"], PhalanxError)
    error: PhalanxError = kind(note["message"])
    error.exit_code = note["exit_code"]
    return error


def _epitaph(rank: int, number: int) -> str:
    name = signal.Signals(number).name
    if number != signal.SIGKILL:
        return f"rank {rank} was ended by {name}"
    return (
        f"rank {rank} was ended by {name}, as the system does when memory runs out; "
        "a smaller layout.mb, recompute=full or a smaller model needs less"
    )


@contextmanager
def _without_logs(*names: str) -> Iterator[None]:
    """Keep a library's log off the screen: what it knows comes back in the result."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.propagate for logger in loggers]
    silence = logging.NullHandler()
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(silence)
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.propagate = propagate
            logger.removeHandler(silence)
