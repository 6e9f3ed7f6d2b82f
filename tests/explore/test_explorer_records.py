import json
import math
import struct
from html.parser import HTMLParser

import pytest
from explorer_client import get
from test_explorer_state import some_state

import phalanx
from phalanx.catalog import load
from phalanx.cli.main import main
from phalanx.explore.board import PANELS, SLOW, Board
from phalanx.explore.documents import state_document
from phalanx.explore.page import PARTS, PLACE, document, text_of
from phalanx.explore.presets import SCHEDULES
from phalanx.explore.records import show
from phalanx.explore.state import State
from phalanx.explore.timelines import Pace, columns, drawn
from phalanx.planner.simulate import peak_in_flight
from phalanx.schedules.build import build

BOARD = Board()
V5P = "v1&model=llama-3.1-70b&chip=tpu-v5p&dp=1&tp=1&pp=1&mdp=1"


def record(query: str, name: str):
    """One record of a state."""
    return state_document(BOARD, State.parse(query))["records"][name]


class Texts(HTMLParser):
    """The text of every record of a document, by id."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "button":
            self.inside = dict(attrs).get("data-r") or ""
            self.found |= {self.inside: ""} if self.inside else {}

    def handle_data(self, data: str) -> None:
        if self.inside and data not in "✓✕→":
            self.found[self.inside] += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "button":
            self.inside = ""


@pytest.mark.parametrize("part", [part.name for part in PARTS])
def test_every_place_of_the_prose_has_its_record_or_picture(part: str):
    shown = BOARD.shown(State(), [part, *SLOW.get(part, ())])
    for match in PLACE.finditer(text_of(part)):
        kind, name = match[1], match[2]
        if kind in "rvw":
            assert name in shown.records
        if kind in ("p", "x", "t"):
            assert name in shown.pictures


@pytest.mark.parametrize("seed", range(50))
def test_the_page_prints_the_text_of_every_record_of_the_json(seed: int):
    state = some_state(seed)
    records = state_document(BOARD, state)["records"]
    html = document(BOARD.shown(state), [])
    texts = Texts()
    texts.feed(html)
    assert texts.found
    assert all(records[name]["text"] == text for name, text in texts.found.items())
    assert "NaN" not in html
    assert ">nan" not in html.lower()


@pytest.mark.parametrize("seed", range(20))
def test_every_value_is_finite_or_absent_and_the_json_is_strict(seed: int):
    found = state_document(BOARD, some_state(seed))
    json.dumps(found, allow_nan=False)
    for name, one in found["records"].items():
        value = one["value"]
        assert value is None or isinstance(value, str) or math.isfinite(value), name


def test_the_command_and_the_server_give_the_same_records(capsys, address: str):
    query = "v1&chip=tpu-v5p&tp=4"
    assert main(["explore", "--json", "--state", query]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert json.loads(get(address, f"/api/v1/state?{query}").text) == printed


def test_a_panel_kept_is_the_panel_computed_anew():
    kept = Board()
    for seed in range(30):
        state = some_state(seed)
        for name in PANELS:
            assert kept.panel(name, state) == Board().panel(name, state)


@pytest.mark.parametrize(
    "query", ["v1&tp=3", "v1&E=4&k=8", "v1&model=deepseek-v3&ep=512", "v1&pp=512"]
)
def test_what_cannot_be_says_so_in_words(query: str):
    found = record(query, "n.possible")
    assert found["verdict"] == "bad"
    assert found["reason"]


# "First, Feel the Roofline": what the book's prompts promise


def test_when_weights_travel_only_the_compute_clock_hears_the_batch():
    before, after = record(V5P, "roof.network"), record(V5P + "&B=1M", "roof.network")
    assert before["value"] == after["value"]
    assert record(V5P, "roof.compute")["value"] > record(V5P + "&B=1M", "roof.compute")["value"]


def test_when_activations_travel_no_batch_helps():
    texts = [
        record(f"{V5P}&travels=activations&tp=16&B={b}", "roof.verdict")["text"]
        for b in ("1M", "100M")
    ]
    assert texts == ["communication-bound", "communication-bound"]


def test_a_worse_network_and_a_faster_chip_both_move_the_ridge_right():
    ridge = record(V5P, "roof.ridge")["value"]
    assert record(V5P + "&W=90e9", "roof.ridge")["value"] == 2 * ridge
    assert record(V5P + "&C=918e12", "roof.ridge")["value"] == 2 * ridge


def test_every_doubling_of_chips_halves_arithmetic_and_leaves_messages():
    one, two = (V5P + f"&dp={dp}&B=3M" for dp in (512, 1024))
    assert record(one, "dp.math")["value"] == 2 * record(two, "dp.math")["value"]
    assert record(one, "dp.comms")["value"] == record(two, "dp.comms")["value"]
    assert record(one, "dp.verdict")["text"] == "compute-bound"
    assert record(V5P + "&dp=2048&B=3M", "dp.verdict")["text"] == "communication-bound"


def test_doubling_dp_halves_the_optimizers_stripe():
    one, two = (V5P + f"&zero=3&dp={dp}" for dp in (64, 128))
    for name in ("weights", "gradients", "optimizer"):
        assert record(one, f"mem.{name}")["value"] == 2 * record(two, f"mem.{name}")["value"]


def test_a_small_batch_makes_activations_the_lighter_freight():
    assert record(V5P + "&B=3M", "tp.lighter")["text"] == "weights"
    assert record(V5P + "&B=4096", "tp.lighter")["text"] == "activations"


def test_llama_70b_hides_8_way_tp_on_a_v5p_and_not_16_way():
    texts = [record(f"{V5P}&tp={tp}", "tp.verdict")["text"] for tp in (8, 16, 32)]
    assert texts == ["compute-bound", "communication-bound", "communication-bound"]


def test_faster_chips_shrink_the_limit_of_tp():
    assert record(V5P + "&C=918e12", "tp.limit")["value"] == record(V5P, "tp.limit")["value"] / 2


def test_a_skinnier_mlp_raises_the_floor_of_the_mix_and_moves_the_best_dp():
    wide, narrow = (
        f"v1&model=llama-2-13b&chip=tpu-v5p&dp=256&tp=16&pp=1&B=3M&F={f}" for f in (13824, 4096)
    )
    assert record(narrow, "mix.floor")["value"] > record(wide, "mix.floor")["value"]
    assert record(narrow, "mix.dp_opt")["value"] > record(wide, "mix.dp_opt")["value"]


def test_deepseek_pays_e_over_k_for_its_weights():
    dense = record("v1&E=1", "dp.floor")["value"]
    found = record("v1&model=deepseek-v3", "dp.penalty")["value"]
    assert found == 257 / 9
    assert record("v1&model=deepseek-v3", "dp.floor")["value"] == pytest.approx(found * dense)


def test_the_numbers_of_the_book_stand_on_the_page():
    assert record(V5P, "dp.floor1")["text"] == "2,550"
    assert record(V5P, "dp.floor3")["text"] == "850"
    assert (
        record("v1&model=llama-2-13b&chip=tpu-v5p&dp=256&tp=16&pp=1&B=3M", "mix.floor")["text"]
        == "235"
    )


def test_numbers_are_printed_as_people_write_them():
    assert show(2550.0, "tokens") == "2,550"
    assert show(16777216, "tokens") == "16.8M"
    assert show(0.5, "x") == "0.5×"


# Pipelining, experts, fabric


def test_more_micro_batches_shrink_the_bubble_and_1f1b_holds_less_than_gpipe():
    few, many = (f"v1&p=4&m={m}&schedule=gpipe&beside=1f1b" for m in (4, 16))
    assert record(many, "pipe.one.bubble")["value"] < record(few, "pipe.one.bubble")["value"]
    assert record(many, "pipe.one.bubble")["value"] == record(many, "pipe.two.bubble")["value"]
    assert record(many, "pipe.two.peak")["value"] < record(many, "pipe.one.peak")["value"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_drawn_as_the_schedule_command_times_it(name: str):
    played = phalanx.schedule(name, p=4, m=8, costs={"F": 1, "I": 1.5, "W": 0.5})
    query = f"v1&p=4&m=8&schedule={name}&I_=1.5&W_=0.5"
    assert record(query, "pipe.one.makespan")["value"] == pytest.approx(played.occupancy.makespan)
    assert record(query, "pipe.one.peak")["value"] == max(played.peak_in_flight)


def test_a_slow_stage_makes_every_schedule_longer():
    for name in ("1f1b", "zb-h1", "dualpipe"):
        even = record(f"v1&schedule={name}", "pipe.one.makespan")["value"]
        assert record(f"v1&schedule={name}&slow=2&by=2", "pipe.one.makespan")["value"] > even


def test_a_schedule_that_cannot_be_had_says_which_can():
    found = record("v1&schedule=dualpipe&p=3", "pipe.one.verdict")
    assert found["text"] == "cannot be"
    assert "p can be 2 or 4" in found["reason"]


def test_columns_hold_every_pass_of_a_timeline():
    found = drawn("1f1b", 16, 256, 0, Pace())
    ranks, cells, changes, most = struct.unpack("<4I", columns(found)[:16])
    assert (ranks, cells, most) == (16, 2 * 16 * 256, 16)
    assert len(columns(found)) == 16 + 4 * (2 * cells + changes) + 2 * (2 * cells + 2 * changes)


def test_what_is_in_flight_in_the_drawing_is_what_the_schedule_says():
    for name in SCHEDULES:
        found = drawn(name, 4, 8, 0, Pace())
        highest = [0] * 4
        for rank, _, level in zip(*(column.tolist() for column in found.levels), strict=True):
            highest[rank] = max(highest[rank], level)
        assert tuple(highest) == found.peak == peak_in_flight(build(name, 4, 8, None))


def test_deepseeks_64_way_ep_over_8_nodes_does_not_hide_and_16_way_is_another_regime():
    many = "v1&model=deepseek-v3&chip=h800-sxm&dp=128&tp=1&pp=16&ep=64&B=62914560"
    assert record(many, "ep.verdict")["text"] == "communication-bound"
    assert record(many + "&C=990e12", "ep.needed")["value"] == pytest.approx(17325)


def test_the_fabric_of_an_h100_has_the_books_ridges():
    assert record("v1&C=990e12", "fab.node")["value"] == pytest.approx(2200)
    assert record("v1&C=990e12", "fab.out")["value"] == pytest.approx(2475)
    assert record("v1&C=990e12&dp=2&tp=8", "fab.small")["value"] == pytest.approx(1237.5)
    assert record("v1&C=990e12&dp=2&tp=8", "fab.small_max")["value"] == pytest.approx(1925)


def test_adam_in_mixed_precision_keeps_16_bytes_for_a_parameter():
    found = record("v1&model=llama-3.1-70b&dp=64&tp=1&pp=1", "sys.state")["value"]
    assert found == 16 * load.model("llama-3.1-70b").params()
