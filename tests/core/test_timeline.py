"""A timeline adds up by category and opens in a trace viewer."""

from phalanx.core.timeline import Span, Timeline

SPANS = (
    Span(0, "0F0", "compute", 0.0, 1.0),
    Span(0, "0B0", "compute", 2.0, 4.0),
    Span(1, "1RECV_F0", "wait", 0.0, 1.5),
)


def test_seconds_add_up_over_ranks_by_category() -> None:
    assert Timeline("planned", SPANS).seconds_by_category() == {"compute": 3.0, "wait": 1.5}


def test_the_chrome_trace_has_one_process_per_rank_and_microseconds() -> None:
    events = Timeline("measured", SPANS).chrome_trace()["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["rank 0", "rank 1"]
    spans = [(e["pid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans[1] == (0, "0B0", 2e6, 2e6)
