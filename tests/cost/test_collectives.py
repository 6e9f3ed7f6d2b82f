"""Bytes and seconds of collectives: small ones played out, and what must hold for all."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import UsageError
from phalanx.cost.collectives import (
    NAMES,
    Level,
    LinkRate,
    best_seconds,
    bytes_sent,
    double_tree,
    gather_bandwidth,
    in_network_seconds,
    ring,
    ring_seconds,
    tree,
)

names = st.sampled_from(NAMES)
sizes = st.floats(1, 1e12)
ranks = st.integers(2, 4096)
wires = st.builds(LinkRate, st.floats(1e-7, 1e-4), st.floats(1e9, 1e12))


def played_ring(p: int, chunk: float) -> list[float]:
    """Send an all-reduce round a ring, chunk by chunk; bytes that each rank sent."""
    held = [{c: {rank} for c in range(p)} for rank in range(p)]
    sent = [0.0] * p
    for step in range(2 * (p - 1)):
        moves = [(r, (r - step) % p) for r in range(p)]
        values = {(r, c): set(held[r][c]) for r, c in moves}
        for r, c in moves:
            sent[r] += chunk
            right = held[(r + 1) % p]
            right[c] = right[c] | values[r, c]
    everyone = set(range(p))
    assert all(contributions == everyone for rank in held for contributions in rank.values())
    return sent


@pytest.mark.parametrize("p", [2, 3, 4, 7, 8])
def test_a_ring_played_chunk_by_chunk_sends_what_the_formula_says(p: int):
    assert played_ring(p, chunk=1.0) == [bytes_sent("all_reduce", float(p), p)] * p


@given(sizes, ranks)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(S: float, p: int):
    halves = bytes_sent("reduce_scatter", S, p) + bytes_sent("all_gather", S, p)
    assert bytes_sent("all_reduce", S, p) == pytest.approx(halves)


@given(names, sizes, ranks)
def test_nobody_sends_more_than_twice_the_vector(name: str, S: float, p: int):
    assert 0 < bytes_sent(name, S, p) < 2 * S or name in ("broadcast", "reduce")


@given(names, sizes, wires)
def test_a_group_of_one_sends_nothing_and_waits_for_nothing(name: str, S: float, wire: LinkRate):
    assert bytes_sent(name, S, 1) == 0
    assert best_seconds(name, S, 1, wire) == 0


@given(names, sizes, ranks, wires)
def test_no_algorithm_beats_the_bytes_it_must_send(name: str, S: float, p: int, wire: LinkRate):
    least = bytes_sent(name, S, p) / wire.bandwidth
    for algorithm in (ring, tree, double_tree):
        # A tree all-to-all by Bruck sends S/2 per round, the pairwise exchange less in all.
        assert algorithm(name, p, wire).at(S) >= least * (1 - 1e-12) or name == "all_to_all"


@given(ranks, wires)
def test_large_vectors_go_round_the_ring_and_tiny_ones_over_a_tree(p: int, wire: LinkRate):
    large = 1e4 * wire.latency * wire.bandwidth * p
    assert best_seconds("all_gather", large, p, wire) == ring("all_gather", p, wire).at(large)
    if p >= 8:
        assert best_seconds("all_reduce", 1.0, p, wire) < ring("all_reduce", p, wire).at(1.0)


def test_the_ring_waits_once_per_rank_and_the_tree_once_per_doubling():
    wire = LinkRate(latency=1.0, bandwidth=1e30)
    assert ring_seconds("all_reduce", 1.0, 1024, wire) == pytest.approx(2 * 1023)
    assert tree("all_reduce", 1024, wire).at(1.0) == pytest.approx(2 * 10)


@pytest.mark.parametrize("name", NAMES)
def test_a_tree_over_ranks_that_are_no_power_of_two_rounds_up(name: str):
    wire = LinkRate(latency=1.0, bandwidth=1e30)
    assert tree(name, 5, wire).at(1.0) == pytest.approx(tree(name, 8, wire).at(1.0))


def test_switches_that_add_save_a_quarter_of_an_all_reduce():
    wire = LinkRate(0.0, 450e9)
    plain = 2 * 1e9 / wire.bandwidth
    assert in_network_seconds(1e9, wire) == pytest.approx(plain / 1.3)


@given(st.lists(st.builds(Level, st.integers(1, 64), st.floats(1e9, 1e13)), max_size=4))
def test_a_tree_of_switches_is_as_fast_as_its_slowest_level(levels: list[Level]):
    alone = [gather_bandwidth((level,)) for level in levels]
    assert gather_bandwidth(tuple(levels)) == min(alone, default=float("inf"))


@given(st.integers(0, 8))
def test_an_inner_axis_never_slows_an_outer_collective(doublings: int):
    levels = (Level(8, 450e9), Level(32, 400e9))
    speeds = [gather_bandwidth(levels, 2**n) for n in range(doublings + 1)]
    assert all(before <= after for before, after in pairwise(speeds))


def test_what_is_no_collective_and_what_is_no_group_is_refused():
    with pytest.raises(UsageError, match="all_reduce"):
        bytes_sent("allreduce", 1.0, 2)
    with pytest.raises(UsageError, match="at least 1"):
        bytes_sent("all_reduce", 1.0, 0)


@given(names, st.lists(st.integers(1, 4096), min_size=1, max_size=5), wires)
def test_a_column_of_groups_takes_what_each_group_takes(name, sizes, wire):
    column = best_seconds(name, 1e6, np.array(sizes), wire)
    alone = [best_seconds(name, 1e6, size, wire) for size in sizes]
    assert np.asarray(column).tolist() == pytest.approx(alone)
