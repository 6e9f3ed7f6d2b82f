"""The next batches, made in the background while the model works on this one."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Self

from phalanx.data.batches import Batch, Stream

PATIENCE = 0.1  # seconds between two questions whether to wait on


class Prefetcher:
    """Iterate over (step, batch), at most `depth` batches ahead.

    Close it, or use it in a `with`: then no thread is left behind. What goes wrong in the
    background is raised at the step that it concerns.

    Attributes:
        seconds_waited: how long the latest batch kept its caller waiting.
    """

    def __init__(
        self,
        stream: Stream,
        positions: Sequence[int],
        first_step: int,
        last_step: int,
        depth: int = 2,
    ) -> None:
        """Start making the first batches.

        Args:
            stream: makes the batches.
            positions: which places of each global batch are wanted.
            first_step: the first step to make.
            last_step: the step to stop before.
            depth: how many batches may wait for the caller; at least 1.
        """
        assert depth >= 1, depth
        self.seconds_waited = 0.0
        self._stream = stream
        self._positions = tuple(positions)
        self._steps = iter(range(first_step, last_step))
        self._pending: deque[tuple[int, Future[Batch]]] = deque()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        for _ in range(depth):
            self._submit()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, Batch]:
        if not self._pending:
            self.close()
            raise StopIteration
        step, future = self._pending.popleft()
        asked = time.perf_counter()
        try:
            batch = future.result()
        except BaseException:
            self.close()
            raise
        self.seconds_waited = time.perf_counter() - asked
        self._submit()
        return step, batch

    def await_next(self, give_up: Callable[[], bool]) -> float:
        """Wait until the next batch is here, so that asking for it takes no time.

        What goes wrong with it is raised when it is asked for.

        Args:
            give_up: asked every now and then; once it is true, nobody waits any longer.

        Returns:
            Seconds waited.
        """
        asked = time.perf_counter()
        while self._pending and not give_up():
            done, _ = wait([self._pending[0][1]], timeout=PATIENCE)
            if done:
                break
        return time.perf_counter() - asked

    def close(self) -> None:
        """Drop what is not asked for yet and wait for the thread to end; may be called twice."""
        self._pending.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _submit(self) -> None:
        step = next(self._steps, None)
        if step is not None:
            future = self._pool.submit(self._stream.batch, step, self._positions)
            self._pending.append((step, future))
