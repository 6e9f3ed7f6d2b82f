"""Several machines under one run: a launcher on each, whose ranks start and end together.

Machine 0 keeps a store for as long as its launcher lives; the others are its clients.

| key | who writes it | what it says |
|---|---|---|
| `here` | all | how many launchers have come |
| `directory` | machine 0 | the folder of the run |
| `start/N` | machine 0 | where the ranks of start N meet: a store of their own |
| `failed/N`, `failed/N/M` | machine M | start N has failed there, and why |
| `again/N` | machine 0 | start N is followed by another |
| `over` | machine 0 | nothing follows, with which exit code, and why |

Machine 0 decides; the store has no password, so its port belongs within the cluster's own network.
"""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from phalanx.core import errors
from phalanx.core.errors import LostMessageError, PhalanxError, RankLeftError, StartError
from phalanx.trainer.run.restart import Restarter, WorkerCrashError
from phalanx.trainer.run.started import Node

PATIENCE = timedelta(minutes=10)  # for the last machine to come, or to say how it went
LINGER = 10.0  # seconds that machine 0 stays, so that the others hear how it ended
ECHO_SECONDS = 5.0  # for the machine whose rank failed first to say so
POLL = 0.1
ECHOES = (LostMessageError, RankLeftError, StartError)


class Team:
    """The launchers of a run, as one of them sees it.

    Attributes:
        node: which machine this is.
        start: the number of the present start of all ranks, from 0; -1 before the first.
    """

    def __init__(self, node: Node, store: TCPStore) -> None:
        """Join; `Team.opened` makes the store.

        Args:
            node: which machine this is.
            store: of machine 0.
        """
        self.node, self.start = node, -1
        self._store = store
        self._ranks: TCPStore | None = None  # the store of the present start

    @classmethod
    @contextmanager
    def opened(cls, node: Node) -> Iterator["Team"]:
        """Meet the other launchers; all of them are there once this returns.

        Args:
            node: which machine this is.

        Raises:
            StartError: they did not all come, or machine 0 cannot be reached.
        """
        team = cls(node, _store(node))
        team._await_all("here", "at all")
        code, why = 1, "machine 0 has failed"
        try:
            yield team
            code, why = 0, ""
        except PhalanxError as error:
            code, why = error.exit_code, str(error)
            raise
        finally:
            team._leave(code, why)

    def share(self, directory: Path | None) -> Path:
        """The folder of the run, which machine 0 has opened.

        Args:
            directory: on machine 0; None on the others, which wait for it.

        Raises:
            PhalanxError: machine 0 has ended instead, or the folder is not here.
        """
        if directory is not None:
            self._store.set("directory", str(directory.absolute()))
            return directory
        self._await("directory")
        path = Path(self._store.get("directory").decode())
        if not path.is_dir():
            raise PhalanxError(
                f"{path} of machine 0 is not on machine {self.node.number}; give --runs-dir a "
                "folder that all machines share"
            )
        return path

    def rendezvous(self) -> RendezvousHandler:
        """Where the ranks of the next start meet."""
        self.start += 1
        return _Meeting(self)

    def ranks_store(self) -> RendezvousInfo:
        """A store for the ranks of this start: machine 0 makes it, the others find it."""
        node, key = self.node, f"start/{self.start}"
        if node.number == 0:
            self._ranks, port = _serve(node.address, 0)
            self._store.set(key, str(port))
        else:
            self._await(key)
            port = int(self._store.get(key))
            self._ranks = TCPStore(node.address, port, is_master=False, timeout=PATIENCE)
        self._await_all(f"came/{self.start}", f"for start {self.start} of their ranks")
        meeting = RendezvousStoreInfo(node.address, port)
        return RendezvousInfo(self._ranks, node.number, node.total, meeting)

    def failed_elsewhere(self) -> PhalanxError | None:
        """What another machine says has ended this start; None while nobody says so."""
        try:
            told = self._store.check([f"failed/{self.start}"]) or self._over()
        except RuntimeError:
            return RankLeftError("machine 0 of this run is gone")
        return RankLeftError("another machine of this run has failed") if told else None

    def failed(self, error: PhalanxError) -> PhalanxError:
        """Tell the others that this start has failed here.

        Args:
            error: how.

        Returns:
            The same; on machine 0 the error of the machine that failed first, where this one is
            only its echo.
        """
        told = {
            "kind": type(error).__name__,
            "message": str(error),
            "exit_code": error.exit_code,
            "rank": getattr(error, "rank", None),
            "signal": getattr(error, "signal", ""),
        }
        with suppress(RuntimeError):
            self._store.set(f"failed/{self.start}/{self.node.number}", json.dumps(told))
            self._store.set(f"failed/{self.start}", "1")
            if self.node.number == 0 and isinstance(error, ECHOES):
                return self._first_failure() or error
        return error

    def again(self) -> None:
        """Machine 0 lets all start their ranks again."""
        self._store.set(f"again/{self.start}", "1")

    def await_again(self) -> None:
        """Wait until machine 0 lets all start their ranks again.

        Raises:
            PhalanxError: it does not, with its exit code and its reason.
        """
        self._await(f"again/{self.start}")

    def _await_all(self, key: str, what: str) -> None:
        """Return once all launchers have come by here."""
        deadline = time.monotonic() + PATIENCE.total_seconds()
        self._store.add(key, 1)
        while (come := self._store.add(key, 0)) < self.node.total:
            ended = self.failed_elsewhere()
            if ended is not None:
                raise ended
            if time.monotonic() > deadline:
                minutes = f"{PATIENCE.total_seconds() / 60:.0f} minutes"
                raise StartError(
                    f"{come} of {self.node.total} machines have come within {minutes} {what}"
                )
            time.sleep(POLL)

    def _await(self, key: str) -> None:
        deadline = time.monotonic() + PATIENCE.total_seconds()
        with _gone_is_told():
            while not self._store.check([key]):
                if self._over():
                    found = json.loads(self._store.get("over"))
                    why = f"machine 0: {found['why'] or 'ended'}"
                    raise _with_code(PhalanxError(why), found["code"])
                if time.monotonic() > deadline:
                    raise StartError(f"machine 0 did not say {key} within {PATIENCE}")
                time.sleep(POLL)

    def _over(self) -> bool:
        return bool(self._store.check(["over"]))

    def _first_failure(self) -> PhalanxError | None:
        deadline = time.monotonic() + ECHO_SECONDS
        while time.monotonic() < deadline:
            for number in range(1, self.node.total):
                key = f"failed/{self.start}/{number}"
                found = _error(self._store.get(key), number) if self._store.check([key]) else None
                if found is not None and not isinstance(found, ECHOES):
                    return found
            time.sleep(POLL)
        return None

    def _leave(self, code: int, why: str) -> None:
        """Say that one is done; machine 0 stays until the others have heard how it ended."""
        with suppress(RuntimeError):
            if code and self.start < 0:  # before anybody looks at how a start went
                self.start = 0
                self.failed(_with_code(PhalanxError(why), code))
            if self.node.number == 0:
                self._store.set("over", json.dumps({"code": code, "why": why}))
            self._store.add("left", 1)
            deadline = time.monotonic() + LINGER
            while self.node.number == 0 and time.monotonic() < deadline:
                if self._store.add("left", 0) >= self.node.total:
                    break
                time.sleep(POLL)


