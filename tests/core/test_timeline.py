"""A timeline adds up by category and opens in a trace viewer."""

from phalanx.core.timeline import Span, Timeline

SPANS = (
    Span(0, "0F0", "compute", 0.0, 1.0),
    Span(0, "0B0", "compute", 2.0, 4.0),
    Span(1, "1RECV_F0", "wait", 0.0, 1.5),
)
MESSAGES = (
    Span(0, "tp input", "communicate", 2.0, 3.5, "tensor"),
    Span(0, "tp input", "wait", 3.0, 3.5, "tensor"),
    Span(0, "gradients", "communicate", 3.0, 5.0, "data"),
    Span(0, "gradients", "wait", 4.0, 5.0, "data"),
)


def test_seconds_add_up_over_ranks_by_category() -> None:
    assert Timeline("planned", SPANS).seconds_by_category() == {"compute": 3.0, "wait": 1.5}


def test_the_chrome_trace_has_one_process_per_rank_and_microseconds() -> None:
    events = Timeline("measured", SPANS).chrome_trace()["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["rank 0", "rank 1"]
    spans = [(e["pid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans[1] == (0, "0B0", 2e6, 2e6)


def test_messages_lie_beside_what_a_rank_does() -> None:
    timeline = Timeline("measured", SPANS + MESSAGES)
    assert timeline.seconds_by_category() == Timeline("measured", SPANS).seconds_by_category()
    assert timeline.exposed_by_axis() == {"tensor": 0.5, "data": 1.0}


def test_the_chrome_trace_has_a_thread_of_waits_for_each_axis_and_messages_under_way() -> None:
    events = Timeline("measured", SPANS + MESSAGES).chrome_trace()["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    waits = {threads[e["tid"]]: e["dur"] for e in events if e["ph"] == "X" and e["tid"]}
    assert waits == {"waiting for tensor": 0.5e6, "waiting for data": 1e6}
    under_way = [(e["id"], e["ph"], e["name"], e["ts"]) for e in events if e["ph"] in "be"]
    first, second = sorted({e[0] for e in under_way})
    assert under_way == [
        (first, "b", "tp input", 2e6),
        (first, "e", "tp input", 3.5e6),
        (second, "b", "gradients", 3e6),
        (second, "e", "gradients", 5e6),
    ]
