from dataclasses import replace

import pytest

import phalanx
from phalanx.catalog import load
from phalanx.catalog.evidence import evidence
from phalanx.core.layout import Layout
from phalanx.cost.framework import EAGER_FSDP, FRAMEWORKS, PHALANX
from phalanx.planner.uncertainty import uncertainty
from phalanx.planner.workload import workload_of


def doubt(model="llama-3.1-8b", cluster="h100x64", precision="bf16", framework=EAGER_FSDP):
    count = cluster.rpartition("x")[2]
    where = load.cluster(cluster)
    layout = Layout.parse(f"dp={count} precision={precision}")
    shape = load.model(model)
    return uncertainty(*workload_of(shape, where, layout, 4096, 64 * int(count), framework))


def test_a_kind_that_was_fitted_rests_on_its_own_rows():
    kind = max(evidence().kinds, key=lambda kind: kind.rows)
    assert kind.rows > 20
    assert 0.01 < kind.spread < evidence().unseen


@pytest.mark.parametrize(
    ("unseen", "said"),
    [
        ({"framework": PHALANX}, "the program phalanx"),
        ({"cluster": "mi300xx64"}, "no published run on mi300x"),
        ({"cluster": "a100x64", "model": "mixtral-8x7b"}, "a mixture of experts"),
    ],
)
def test_what_no_row_of_the_fit_shows_is_wider_and_says_why(unseen, said):
    known, found = doubt(), doubt(**unseen)
    assert found.spread > known.spread
    assert said in found.reason


def test_two_properties_that_nobody_saw_are_worse_than_one():
    one = doubt(cluster="a100x64", model="mixtral-8x7b")
    two = doubt(cluster="a100x64", model="mixtral-8x7b", framework=PHALANX)
    assert two.spread > one.spread


def test_more_devices_than_any_run_of_the_fit_are_wider():
    found = phalanx.estimate(
        "llama-3.1-405b", "h100x131072", "dp=1024 pp=16 tp=8", batch=16384, seq=8192
    )
    near = phalanx.estimate("llama-3.1-405b", "h100x1024", "dp=8 pp=16 tp=8", batch=128, seq=8192)
    assert found.spread > near.spread
    assert "devices" in found.spread_reason


def test_the_reason_is_one_line_of_every_document():
    found = phalanx.estimate("llama-3.1-8b", "h100x8", "tp=8", batch=8, seq=8192)
    assert found.to_dict()["spread_reason"] == found.spread_reason
    assert "\n" not in found.spread_reason
    assert all(doubt(framework=replace(profile)).reason for profile in FRAMEWORKS.values())
