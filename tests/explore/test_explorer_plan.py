import asyncio
import json
import re
import tomllib

import pytest
from explorer_client import get

import phalanx
from phalanx.core.layout import Layout
from phalanx.explore.asked import inputs_of, layout_of
from phalanx.explore.board import Board
from phalanx.explore.documents import state_document
from phalanx.explore.live import after_set
from phalanx.explore.searching import in_words, load_text, ranking, search_lines, searched
from phalanx.explore.state import Reading, State

SMALL = "v1&model=llama-3.1-8b&B=1M&dp=8&tp=8&pp=1&whynot=tp=8"
LINES = (
    "dp=512 pp=1 tp=1 zero=3 shard=128 recompute=norms+activation offload=activations",
    "dp=16 pp=16 tp=8 v=2 schedule=interleaved recompute=selective",
    "dp=8 pp=4 tp=4 cp=2 schedule=dualpipe sp=off",
)


def test_a_search_gives_signs_of_life_and_then_what_plan_finds(address: str):
    lines = [json.loads(line) for line in get(address, f"/api/v1/plan?{SMALL}").text.splitlines()]
    assert all("seconds" in line for line in lines[:-1])
    html = lines[-1]["html"]
    found = phalanx.plan("llama-3.1-8b", "h100x64", batch=122, seq=8192)
    line = str(found.best.layout).replace(" precision=bf16", "")
    assert line in html
    assert "Why not" in html


def test_a_layout_of_the_ranking_loads_as_itself():
    for line in LINES:
        layout = Layout.parse(line + " precision=bf16")
        state = after_set(State(), load_text(line))
        assert layout_of(Reading(state)) == layout
        assert set(inputs_of(layout)) >= {"dp", "tp", "pp", "more"}


def test_what_nothing_can_be_is_told_and_not_raised(address: str):
    last = get(address, f"/api/v1/plan?{SMALL}&fixed=tp=7").text.splitlines()[-1]
    assert json.loads(last)["error"]


def test_a_reader_that_leaves_ends_the_search():
    async def leave() -> int | None:
        lines = search_lines("")
        await anext(lines)
        process = lines.ag_frame.f_locals["process"]
        await lines.aclose()
        return await process.wait()

    assert asyncio.run(leave()) == -9


def test_the_page_estimates_as_the_command_does():
    records = state_document(Board(), State.parse("v1&model=llama-3.1-70b&dp=8&tp=8&pp=4"))[
        "records"
    ]
    found = phalanx.estimate("llama-3.1-70b", "h100x256", "dp=8 tp=8 pp=4", batch=1024, seq=8192)
    assert records["est.step"]["value"] == found.step_seconds
    assert records["est.peak"]["value"] == found.peak_bytes
    assert records["est.fits"]["verdict"] == ("good" if found.fits else "bad")


@pytest.mark.parametrize("query", ["v1&more=shard=3", "v1&more=foo", "v1&tp=3", "v1&pp=500"])
def test_a_layout_that_cannot_be_says_why(query: str):
    found = state_document(Board(), State.parse(query))["records"]["est.fits"]
    assert found["text"] == "cannot be"
    assert re.search(r"\d|key", found["reason"])


def test_a_command_and_a_run_file_can_be_taken_away(address: str):
    command = get(address, f"/api/v1/command?{SMALL}").text
    assert command.startswith("phalanx estimate llama-3.1-8b h100-sxmx64 --layout 'dp=8 pp=1 tp=8")
    run = tomllib.loads(get(address, f"/api/v1/run?{SMALL}").text)
    assert (run["layout"]["tp"], run["model"]["name"]) == (8, "llama-3.1-8b")
    assert get(address, f"/api/v1/command?{SMALL}&F=9984").text.startswith(
        "phalanx explore --state"
    )
    assert get(address, "/api/v1/run?v1&more=foo").status == 409


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tp=1", "1 replica, cut no further"),
        ("pp=2", "1 replica, cut into 2 stages of layers"),
        ("dp=64 zero=3", "64 replicas, cut no further; 64 of them share their weights (ZeRO-3)"),
        (
            "dp=16 tp=2 zero=3 shard=8",
            "16 replicas, each cut 2 ways inside its layers; "
            "8 of them share their weights (ZeRO-3)",
        ),
    ],
)
def test_a_layout_is_told_in_words(line: str, words: str):
    assert in_words(line) == words


def test_why_not_says_where_tensor_parallelism_leaves_the_fast_fabric():
    query = "v1&model=llama-3.1-8b&B=1M&dp=1&tp=16&pp=1&fixed=cp=1&whynot=tp=16"
    assert "do not fit into one domain of 8 chips" in ranking(searched(State.parse(query)))
    assert "do not fit into one domain" not in ranking(
        searched(State.parse(query + "&whynot=tp=8"))
    )