class Leader(Restarter):
    """Decides on machine 0, and lets the others know."""

    def __init__(self, team: Team, *args: Any) -> None:
        """Begin to count.

        Args:
            team: all launchers.
            args: of `Restarter`.
        """
        super().__init__(*args)
        self.team = self._team = team

    def again(self, error: PhalanxError) -> bool:
        """Whether to start all ranks again; see `Restarter`."""
        again = super().again(error)
        if again:
            self._team.again()
        return again


class Follower(Restarter):
    """Does what machine 0 decides."""

    def __init__(self, team: Team, *args: Any) -> None:
        """Wait for its word.

        Args:
            team: all launchers.
            args: of `Restarter`.
        """
        super().__init__(*args)
        self.team = self._team = team

    def again(self, error: PhalanxError) -> bool:
        """Whether to start the ranks of this machine again.

        Args:
            error: what ended them.

        Raises:
            PhalanxError: machine 0 does not; with its exit code.
        """
        self._team.await_again()
        self.count += 1
        return True

    def stopped(self, error: PhalanxError) -> None:
        """Machine 0 tells it."""


class _Meeting(RendezvousHandler):
    """Hands the store of one start to torchelastic."""

    def __init__(self, team: Team) -> None:
        self._team = team

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "phalanx"

    def next_rendezvous(self) -> RendezvousInfo:
        return self._team.ranks_store()

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """The launchers say so in the store."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return str(self._team.start)

    def shutdown(self) -> bool:
        return True


def _store(node: Node) -> TCPStore:
    """The store of all launchers, on machine 0.

    Raises:
        StartError: it cannot be made, or not be reached.
    """
    if node.number == 0:
        return _serve(node.address, node.port)[0]
    try:
        return TCPStore(node.address, node.port, is_master=False, timeout=PATIENCE)
    except (RuntimeError, OSError) as error:
        raise StartError(
            f"machine {node.number} cannot reach {node.address}:{node.port} of machine 0: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _serve(address: str, port: int) -> tuple[TCPStore, int]:
    """A store that listens on this address alone, and its port.

    Args:
        address: of this machine, as the others know it.
        port: 0 takes a free one.
    """
    try:
        listener = socket.create_server((address, port), backlog=1024)
        found = int(listener.getsockname()[1])
        store = TCPStore(
            address,
            found,
            is_master=True,
            wait_for_workers=False,
            timeout=PATIENCE,
            master_listen_fd=listener.detach(),
        )
    except (RuntimeError, OSError) as error:
        raise StartError(
            f"machine 0 cannot listen at {address}:{port}: {str(error).splitlines()[0]}; "
            "--rendezvous (MASTER_ADDR, MASTER_PORT) names an address of it and a free port"
        ) from error
    return store, found


@contextmanager
def _gone_is_told() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLeftError("machine 0 of this run is gone") from error


def _error(told: bytes, number: int) -> PhalanxError:
    """What another machine said has happened to it."""
    note = json.loads(told)
    text = f"machine {number}: {note['message']}"
    if note["kind"] in ("WorkerCrashError", "HangError"):
        return WorkerCrashError(text, note["rank"] or 0, note["signal"])
    kind = getattr(errors, note["kind"], PhalanxError)
    return _with_code(kind(text), note["exit_code"])


def _with_code(error: PhalanxError, code: int) -> PhalanxError:
    error.exit_code = code
    return error
