from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.catalog import load
from phalanx.catalog.sustained import sustained
from phalanx.core.cluster import Link
from phalanx.cost.links import Fabric, RankGroup, seconds

CLUSTER = load.cluster("h100x64")
RATES = sustained("h100-sxm")
NEAR, FAR = 450e9 * RATES.domain, 50e9 * RATES.network
LARGE = 1e11


def on(size, stride=1, cluster=CLUSTER):
    return RankGroup(size, stride), Fabric.of(cluster, RATES)


def test_a_group_in_one_host_uses_the_fast_links():
    assert RankGroup(8, 1).inside(Fabric.of(CLUSTER, RATES)) == 8
    assert seconds("all_gather", LARGE, *on(8)) == pytest.approx(7 / 8 * LARGE / NEAR, rel=0.01)
    assert seconds("all_reduce", LARGE, *on(8)) == pytest.approx(7 / 4 * LARGE / NEAR, rel=0.01)


def test_a_ring_over_hosts_takes_the_slower_of_two_clocks():
    """Inside a host, and between hosts over the links of all eight ranks."""
    slower = min(NEAR, 8 * FAR)
    assert seconds("all_gather", LARGE, *on(64)) == pytest.approx(
        63 / 64 * LARGE / slower, rel=0.01
    )
    half = Link(name="half", bandwidth=25e9, sustained=25e9, latency=1e-5)
    cluster = replace(CLUSTER, accelerator=replace(CLUSTER.accelerator, network=half))
    longer = seconds("all_gather", LARGE, *on(64, cluster=cluster))
    assert longer == pytest.approx(63 / 64 * LARGE / (4 * FAR), rel=0.01)


def test_ranks_one_to_a_host_have_one_link_each():
    assert RankGroup(8, 8).inside(Fabric.of(CLUSTER, RATES)) == 1
    assert seconds("reduce_scatter", LARGE, *on(8, stride=8)) == pytest.approx(
        7 / 8 * LARGE / FAR, rel=0.01
    )


def test_an_all_to_all_leaves_through_each_ranks_own_link():
    beyond = LARGE * (16 - 8) / 16
    assert seconds("all_to_all", LARGE, *on(16)) == pytest.approx(beyond / FAR, rel=0.01)


def test_a_message_takes_the_link_between_its_ends():
    assert seconds("send", LARGE, *on(2)) == pytest.approx(LARGE / NEAR, rel=0.01)
    assert seconds("send", LARGE, *on(2, stride=8)) == pytest.approx(LARGE / FAR, rel=0.01)


def test_both_links_of_every_axis_that_a_group_fills_carry_it():
    torus = load.cluster("tpu-v5p:4x4x4")
    rates = sustained("tpu-v5p")
    fabric = Fabric.of(torus, rates)
    one, two = (RankGroup(size, 1).near(fabric).bandwidth for size in (4, 16))
    assert one == pytest.approx(2 * 90e9 * rates.domain)
    assert two == pytest.approx(2 * one)


@given(st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]))
def test_one_rank_and_no_bytes_take_no_time(name):
    assert seconds(name, LARGE, *on(1)) == 0
    assert seconds(name, 0.0, *on(8)) == 0


@given(st.sampled_from(["all_reduce", "all_gather", "all_to_all"]), st.sampled_from([2, 4, 8, 16]))
def test_more_bytes_never_take_less_time(name, size):
    times = [seconds(name, 10.0**power, *on(size)) for power in range(3, 11)]
    assert times == sorted(times)


@given(
    st.sampled_from(["all_reduce", "all_gather", "all_to_all", "send"]),
    st.lists(st.tuples(st.sampled_from([1, 2, 8, 16]), st.sampled_from([1, 8])), min_size=1),
)
def test_a_column_of_groups_takes_what_each_takes_alone(name, groups):
    sizes, strides = (np.array(column) for column in zip(*groups, strict=True))
    together = seconds(name, LARGE, *on(sizes, strides))
    assert together.tolist() == pytest.approx(
        [float(seconds(name, LARGE, *on(*group))) for group in groups]
    )
