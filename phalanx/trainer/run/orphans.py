"""No rank trains on when whoever watches over it is gone."""

import ctypes
import os
import signal
import threading
import time

_PR_SET_PDEATHSIG = 1  # prctl(2)
_POLL_SECONDS = 0.5


def die_with_parent() -> None:
    """Have the system end this process, whatever it is doing, as soon as its parent is gone.

    On Linux the kernel does it, also to a process that is stopped or holds the interpreter's
    lock; elsewhere a thread looks. Call it from the main thread, early.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        return
    parent = os.getppid()
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
