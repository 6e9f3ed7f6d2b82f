import pytest

from phalanx.catalog import load
from phalanx.core.layout import Layout
from phalanx.planner.diagnosis import diagnose, nothing_fits
from phalanx.planner.estimate import estimate
from phalanx.planner.explain import (
    differences,
    nearest_mesh,
    shortage,
    suggest_fix,
    why_not_faster,
    why_slower,
)
from phalanx.planner.parse import read_limits
from phalanx.planner.search import Found, search
from phalanx.planner.sweep import Request

LLAMA, CLUSTER = load.model("llama-3.1-8b"), load.cluster("h100x64")
REQUEST = Request(shape=LLAMA, cluster=CLUSTER, seq=8192, batch=128)


def price(line: str):
    return estimate(LLAMA, CLUSTER, Layout.parse(line), 8192, 128)


@pytest.fixture(scope="module")
def found() -> Found:
    return search(REQUEST)


def test_differences_add_up_to_the_difference_of_the_steps(found: Found):
    other = price("dp=4 pp=4 tp=4 recompute=full")
    apart = differences(other, found.ranked[0].estimate)
    total = other.step_seconds - found.ranked[0].estimate.step_seconds
    assert sum(difference.seconds for difference in apart) == pytest.approx(total)
    sizes = [abs(difference.seconds) for difference in apart]
    assert sizes == sorted(sizes, reverse=True)


def test_a_slower_layout_is_slower_for_a_reason_with_a_number(found: Found):
    reasons = why_slower(price("dp=8 pp=1 tp=8"), found.ranked[0].estimate)
    assert any("tensor axis" in reason and reason.startswith("+") for reason in reasons)
    assert why_slower(found.ranked[0].estimate, found.ranked[0].estimate) == (
        "no different within 0.5 %",
    )


def test_the_best_says_what_it_spends_beside_arithmetic_at_the_peak(found: Found):
    reasons = why_not_faster(found.ranked[0].estimate)
    assert len(reasons) == 3
    assert all("at the peak" not in reason for reason in reasons)


def test_a_layout_that_fits_has_a_price_and_a_rank(found: Found):
    answer = diagnose(found, "dp=8 pp=1 tp=8 mb=4")
    assert answer.refusal == ""
    assert answer.estimate is not None
    assert answer.estimate.layout == Layout.parse("dp=8 pp=1 tp=8 mb=4 precision=bf16")
    assert 1 < answer.rank < found.feasible


def test_the_best_layout_has_rank_1(found: Found):
    assert diagnose(found, str(found.ranked[0].estimate.layout)).rank == 1


def test_words_that_leave_something_open_stand_for_the_fastest_that_has_them(found: Found):
    answer = diagnose(found, "tp=8")
    assert answer.estimate is not None
    assert answer.estimate.layout.tp == 8
    assert answer.estimate.step_seconds <= price("dp=8 pp=1 tp=8 mb=4").step_seconds


def test_a_wrong_product_is_said_with_the_nearest_layout_that_multiplies(found: Found):
    answer = diagnose(found, "dp=7 pp=3 tp=4")
    assert answer.refusal == (
        "dp=7 x pp=3 x tp=4 is 84 ranks, and there are 64 devices; "
        "the nearest that fits is dp=8 pp=2 tp=4"
    )


@pytest.mark.parametrize(
    ("line", "devices", "near"),
    [
        ("dp=7 pp=3 tp=4", 64, "dp=8 pp=2 tp=4"),
        ("dp=128 pp=16 tp=8", 8192, "dp=64 pp=16 tp=8"),
        ("dp=1 pp=1 tp=1", 7, "dp=7 pp=1 tp=1"),
        ("dp=2 pp=2 tp=2 cp=2", 32, "dp=4 pp=2 tp=2 cp=2"),
    ],
)
def test_the_nearest_mesh_multiplies_and_moves_least(line: str, devices: int, near: str):
    nearest = nearest_mesh(Layout.parse(line), devices)
    assert nearest.ranks == devices
    distance = {str(nearest), near}
    assert nearest == Layout.parse(near) or len(distance) == 2
    asked = Layout.parse(line)
    moved = [abs(getattr(nearest, k) / getattr(asked, k) - 1) for k in ("dp", "pp", "tp")]
    expected = [
        abs(getattr(Layout.parse(near), k) / getattr(asked, k) - 1) for k in ("dp", "pp", "tp")
    ]
    assert sum(value > 0 for value in moved) <= sum(value > 0 for value in expected)


def test_a_layout_that_cannot_be_cut_says_what_can(found: Found):
    assert diagnose(found, "dp=64 pp=1 tp=1 mb=3").refusal == (
        "a batch of 128 sequences cannot be cut into dp=64 x mb=3; the batch can be 192"
    )


def test_a_layout_that_does_not_fit_says_by_how_much_and_what_mends_it(found: Found):
    answer = diagnose(found, "dp=64 pp=1 tp=1 zero=0 mb=2")
    assert answer.rank == 0
    assert "too much: optimizer 96.4 GB" in answer.refusal
    assert answer.fix is not None
    assert answer.fix.estimate.fits
    assert len(answer.fix.changes.split()) == 2  # no single change is enough


def test_one_change_is_preferred_to_two():
    mended = suggest_fix(REQUEST, Layout.parse("dp=64 pp=1 tp=1 precision=bf16"))
    assert mended is not None
    assert len(mended.changes.split()) == 1
    assert price(f"dp=64 pp=1 tp=1 precision=bf16 {mended.changes}").fits


def test_units_are_the_ones_that_were_asked_for():
    big = price("dp=64 pp=1 tp=1 zero=0 mb=2")
    assert "GiB" not in shortage(big)
    assert " GB" not in shortage(big, binary=True)


def test_where_nothing_fits_it_says_with_how_many_devices_it_would():
    cluster = load.cluster("h100x8")
    request = Request(shape=load.model("llama-3.1-405b"), cluster=cluster, seq=8192, batch=2048)
    assert not search(request).ranked
    said = nothing_fits(request)
    assert "does not fit on h100x8" in said
    assert "of 80 GB" in said
    assert said.endswith("it would fit on 128 devices")


def test_where_nothing_can_be_cut_it_says_why():
    request = Request(
        shape=LLAMA, cluster=CLUSTER, seq=8192, batch=128, limits=read_limits("tp=64")
    )
    assert "tp does not divide the heads" in nothing_fits(request)
