"""Where the time of steps went, rank by rank, in `ranks.jsonl`: what a report adds up.

Each rank counts its own steps: seconds of every kind of span, seconds in which it stood still for
messages, by axis, seconds without a batch. A few times a run all ranks put theirs together, between
two steps, and rank 0 adds one line. Only what lies within steps is counted; what lies between them
is rank 0's, by name.
"""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from phalanx.core.message import Message
from phalanx.trainer.engine.engine import Engine
from phalanx.trainer.run.meter import Meter

WINDOW = 50  # steps, after which a line is written
LISTED = 64  # ranks of a line, at most: beyond, those that compute longest and shortest
_OBSERVED = 2  # the step of a session whose messages are listed: warm, and early
_OWN = ("step report",)  # messages of the meters, which no plan has

Totals = Mapping[str, float]


def totals(engine: Engine, meter: Meter) -> Totals:
    """Seconds of this rank so far, by kind; waits as `waiting for AXIS`.

    Args:
        engine: of this rank.
        meter: of its session.
    """
    waits = {f"waiting for {axis}": s for axis, s in engine.mesh.ledger.waited.items()}
    own = {"seconds": time.perf_counter(), "reading batches": meter.data_wait}
    return {**own, **engine.recorder.seconds, **waits}


@dataclass
class StepShares:
    """Counts the steps of one rank since the last line.

    Attributes:
        steps: how many.
        seconds: that they took, by kind.
        messages: of one step, listed once in a session.
    """

    steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    _begun: Totals = field(default_factory=dict)
    _sent: dict[Message, int] = field(default_factory=dict)
    _between: dict[str, float] = field(default_factory=dict)
    _seen: int = 0

    def begin(self, engine: Engine, meter: Meter) -> float:
        """Begin a step.

        Args:
            engine: of this rank.
            meter: of its session.

        Returns:
            The clock, as `time.perf_counter` gives it.
        """
        self._begun = totals(engine, meter)
        if self._seen == _OBSERVED:
            self._sent = _counts(engine)
        return self._begun["seconds"]

    def end(self, engine: Engine, meter: Meter, seconds: float) -> None:
        """End a step.

        Args:
            engine: of this rank.
            meter: of its session.
            seconds: that the meter says it took.
        """
        now = dict(totals(engine, meter)) | {"seconds": self._begun["seconds"] + seconds}
        for name, total in now.items():
            spent = total - self._begun.get(name, 0.0)
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
        if self._seen == _OBSERVED:
            sent = _counts(engine)
            new = ((m, times - self._sent.get(m, 0)) for m, times in sent.items())
            self.messages = [m._replace(times=n) for m, n in new if n and m.purpose not in _OWN]
        self._seen += 1
        self.steps += 1

    def is_due(self, step: int, *, ends: bool) -> bool:
        """Whether to write a line after this step.

        Args:
            step: of the session, from 0.
            ends: nothing comes after it for now.
        """
        return ends or self.steps >= WINDOW or step == 2 * _OBSERVED

    def write(self, path: Path | None, engine: Engine, meter: Meter, done: int) -> None:
        """Put the ranks together, and add a line; every rank calls it.

        A line that cannot be written is left out: a full disk must not end a run.

        Args:
            path: of `ranks.jsonl` on rank 0; None writes nothing.
            engine: of this rank.
            meter: of its session.
            done: steps in all.
        """
        world = engine.mesh.world.size
        everyone = [self.seconds] * world
        if world > 1:
            dist.all_gather_object(everyone, self.seconds)
        if path is not None:
            line = self._line(everyone, meter, done)
            with suppress(OSError):
                _append(path, json.dumps(line) + "\n")
        self.steps, self.seconds, self.messages = 0, {}, []
        self._between = {str(name): seconds for name, seconds in meter.between.items()}

    def _line(self, everyone: list[dict[str, float]], meter: Meter, done: int) -> dict[str, Any]:
        names = sorted({name for each in everyone for name in each})
        mean = {n: sum(each.get(n, 0.0) for each in everyone) / len(everyone) for n in names}
        between = {n: s - self._between.get(n, 0.0) for n, s in meter.between.items()}
        return {
            "first": done - self.steps + 1,
            "last": done,
            "time": time.time(),
            "seconds": everyone[0]["seconds"],
            "mean": mean,
            "between": between,
            "ranks": [{"rank": rank, **everyone[rank]} for rank in _listed(everyone)],
            "messages": [message._asdict() for message in self.messages],
        }


def _listed(everyone: list[dict[str, float]]) -> list[int]:
    if len(everyone) <= LISTED:
        return list(range(len(everyone)))
    by_work = sorted(range(len(everyone)), key=lambda rank: everyone[rank].get("compute", 0.0))
    return sorted(by_work[: LISTED // 2] + by_work[-LISTED // 2 :])


def _counts(engine: Engine) -> dict[Message, int]:
    return {m._replace(times=1): m.times for m in engine.mesh.ledger.messages()}


def _append(path: Path, line: str) -> None:
    """Add a line in one write, so that what reads meanwhile sees whole ones."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
