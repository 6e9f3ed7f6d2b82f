"""Prefetched batches are those of the stream, and nothing is left behind."""

import threading
import time

import pytest

from phalanx.core.errors import DataError
from phalanx.data.prefetch import Prefetcher
from phalanx.data.synthetic import SyntheticStream

STREAM = SyntheticStream(96, 16, 8, 0)


class SlowStream:
    """Takes its time, and cannot read step 5."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds
        self.asked = []

    def batch(self, step, positions):
        self.asked.append(step)
        time.sleep(self.seconds)
        if step == 5:
            raise DataError("step 5 cannot be read")
        return STREAM.batch(step, positions)


def running():
    return [t for t in threading.enumerate() if t.name.startswith("prefetch")]


@pytest.mark.parametrize("depth", [1, 2, 20])
def test_it_yields_every_step_once_in_order(depth):
    with Prefetcher(STREAM, [1, 4], 3, 12, depth=depth) as prefetcher:
        batches = list(prefetcher)
    assert [step for step, _ in batches] == list(range(3, 12))
    for step, batch in batches:
        assert (batch.tokens == STREAM.batch(step, [1, 4]).tokens).all()
    assert not running()


def test_it_ends_at_once_when_there_is_nothing_to_do():
    assert list(Prefetcher(STREAM, [0], 7, 7)) == []


def test_it_works_ahead_but_not_further_than_its_depth():
    stream = SlowStream()
    with Prefetcher(stream, [0], 0, 5, depth=2) as prefetcher:
        next(prefetcher)
        deadline = time.monotonic() + 5
        while len(stream.asked) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        assert stream.asked == [0, 1, 2]


def test_waiting_is_measured():
    with Prefetcher(SlowStream(seconds=0.05), [0], 0, 3) as prefetcher:
        next(prefetcher)
        assert 0.03 < prefetcher.seconds_waited < 1
        time.sleep(0.3)
        next(prefetcher)
        assert prefetcher.seconds_waited < 0.03


def test_an_error_is_raised_at_its_own_step_and_ends_the_thread():
    prefetcher = Prefetcher(SlowStream(), [0], 3, 9, depth=4)
    assert [next(prefetcher)[0], next(prefetcher)[0]] == [3, 4]
    with pytest.raises(DataError, match="step 5 cannot be read"):
        next(prefetcher)
    assert not running()
    assert list(prefetcher) == []


def test_closing_early_leaves_no_thread():
    prefetcher = Prefetcher(SlowStream(seconds=0.01), [0], 0, 5, depth=3)
    next(prefetcher)
    prefetcher.close()
    prefetcher.close()
    assert not running()


def test_waiting_for_a_batch_can_be_given_up():
    with Prefetcher(SlowStream(1.5), [0], 0, 3, depth=1) as prefetcher:
        asked = []
        waited = prefetcher.await_next(lambda: len(asked) > 1 or asked.append(1))
        assert waited < 1.0


def test_a_batch_that_was_waited_for_is_there_at_once():
    with Prefetcher(SlowStream(0.3), [0], 0, 3, depth=1) as prefetcher:
        assert prefetcher.await_next(lambda: False) > 0.1
        next(prefetcher)
        assert prefetcher.seconds_waited < 0.1
