"""Records what a rank did when, in the same form in which a plan says what it should do."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from phalanx.core.timeline import Category, Span
from phalanx.trainer.parallel.ledger import Passage


class Recorder:
    """Notes the spans of one rank.

    Attributes:
        seconds: total of each category since the last `clear`, kept even when spans are not; what
            a span stood still for messages is not in it, nor what spans inside it took.
        keeps_spans: whether each span is kept, for a timeline.
        doing: is told of every span that begins.
        arrived: is told that a message was waited for.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.keeps_spans = False
        self.seconds: dict[str, float] = {}
        self.spans: list[Span] = []
        self.doing: Callable[[str], None] = lambda _: None
        self.arrived: Callable[[], None] = lambda: None
        self._elsewhere = 0.0  # seconds so far that are not those of the span around them

    @contextmanager
    def span(self, label: str, category: Category) -> Iterator[None]:
        """Time what happens inside.

        Args:
            label: what a timeline shows.
            category: whose `seconds` it adds to.
        """
        self.doing(label)
        start, elsewhere = time.perf_counter(), self._elsewhere
        try:
            yield
        finally:
            end = time.perf_counter()
            busy = end - start - (self._elsewhere - elsewhere)
            self._elsewhere = elsewhere + end - start
            self.seconds[category] = self.seconds.get(category, 0.0) + busy
            if self.keeps_spans:
                self.spans.append(Span(self.rank, label, category, start, end))

    def message(self, passage: Passage) -> None:
        """Keep a message: how long it was under way, and how long the rank stood still for it."""
        self.arrived()
        axis, purpose, issued, wanted, done, _ = passage
        self._elsewhere += done - wanted
        if self.keeps_spans:
            self.spans.append(Span(self.rank, purpose, "communicate", issued, done, axis))
            self.spans.append(Span(self.rank, purpose, "wait", wanted, done, axis))

    def collect(self, *, all_of_it: bool = False) -> None:
        """Read what is only known later: nothing, where the host waits for what it times.

        Args:
            all_of_it: wait for it.
        """

    def clear(self) -> None:
        """Forget spans and totals."""
        self.seconds.clear()
        self.spans.clear()
