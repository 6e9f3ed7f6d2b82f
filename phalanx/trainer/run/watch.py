"""Notices that nothing moves any more, and says which rank is to blame and who waits for it.

A run moves as long as any rank beats. Once none has for longer than each of them said it might
take, some rank is stopped, asleep, in a loop, or waits for what nobody sends: ranks that wait for
a message wait for those that do not. Time that the watcher itself was not there to see (a machine
that slept, a job that was suspended) is not counted.
"""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from phalanx.trainer.run.heartbeat import (
    LEAST_SECONDS,
    LEFT,
    STACK_SIGNAL,
    Pulse,
    read_pulse,
    stack_name,
)
from phalanx.trainer.run.restart import WorkerCrashError

START_SECONDS = 120.0  # in which no rank that starts computes a thing: nothing is that slow
IDLE_SHARE = 0.02  # of a core, that threads take which only look now and then
MOST_GAP = 1.0  # seconds between two looks; more means that nobody looked
STACK_SECONDS = 0.5  # for ranks to write their stacks
GUARD_SECONDS = 0.5
DEAD_SECONDS = 5.0  # for the others to end by themselves, once a rank has died
FRAMES = 8

_STATES = {
    "T": "is stopped",
    "R": "runs and does not get on",
    "S": "is asleep",
    "D": "waits for the disk",
}


class HangError(WorkerCrashError):
    """A rank did nothing any more. The first line names it; its Python stack follows.

    Attributes:
        stalled: seconds without a beat of any rank.
        pid: of its process.
        waits: it waits for a message, so that another machine may be to blame.
    """

    stalled = 0.0
    pid = 0
    waits = False


class Watch:
    """Looks at the beats of the ranks of one launch, over and over."""

    def __init__(self, folder: Path, ranks: Sequence[int], *, alone: bool = True) -> None:
        """Look at nothing yet.

        Args:
            folder: where they write their beats.
            ranks: which there are on this machine.
            alone: there are no others; else these may wait for another machine to start.
        """
        self._alone = alone
        self._idle = self._spent = 0.0
        self._folder, self._ranks = folder, ranks
        self._looked = time.monotonic()
        self._beats = self._stalled = self._dead = 0.0

    def look(self) -> HangError | None:
        """Who hangs, once nothing has moved for too long; nobody as long as something does."""
        now = time.monotonic()
        gap, self._looked = min(now - self._looked, MOST_GAP), now
        pulses = self._pulses()
        beats = sum(pulse.beats for pulse in pulses)
        self._stalled = 0.0 if beats != self._beats else self._stalled + gap
        self._beats = beats
        if len(pulses) < len(self._ranks) or self._stalled <= LEAST_SECONDS:
            return None
        states = [state(pulse.pid) for pulse in pulses]
        if "t" in states or "" in states:  # a debugger looks; or one has died, and that is told
            return None
        overdue = self._stalled > max(pulse.limit for pulse in pulses)
        if not overdue and "T" not in states and not self._starts_idle(pulses, states, gap):
            return None
        return blame(pulses, self._stalled, self._folder)

    def _starts_idle(self, pulses: Sequence[Pulse], states: Sequence[str], gap: float) -> bool:
        """Whether ranks that start, which may take long, have done nothing for too long."""
        spent = sum(cpu_seconds(pulse.pid) for pulse in pulses)
        starting = self._alone and all(pulse.phase == "start" for pulse in pulses)
        busy = spent - self._spent > 0.1 + IDLE_SHARE * self._idle or set(states) & {"R", "D", "?"}
        if busy or not starting:
            self._idle, self._spent = 0.0, spent
            return False
        self._idle += gap
        return self._idle > START_SECONDS

    def lingering(self) -> bool:
        """Whether a rank has died some time ago, and others are still there."""
        gone = [pulse for pulse in self._pulses() if pulse.phase != LEFT and not state(pulse.pid)]
        now = time.monotonic()
        self._dead = (self._dead or now) if gone else 0.0
        return bool(gone) and now - self._dead > DEAD_SECONDS

    def _pulses(self) -> list[Pulse]:
        found = (read_pulse(self._folder, rank) for rank in self._ranks)
        return [pulse for pulse in found if pulse is not None]


