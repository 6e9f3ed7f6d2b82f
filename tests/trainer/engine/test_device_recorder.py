"""Spans on the clock of a device, by a made-up stream whose every moment is known."""

from itertools import pairwise

import pytest

from phalanx.trainer.engine.device_recorder import DeviceRecorder
from phalanx.trainer.parallel.comm import Group, Pending
from phalanx.trainer.parallel.ledger import Ledger


class Moment:
    def __init__(self, at):
        self.at = at


class MadeUpStream:
    """A device: work lasts as long as it says, and its host hands it over in no time."""

    def __init__(self):
        self.at, self.reached, self.ranges = 0.0, 0.0, []

    def work(self, seconds):
        self.at += seconds

    def stand_still_until(self, moment):
        self.at = max(self.at, moment)

    def mark(self):
        return Moment(self.at)

    def has_passed(self, mark):
        return mark.at <= self.reached

    def wait(self, mark):
        self.reached = max(self.reached, mark.at)

    def seconds(self, since, until):
        assert self.has_passed(since)
        assert self.has_passed(until)
        return until.at - since.at

    def push(self, label):
        self.ranges.append(label)

    def pop(self):
        self.ranges.append("end")


class Sent:
    """A message that arrives at a moment of its own."""

    def __init__(self, stream, arrives):
        self.stream, self.arrives = stream, arrives

    def wait(self):
        self.stream.stand_still_until(self.arrives)


@pytest.fixture
def device():
    stream, ledger = MadeUpStream(), Ledger()
    recorder = DeviceRecorder(3, ledger, stream)
    ledger.watch = recorder.message
    return stream, ledger, recorder


def send(ledger, stream, lasts):
    """Start a message of so many seconds, as a group does."""
    group = Group("tensor", (0,), None, ledger)
    arrives = stream.at + lasts
    return group._started("sums", lambda: Pending([Sent(stream, arrives)]))


def test_a_span_lasts_as_long_as_the_device_works_and_not_as_its_host_takes(device):
    stream, _, recorder = device
    with recorder.span("0F0", "compute"):
        stream.work(2.0)
    recorder.collect()
    assert recorder.seconds == {}  # the device has not come so far
    recorder.collect(all_of_it=True)
    assert recorder.seconds == {"compute": 2.0}


def test_only_what_has_passed_is_read(device):
    stream, _, recorder = device
    with recorder.span("0F0", "compute"):
        stream.work(2.0)
    with recorder.span("update", "optimizer"):
        stream.work(1.0)
    stream.reached = 2.5
    recorder.collect()
    assert recorder.seconds == {"compute": 2.0}
    stream.reached = 3.0
    recorder.collect()
    assert recorder.seconds == {"compute": 2.0, "optimizer": 1.0}


def test_what_hides_behind_work_is_under_way_and_not_waited_for(device):
    stream, ledger, recorder = device
    recorder.keeps_spans = True
    with recorder.span("0B0", "compute"):
        pending = send(ledger, stream, lasts=3.0)
        stream.work(2.0)
        pending.wait()
        stream.work(1.0)
    recorder.collect(all_of_it=True)
    assert ledger.waited == {"tensor": 1.0}  # the third second: the rest hid
    assert recorder.seconds == {"compute": 3.0}
    by_kind = {span.category: span for span in recorder.spans}
    assert by_kind["communicate"].seconds == pytest.approx(3.0)
    assert by_kind["wait"].seconds == pytest.approx(1.0)
    assert by_kind["compute"].seconds == pytest.approx(4.0)
    assert by_kind["communicate"].start == pytest.approx(by_kind["compute"].start)
    assert {span.rank for span in recorder.spans} == {3}


def test_a_message_that_is_there_in_time_costs_nothing(device):
    stream, ledger, recorder = device
    pending = send(ledger, stream, lasts=1.0)
    with recorder.span("0B0", "compute"):
        stream.work(2.0)
        pending.wait()
    recorder.collect(all_of_it=True)
    assert ledger.waited == {"tensor": 0.0}
    assert recorder.seconds == {"compute": 2.0}


def test_spans_inside_spans_are_counted_once(device):
    stream, _, recorder = device
    with recorder.span("update", "optimizer"):
        stream.work(1.0)
        with recorder.span("roll back", "compute"):
            stream.work(2.0)
    recorder.collect(all_of_it=True)
    assert recorder.seconds == {"optimizer": 1.0, "compute": 2.0}


def test_spans_of_many_steps_are_on_one_clock(device):
    stream, _, recorder = device
    recorder.keeps_spans = True
    for _ in range(3):
        with recorder.span("0F0", "compute"):
            stream.work(1.0)
        stream.work(0.5)
        recorder.collect(all_of_it=True)
    starts = [span.start for span in recorder.spans]
    assert [b - a for a, b in pairwise(starts)] == pytest.approx([1.5, 1.5])


def test_ranges_for_profilers_are_those_of_the_spans(device):
    stream, _, recorder = device
    with recorder.span("0F0", "compute"), recorder.span("inside", "wait"):
        pass
    assert stream.ranges == ["0F0", "inside", "end", "end"]
