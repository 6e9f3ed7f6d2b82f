"""Time that a rank stands still for messages is not time in which it works."""

from phalanx.train.comm import Passage
from phalanx.train.recorder import Recorder


def test_a_span_lacks_what_it_stood_still_for_and_nothing_that_came_after() -> None:
    recorder = Recorder(0)
    with recorder.span("update", "optimizer"):
        recorder.message(Passage("world", "gradient norm", 0.0, 1.0, 1e6))
    recorder.message(Passage("world", "step report", 0.0, 1.0, 1e9))
    assert -1e6 < recorder.seconds["optimizer"] < -0.9e6
