"""The search is complete: it looks at every layout, refuses for a reason, and finds the best."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from phalanx.catalog import load
from phalanx.core.errors import RefusedError, divisors
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.precision import Precision
from phalanx.core.recompute import MODES
from phalanx.planner.estimate import Priced, estimate
from phalanx.planner.parse import read_limits
from phalanx.planner.refine import TRIED
from phalanx.planner.rerank import mesh_of
from phalanx.planner.search import Found, search
from phalanx.planner.space import MEMORY, SEARCHED
from phalanx.planner.sweep import Request, Sweep
from phalanx.planner.workload import workload_of
from phalanx.schedules.build import build
from phalanx.schedules.layouts import chunks

SMALL = ModelShape(name="small", layers=6, hidden=2048, heads=8, kv_heads=4, vocab=32000)


def request_of(memory: float = 80e9, **others) -> Request:
    cluster = load.cluster("h100x8")
    cluster = replace(cluster, accelerator=replace(cluster.accelerator, memory=memory))
    return Request(shape=SMALL, cluster=cluster, seq=4096, batch=16, **others)


def every_layout(devices: int, batch: int) -> list[Layout]:
    """All that divide, by counting on fingers; the same one is listed once."""
    found = set()
    degrees = [d for d in product(divisors(devices), repeat=4) if _product(d) == devices]
    for dp, pp, tp, cp in degrees:
        if batch % dp:
            continue
        for mb, zero, shard, mode, sp in product(
            divisors(batch // dp), range(4), divisors(dp), MODES, (True, False)
        ):
            if (zero == 0 and shard < dp) or (zero > 0 and shard == 1) or (sp and tp == 1):
                continue
            for name, v in _schedules(pp):
                found.add(
                    Layout(
                        dp=dp, pp=pp, tp=tp, cp=cp, zero=zero, shard=shard, mb=mb, recompute=mode,
                        sp=sp, schedule=name, v=v, precision="bf16",
                    )
                )  # fmt: skip
    return sorted(found, key=str)


def _product(degrees: tuple[int, ...]) -> int:
    dp, pp, tp, cp = degrees
    return dp * pp * tp * cp


def _schedules(pp: int) -> list[tuple[str, int]]:
    if pp == 1:
        return [("1f1b", 1)]
    fixed = [(n, 2 if n in ("zb-v", "dualpipev") else 1) for n in SEARCHED if n != "interleaved"]
    return fixed + [("interleaved", v) for v in range(2, SMALL.layers // pp + 1)]


@pytest.fixture(scope="module")
def priced() -> dict[Layout, tuple[float, float]]:
    """Seconds and bytes of every layout that can be cut so, one at a time."""
    request, prices = request_of(), {}
    for layout in every_layout(8, 16):
        try:
            priced = Priced(*workload_of(SMALL, request.cluster, layout, 4096, 16))
            build(layout.schedule, layout.pp, priced.m, chunks(layout))
        except RefusedError:
            continue
        prices[layout] = (0.0, max(rank.total for rank in priced.rank_bytes()))
    return prices


# What the second stage would vary.
FIRST_STAGE_ONLY = "logits=0 reshard=on context=ring offload=none optimistic=off compile=off"


@pytest.mark.parametrize("memory", [80e9, 16e9, 9e9])
def test_it_counts_what_counting_on_fingers_counts(priced, memory: float):
    found = search(request_of(memory))
    assert found.considered == len(every_layout(8, 16))
    assert found.feasible + sum(found.refused.values()) == found.considered
    assert found.feasible == sum(size <= memory for _, size in priced.values())
    assert found.refused.get(MEMORY, 0) == sum(size > memory for _, size in priced.values())


def test_nothing_that_fits_is_faster_than_its_best(priced):
    words = "cp=1 mb=1 zero=1|3 recompute=none|full"
    found = search(request_of(12e9, limits=read_limits(f"{words} {FIRST_STAGE_ONLY}")))
    best = {}
    for layout, (_, size) in priced.items():
        sharded = layout.zero in (1, 3) or layout.dp == 1  # where every stage is the same
        if size > 12e9 or layout.cp > 1 or layout.mb > 1 or not sharded:
            continue
        if str(layout.recompute) == "selective":
            continue
        seconds = Priced(found.request, layout).step_seconds()
        best[mesh_of(layout)] = min(best.get(mesh_of(layout), seconds), seconds)
    exact = sorted(best.values())[: len(found.ranked)]
    assert [r.estimate.step_seconds for r in found.ranked] == pytest.approx(exact, rel=0.01)
    assert found.ranked[0].estimate.step_seconds == pytest.approx(exact[0], rel=1e-9)


def test_each_mesh_stands_there_once_and_ranks_rise_with_seconds():
    found = search(request_of(top=20))
    meshes = [ranked.mesh for ranked in found.ranked]
    assert len(set(meshes)) == len(meshes)
    seconds = [ranked.estimate.step_seconds for ranked in found.ranked]
    assert seconds == pytest.approx(sorted(seconds), rel=1e-5)
    ranks = [ranked.rank for ranked in found.ranked]
    assert ranks[0] == 1
    assert ranks == sorted(set(ranks))
    assert ranks[-1] <= found.feasible


def test_the_best_of_the_search_is_the_best_of_its_200_nearest_priced_by_estimate():
    request = request_of(12e9, top=1, limits=read_limits(FIRST_STAGE_ONLY))
    best, sweep, near = search(request).ranked[0].estimate, Sweep(request), []
    for block in sweep.priced():
        for row, shard in zip(*np.nonzero(block.fits), strict=True):
            near.append((block.seconds[row, shard], block, int(row), int(shard)))
    exact = []
    for _, block, row, shard in sorted(near, key=lambda entry: entry[0])[:200]:
        size, zero = int(block.group.shards[0, shard]), int(block.group.zero[0, 0])
        exact.append(Priced(request, sweep.where.layout(block.rows, row, zero, size)))
    assert best.step_seconds <= min(priced.step_seconds() for priced in exact) * (1 + 1e-9)


def test_the_second_stage_finds_what_the_first_leaves_at_its_default():
    narrowed = search(request_of(8.5e9, limits=read_limits(FIRST_STAGE_ONLY))).ranked[0].estimate
    found = search(request_of(8.5e9)).ranked[0].estimate
    assert found.step_seconds < narrowed.step_seconds
    assert found.fits
    changed = [key for key in TRIED if getattr(found.layout, key) != getattr(Layout(), key)]
    assert changed


def test_like_meshes_stand_under_the_simplest():
    found = search(request_of(top=20))
    shown = [ranked.mesh for ranked in found.ranked]
    for ranked in found.ranked:
        for other in ranked.alike:
            assert mesh_of(other) not in shown
            assert other.cp >= ranked.estimate.layout.cp
            assert (other.pp, other.tp) == (ranked.mesh.pp, ranked.mesh.tp)


def test_what_is_shown_fits_and_costs_what_estimate_says():
    found = search(request_of(16e9))
    for ranked in found.ranked:
        again = estimate(SMALL, found.request.cluster, ranked.estimate.layout, 4096, 16)
        assert again.fits
        assert again.step_seconds == ranked.estimate.step_seconds


@pytest.mark.parametrize(
    ("words", "holds"),
    [
        ("tp=2", lambda layout: layout.tp == 2),
        ("pp=2|4 cp=1", lambda layout: layout.pp in (2, 4) and layout.cp == 1),
        ("schedule=1f1b recompute=full", lambda layout: str(layout.recompute) == "full"),
        ("zero=3 shard=4", lambda layout: (layout.zero, layout.shards) == (3, 4)),
        ("sp=off tp=4", lambda layout: not layout.sequence_parallel),
    ],
)
def test_limits_hold_for_all_that_is_found(words: str, holds):
    found = search(request_of(limits=read_limits(words)))
    assert found.ranked
    assert all(holds(ranked.estimate.layout) for ranked in found.ranked)
    assert found.considered < search(request_of()).considered


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("pp=3", "pp=3 does not divide 8 devices; pp can be 1, 2, 4, 8"),
        ("mb=5", "mb=5 does not divide a batch of 16 sequences"),
    ],
)
def test_a_limit_that_divides_nothing_is_refused(words: str, message: str):
    with pytest.raises(RefusedError, match=message):
        search(request_of(limits=read_limits(words)))


def test_a_format_that_the_devices_lack_is_refused():
    request = Request(
        shape=SMALL,
        cluster=load.cluster("a100x8"),
        seq=4096,
        batch=16,
        precision=Precision.parse("fp8"),
    )
    with pytest.raises(RefusedError, match="no fp8 matrix units"):
        search(request)


# Llama 3.1 405B on 16,384 H100s


@pytest.fixture(scope="module")
def llama() -> Found:
    shape, cluster = load.model("llama-3.1-405b"), load.cluster("h100x16384")
    return search(Request(shape=shape, cluster=cluster, seq=8192, batch=2048))


def test_millions_of_layouts_are_all_accounted_for(llama: Found):
    assert llama.considered > 5_000_000
    assert llama.feasible + sum(llama.refused.values()) == llama.considered


def test_the_best_for_405b_is_no_slower_than_what_was_published(llama: Found):
    best = llama.ranked[0].estimate
    assert best.fits
    assert 5.0 < best.step_seconds < 9.0  # published: 400 TFLOP/s per GPU, 6.2 s

    narrowed = read_limits("dp=128 pp=16 tp=8 cp=1")
    shape, cluster = llama.request.shape, llama.request.cluster
    request = Request(shape=shape, cluster=cluster, seq=8192, batch=2048, limits=narrowed)
    published = search(request).ranked[0].estimate
    assert mesh_of(published.layout) == (128, 16, 8, 1, 1)
    assert published.fits
    rank = llama.rank(published)
    assert 1 < rank < llama.feasible / 20
    assert published.step_seconds > best.step_seconds


def test_tp_across_servers_is_not_what_it_finds(llama: Found):
    assert all(ranked.estimate.layout.tp <= 8 for ranked in llama.ranked)