def guard_each_other(folder: Path, ranks: Sequence[int], say: Callable[[str], None]) -> None:
    """Let ranks that somebody else started watch each other, from a thread in each.

    One that hangs is ended, so that its launcher starts all of them again. Where every rank of
    this machine waits for a message, another machine has to find out why.

    Args:
        folder: where the ranks of this machine write their beats.
        ranks: which they are.
        say: is told who hangs, by the first rank that finds out.
    """
    watch = Watch(folder, ranks, alone=len(ranks) == int(os.environ.get("WORLD_SIZE", "1")))

    def look() -> None:
        while True:
            time.sleep(GUARD_SECONDS)
            found = watch.look()
            if found is None or found.waits:
                continue
            with suppress(FileExistsError):
                (folder / "hang").touch(exist_ok=False)
                say(str(found))
            with suppress(ProcessLookupError):
                os.kill(found.pid, signal.SIGKILL)

    threading.Thread(target=look, name="guard", daemon=True).start()


def blame(pulses: Sequence[Pulse], stalled: float, folder: Path) -> HangError:
    """Name the rank that the others wait for, with what every rank is doing.

    Args:
        pulses: of all ranks.
        stalled: seconds without a beat.
        folder: of the launch.
    """
    culprit = _culprit(pulses)
    stack = _stack(culprit, folder)
    here = f" in {stack[0]}" if stack else ""
    waiting = [f"rank {p.rank} waits for {p.message}" for p in pulses if p.message and p != culprit]
    line = "; ".join([f"{_describe(culprit)}{here} for {stalled:.1f} s", *waiting[:8]])
    error = HangError("\n".join([line, *stack]), culprit.rank)
    error.stalled, error.pid = stalled, culprit.pid
    error.waits = bool(culprit.message) and state(culprit.pid) != "T"
    return error


def state(pid: int) -> str:
    """How the system sees a process, as ps(1) writes it; empty where it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        found = stat.rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "" if Path("/proc/self").exists() else "?"
    except (OSError, IndexError):
        return ""
    return "" if found in "ZX" else found


def cpu_seconds(pid: int) -> float:
    """What a process and those that it has waited for have computed; 0 where nobody can say."""
    with suppress(OSError, IndexError, ValueError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        times = stat.rsplit(")", 1)[1].split()[11:15]
        return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _culprit(pulses: Sequence[Pulse]) -> Pulse:
    """Who is stopped; else who waits for no message; else who waits for another than most do."""
    stopped = [p for p in pulses if state(p.pid) == "T"]
    busy = [p for p in pulses if not p.message and p.phase != LEFT]
    if stopped or busy:
        return (stopped or busy)[0]
    common = Counter(p.message for p in pulses)
    return min(pulses, key=lambda p: (common[p.message], -p.step, -p.time))


def _describe(pulse: Pulse) -> str:
    seen = state(pulse.pid)
    how = _STATES.get(seen, "does not get on")
    if pulse.message and seen != "T":
        how = f"waits for {pulse.message}, which nobody sends"
    where = f"step {pulse.step}" if pulse.step >= 0 else "the start"
    phase = "" if pulse.phase in ("start", "train") else f", {pulse.phase}"
    action = f", {pulse.doing}" if pulse.doing else ""
    return f"rank {pulse.rank} {how} ({where}{phase}{action})"


def _stack(pulse: Pulse, folder: Path) -> list[str]:
    """The innermost frames of a rank, the last call first; none of one that is stopped."""
    if state(pulse.pid) in ("T", "") or not (folder / stack_name(pulse.rank)).exists():
        return []
    with suppress(OSError):
        os.kill(pulse.pid, STACK_SIGNAL)
        time.sleep(STACK_SECONDS)
        text = (folder / stack_name(pulse.rank)).read_text(encoding="utf-8", errors="replace")
        frames = [line.strip() for line in text.splitlines() if line.startswith("  File")]
        return [_short(frame) for frame in frames[:FRAMES]]
    return []


def _short(frame: str) -> str:
    """`File "/long/path/phalanx/a/b.py", line 3 in f` as `f (phalanx/a/b.py:3)`."""
    path, _, rest = frame.removeprefix('File "').partition('", line ')
    line, _, name = rest.partition(" in ")
    kept = path.rpartition("/phalanx/")
    return f"{name} ({'phalanx/' + kept[2] if kept[1] else Path(path).name}:{line})"
