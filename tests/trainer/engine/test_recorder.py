"""Time that a rank stands still for messages is not time in which it works."""

import time

from phalanx.trainer.engine.recorder import Recorder
from phalanx.trainer.parallel.ledger import Passage


def test_a_span_lacks_what_it_stood_still_for_and_nothing_that_came_after() -> None:
    recorder = Recorder(0)
    with recorder.span("update", "optimizer"):
        recorder.message(Passage("world", "gradient norm", 0.0, 1.0, 1e6))
    recorder.message(Passage("world", "step report", 0.0, 1.0, 1e9))
    assert -1e6 < recorder.seconds["optimizer"] < -0.9e6


def test_a_span_inside_another_is_counted_once() -> None:
    recorder, start = Recorder(0), time.perf_counter()
    with recorder.span("update", "optimizer"), recorder.span("take back", "optimizer"):
        time.sleep(0.02)
    assert 0.02 <= recorder.seconds["optimizer"] <= time.perf_counter() - start
