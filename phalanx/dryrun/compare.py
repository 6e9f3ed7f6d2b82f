"""Holds what a rank did against the plan: its messages to the byte, its worst moment within 2 %."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from phalanx.core.layout import Coordinates
from phalanx.core.message import Message
from phalanx.core.run import Run
from phalanx.core.units import show_bytes
from phalanx.cost.memory import memory_of_ranks, ours
from phalanx.cost.messages import rank_messages
from phalanx.dryrun.rehearse import Rehearsal, rehearse
from phalanx.planner.simulate import peak_in_flight
from phalanx.schedules.build import build
from phalanx.schedules.layouts import chunks

WITHIN = 0.02  # of the bytes of the worst moment

Kind = tuple[tuple[Message, ...], float]  # what a rank sends, and its bytes


@dataclass(frozen=True)
class RankCase:
    """One rank, rehearsed and planned.

    Attributes:
        rank: which.
        at: its coordinates.
        rehearsed: what it did.
        planned_messages: what it should send.
        planned_peak_bytes: what it should hold at its worst moment.
    """

    rank: int
    at: Coordinates
    rehearsed: Rehearsal
    planned_messages: tuple[Message, ...]
    planned_peak_bytes: float

    @property
    def messages_equal(self) -> bool:
        """Whether it sent what it should, to the byte."""
        return self.rehearsed.messages == self.planned_messages

    @property
    def peak_error(self) -> float:
        """The plan over what was held, less 1."""
        return self.planned_peak_bytes / self.rehearsed.peak_bytes - 1

    @property
    def passed(self) -> bool:
        """Whether both agree."""
        return self.messages_equal and abs(self.peak_error) <= WITHIN

    @property
    def differences(self) -> tuple[str, ...]:
        """What does not agree, side by side, a line for each."""
        return tuple(self._differences())

    def _differences(self) -> Iterator[str]:
        sent, planned = Counter(self.rehearsed.messages), Counter(self.planned_messages)
        for count, verb in ((sent - planned, "sent"), (planned - sent, "planned")):
            for message in sorted(count):
                yield f"{verb}: {message.axis} {_line(message)}"
        if abs(self.peak_error) > WITHIN:
            held, plan = (
                show_bytes(size, binary=True)
                for size in (self.rehearsed.peak_bytes, self.planned_peak_bytes)
            )
            yield f"held: {held}; planned: {plan}, {self.peak_error:+.1%}"

    def to_dict(self) -> dict[str, Any]:
        """One case of the document."""
        return {
            "rank": self.rank,
            "coordinates": self.at._asdict(),
            "passed": self.passed,
            "seconds": self.rehearsed.seconds,
            "peak_bytes": self.rehearsed.peak_bytes,
            "planned_peak_bytes": self.planned_peak_bytes,
            "messages_equal": self.messages_equal,
            "messages": [message._asdict() for message in self.rehearsed.messages],
            "differences": list(self.differences),
        }


def _line(message: Message) -> str:
    return f"{message.collective} of {message.purpose}, {message.bytes:,} bytes x {message.times:,}"


@dataclass(frozen=True)
class Rehearsed:
    """A run whose ranks can be rehearsed, one at a time.

    Attributes:
        run: that can be trained; its precision resolved.
    """

    run: Run

    def case(self, rank: int) -> RankCase:
        """Rehearse one rank, and plan it.

        Args:
            rank: which.

        Raises:
            RefusedError: the layout asks for what cannot be rehearsed.
        """
        at = self.run.layout.coordinates(rank)
        done = rehearse(self.run, rank)
        return RankCase(rank, at, done, self._messages(at), self._peaks[at.pp])

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """One rank of every kind: of those that send and hold the same, the first.

        Ranks in the middle of tp, cp and dp do what those at one of the ends do.
        """
        layout, found = self.run.layout, dict[Kind, int]()
        for pp in range(layout.pp):
            ends = (sorted({0, degree - 1}) for degree in (layout.dp, layout.cp, layout.tp))
            dps, cps, tps = ends
            places = (Coordinates(dp, pp, cp, tp) for dp in dps for cp in cps for tp in tps)
            for at in places:
                kind = self._messages(at), self._peaks[pp]
                found.setdefault(kind, layout.rank_at(at))
        return tuple(sorted(found.values()))

    @cached_property
    def _peaks(self) -> tuple[float, ...]:
        """Planned bytes of every pipeline rank at its worst moment."""
        layout = self.run.layout
        rows = build(layout.schedule, layout.pp, self.run.micro_batches, chunks(layout))
        held = memory_of_ranks(self.run, peak_in_flight(rows), ours(self.run.recipe))
        return tuple(np.broadcast_to(held.allocated, (layout.pp,)).tolist())

    def _messages(self, at: Coordinates) -> tuple[Message, ...]:
        return tuple(rank_messages(self.run, at))
