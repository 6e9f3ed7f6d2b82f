"""Rank processes that are started once and run many small jobs, since importing torch is slow."""

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from phalanx.core.errors import PhalanxError, RankLeftError, StartError
from phalanx.data.processes import leaving_main_alone
from phalanx.trainer.run.launch import PRELOAD
from phalanx.trainer.run.sockets import keep_socket_paths_short

Job = Callable[..., Any]

# What every rank needs, imported once in the process that all are forked from. The first
# optimizer step imports the last one, which takes seconds.
PRELOADED = ("phalanx.oracle.verify", "phalanx.oracle.job", "torch._dynamo")


_ATTEMPTS = 3  # to connect; a busy machine may cut a connection
_ECHO_SECONDS = 2.0  # in which a rank that left its neighbour says why


class RankFailedError(PhalanxError):
    """A rank raised something that is not for the user; the text carries its traceback."""


class RankPool:
    """Up to `size` processes on this machine, joined by gloo for each job anew.

    A job is a module-level function; it is called on every rank with the same arguments, and
    finds an initialised process group.
    """

    def __init__(self, size: int, on_event: Callable[[str], None] = lambda _: None) -> None:
        """Make room for ranks; the first job starts them.

        Args:
            size: how many there may be.
            on_event: is told in a line when a job is run again on fresh ranks.
        """
        self.size, self.on_event = size, on_event
        keep_socket_paths_short()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOAD, __name__, *PRELOADED])
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._scratch = tempfile.TemporaryDirectory(prefix="phalanx-ranks-")
        self._jobs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop all processes."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
            process.close()
        self._workers.clear()
        self._scratch.cleanup()

    def start(self, ranks: int) -> None:
        """Start processes now, so that the first job need not wait for them."""
        self.run(ranks, _nothing)

    def run(self, ranks: int, job: Job, *arguments: Any) -> list[Any]:
        """Run `job(*arguments)` on ranks 0 to `ranks` - 1, and return what each returns, by rank.

        Ranks that lose their connections, with none of them to blame, are replaced by fresh ones,
        which do the whole job again.

        Args:
            ranks: how many, at most as many as the pool has.
            job: a function of a module; what it takes and returns can be pickled.
            arguments: the same for every rank.

        Raises:
            PhalanxError: as the job raised it on the first rank that failed.
            RankFailedError: a rank raised anything else, or died.
            StartError, RankLeftError: the connections were lost in the last attempt as well.
            ValueError: more ranks than the pool has.
        """
        if ranks > self.size:
            raise ValueError(f"{ranks} ranks wanted of a pool of {self.size}")
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._run(ranks, job, arguments)
            except (StartError, RankLeftError) as error:
                if attempt == _ATTEMPTS:
                    raise
                reason = str(error).splitlines()[0]
                self.on_event(f"{ranks} ranks lost their connections, once more: {reason}")
        raise AssertionError("the last attempt returns or raises")

    def _run(self, ranks: int, job: Job, arguments: tuple[Any, ...]) -> list[Any]:
        self._start(ranks)
        self._jobs += 1
        store = str(Path(self._scratch.name) / f"store-{self._jobs}")
        pipes = {self._workers[rank][1]: rank for rank in range(ranks)}
        for pipe, rank in pipes.items():
            with suppress(OSError):  # it died; that shows when it is listened to
                pipe.send((job, arguments, rank, ranks, store))
        results: dict[int, Any] = {}
        while len(results) < ranks:
            for ready in wait([p for p, rank in pipes.items() if rank not in results]):
                rank = pipes[ready]  # type: ignore[index]  # wait returns what it was given
                results[rank], error = self._receive(rank)
                if error is not None:
                    others = [other for other in range(ranks) if other not in results]
                    cause = self._cause(error, others)
                    self._abandon()
                    raise cause
        return [results[rank] for rank in range(ranks)]

    def _start(self, ranks: int) -> None:
        while len(self._workers) < ranks:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            with leaving_main_alone():
                process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _receive(self, rank: int) -> tuple[Any, PhalanxError | None]:
        try:
            result, error = self._workers[rank][1].recv()
        except (EOFError, OSError):
            return None, RankFailedError(f"rank {rank} died")
        return result, error

    def _cause(self, error: PhalanxError, others: list[int]) -> PhalanxError:
        """Of ranks that fail together, the error that is not a mere loss of another rank."""
        if not isinstance(error, StartError | RankLeftError):
            return error
        pipes = {self._workers[rank][1]: rank for rank in others}
        ends = time.monotonic() + _ECHO_SECONDS
        while pipes and (left := ends - time.monotonic()) > 0:
            for ready in wait(list(pipes), timeout=left):
                _, other = self._receive(pipes.pop(ready))  # type: ignore[call-overload]  # as above
                if other is not None and not isinstance(other, StartError | RankLeftError):
                    return other
        return error

    def _abandon(self) -> None:
        """Stop ranks that may wait for one that failed; the next job starts new ones."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers.clear()


def _nothing() -> None:
    """A job that only shows that its rank is there."""


def _yield_to_senders() -> None:
    """Let a rank that gets a message wait until the one that sent it has done its turn.

    There are more ranks than cores. Whoever is woken would interrupt the sender, which holds the
    lock of the connection, for which another thread of gloo then spins: half of all time went
    there. Threads that start later inherit it.
    """
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _serve(pipe: Connection) -> None:
    """Run jobs until the pipe closes; Ctrl-C in a terminal is for the process that started it."""
    from phalanx.oracle.job import run_job

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _yield_to_senders()
    gc.freeze()  # what is imported stays: collections after each job need not look at it again
    while True:
        try:
            job, arguments, rank, ranks, store = pipe.recv()
        except (EOFError, OSError):
            return
        reply: tuple[Any, PhalanxError | None]
        try:
            reply = run_job(job, arguments, rank, ranks, store), None
        except PhalanxError as error:
            reply = None, error
        except Exception:
            reply = None, RankFailedError(f"rank {rank}: {traceback.format_exc()}")
        with suppress(OSError):  # nobody may be left to hear it
            pipe.send(reply)
