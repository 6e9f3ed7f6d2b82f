"""Carries out a plan of faults in this process.

The one place of the package that keeps state for a whole process: whatever goes wrong goes wrong
for the process, wherever in the code it happens to be.
"""

import ctypes
import errno
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from multiprocessing import parent_process
from pathlib import Path

import torch
from torch import Tensor

from phalanx.trainer.faults.plan import OBEYED, Fault, FaultPlan

HAPPENED = "happened.jsonl"  # in the folder of hits: every fault that came, and when
PLAN = "PHALANX_FAULT_PLAN"  # the path of a plan; set by the drill and by tests, for their children

Tensors = Callable[[], Mapping[str, Tensor]]


class Injector:
    """Makes the faults of one plan happen on one rank, in one attempt."""

    def __init__(self, plan: FaultPlan, rank: int, attempt: int) -> None:
        """Choose the faults that concern this process.

        Args:
            plan: of all ranks and attempts.
            rank: of this process.
            attempt: which start of the run this is, from 0.
        """
        self._faults = [
            fault
            for fault in plan.faults
            if fault.rank in (None, rank) and fault.attempt in (None, attempt)
        ]
        self._done: Counter[int] = Counter()
        self._passed: Counter[int] = Counter()
        self._who = {"rank": rank, "attempt": attempt}
        self._step = -1
        self._seen: set[str] = set()
        self._hits = Path(plan.hits, f"rank-{rank}-attempt-{attempt}") if plan.hits else None

    def at(self, name: str, step: int, purpose: str, tensors: Tensors | None) -> str:
        """Do what the plan says of this point; see `point`.

        Args:
            name: one of `POINTS`.
            step: which one, from 0; -1 means that of the last point that said one.
            purpose: of a message; else empty.
            tensors: gives those that a fault may change, by name; None where there are none.

        Returns:
            Empty, or what the caller has to do: `skip`, `double` or `short`.

        Raises:
            RuntimeError: the plan has an `exception` here.
            OSError: it has an `error` here.
        """
        if step >= 0:
            self._step = step
        self._note(name)
        for i, fault in enumerate(self._faults):
            if (
                fault.point == name
                and fault.step in (None, self._step)
                and fault.purpose in ("", purpose)
            ):
                self._passed[i] += 1
                if self._passed[i] <= fault.after or self._done[i] == fault.times:
                    continue
                self._done[i] += 1
                self._tell(fault)
                if fault.action in OBEYED:
                    return fault.action
                _carry_out(fault, tensors)
        return ""

    def _tell(self, fault: Fault) -> None:
        """Before it happens: afterwards this process may tell nothing any more."""
        if self._hits is not None:
            later = float(fault.value) if fault.action == "kill later" else 0.0
            event = {"time": time.time() + later, "point": fault.point, "action": fault.action}
            event |= self._who
            with (self._hits.parent / HAPPENED).open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")

    def _note(self, name: str) -> None:
        if self._hits is not None and name not in self._seen:
            self._seen.add(name)
            with self._hits.open("a", encoding="utf-8") as file:
                file.write(f"{name}\n")


_loaded: list[Injector] = []


def point(name: str, *, step: int = -1, purpose: str = "", tensors: Tensors | None = None) -> str:
    """A place where something may go wrong; nothing does, unless a plan is loaded.

    Args:
        name: one of `POINTS`.
        step: which one, from 0; -1 means that of the last point that said one.
        purpose: of a message.
        tensors: gives the tensors here by name, in which a bit can be flipped.

    Returns:
        Empty, or what the caller has to do: `skip`, `double` or `short`.
    """
    if _loaded:
        return _loaded[0].at(name, step, purpose, tensors)
    return ""


def load(plan: FaultPlan, rank: int, attempt: int) -> None:
    """Let a plan take effect in this process, in the place of any before it.

    Args:
        plan: of all ranks and attempts.
        rank: of this process.
        attempt: which start of the run this is, from 0.
    """
    unload()
    _loaded.append(Injector(plan, rank, attempt))


def load_from_environment(rank: int, attempt: int) -> None:
    """Load the plan that a drill or a test wrote for the run that this process belongs to.

    `PLAN` holds its path; without it nothing is loaded.

    Args:
        rank: of this process.
        attempt: which start of the run this is, from 0.

    Raises:
        UsageError: it is no plan.
        OSError: it cannot be read.
    """
    path = os.environ.get(PLAN)
    if path:
        load(FaultPlan.from_json(Path(path).read_text(encoding="utf-8")), rank, attempt)


def unload() -> None:
    """Let nothing go wrong any more."""
    _loaded.clear()


def _carry_out(fault: Fault, tensors: Tensors | None) -> None:
    match fault.action:
        case "signal":
            os.kill(os.getpid(), signal.Signals[str(fault.value)])
        case "launcher":
            os.kill(_launcher(), signal.Signals[str(fault.value)])
        case "kill later":
            threading.Timer(float(fault.value), os.kill, (os.getpid(), signal.SIGKILL)).start()
        case "exception":
            raise RuntimeError(f"a fault was injected at {fault.point}")
        case "sleep":
            time.sleep(float(fault.value))
        case "loop":
            _loop(float(fault.value))
        case "gil":
            _hold_the_gil(float(fault.value))
        case "exit":
            sys.stdout.flush()
            os._exit(int(fault.value))
        case "error":
            number = getattr(errno, str(fault.value))
            raise OSError(number, os.strerror(number))
        case "flip" | "set":
            _change(fault, tensors() if tensors is not None else {})


def _launcher() -> int:
    """Whoever started the ranks: ours forks them from another process, others do not."""
    started_by = parent_process()
    return os.getppid() if started_by is None or started_by.pid is None else started_by.pid


def _loop(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def _hold_the_gil(seconds: float) -> None:
    """PyDLL calls keep the interpreter's lock, unlike those of CDLL; signals cut them short."""
    usleep, end = ctypes.PyDLL(None).usleep, time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        usleep(ctypes.c_uint(int(left * 1e6)))


def _change(fault: Fault, tensors: Mapping[str, Tensor]) -> None:
    """Change one element in place; this rank may hold no part of that tensor, and then nothing."""
    for name, tensor in tensors.items():
        if fault.tensor in name and tensor.numel():
            element = tensor.detach().view(-1)[fault.element % tensor.numel()]
            if fault.action == "set":
                element.fill_(float(fault.value))
                return
            raw = element.view(1).view(torch.uint8)
            byte, bit = divmod(fault.bit, 8)
            raw[byte % len(raw)] ^= 1 << bit
            return
