"""What one rank sent, message by message, and how long it stood still for it."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from phalanx.core.message import Axis, Collective, Message


class Passage(NamedTuple):
    """One message in time: seconds on this rank's clock.

    Attributes:
        axis, purpose: of the message.
        issued: when it was started.
        wanted: when this rank began to stand still for it.
        done: when it was complete, or found to be.
        marks: the same three moments of the device's stream, which its host does not wait for.
    """

    axis: Axis
    purpose: str
    issued: float
    wanted: float
    done: float
    marks: tuple[Any, Any, Any] | None = None


class Ledger:
    """Counts what one rank sent since the last `clear`, and how long it waited for it.

    Attributes:
        waited: seconds in which this rank stood still for messages, by axis.
        issuing: seconds that it took to hand messages over.
        watch: is told of every message that was waited for.
        waits: is told the axis and purpose of every message that is about to be waited for.
        mark: gives a moment of the device's stream; None where the host itself waits. Then
            `waited` counts what a recorder has read of these.
    """

    def __init__(self) -> None:
        self._counts: Counter[Message] = Counter()
        self.waited: dict[str, float] = {}
        self.issuing = 0.0
        self._waited_before: dict[str, float] = {}
        self.watch: Callable[[Passage], None] = lambda _: None
        self.waits: Callable[[Axis, str], None] = lambda *_: None
        self.mark: Callable[[], Any] | None = None

    def note(self, axis: Axis, collective: Collective, purpose: str, size: int) -> None:
        """Count one message.

        Args:
            axis: along which it goes.
            collective: or "send".
            purpose: what for, as the cost twins call it.
            size: bytes of the full vector; of the message for a send.
        """
        self._counts[Message(axis, collective, purpose, size)] += 1

    def note_wait(self, passage: Passage) -> None:
        """Count time in which the rank could only wait."""
        if passage.marks is None:
            seconds = passage.done - passage.wanted
            self.waited[passage.axis] = self.waited.get(passage.axis, 0.0) + seconds
        self.watch(passage)

    def lap(self) -> dict[str, float]:
        """Seconds of waiting since the last lap, by axis."""
        before, self._waited_before = self._waited_before, dict(self.waited)
        return {axis: total - before.get(axis, 0.0) for axis, total in self.waited.items()}

    def clear(self) -> None:
        """Forget everything."""
        self._counts.clear()
        self.waited.clear()
        self._waited_before.clear()

    def messages(self) -> list[Message]:
        """What was sent, equal messages added up, in a stable order."""
        return sorted(t._replace(times=n) for t, n in self._counts.items())
