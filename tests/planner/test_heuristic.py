"""The textbook procedure, and the exercise of the document that splits one training step."""

from dataclasses import replace

import pytest

from phalanx.catalog import load
from phalanx.core.errors import RefusedError
from phalanx.planner.heuristic import by_bubble, procedure
from phalanx.planner.search import search
from phalanx.planner.sweep import Request

BEACON = load.model("llama-3.1-405b")


def request_of(model: str, cluster: str, seq: int, batch: int) -> Request:
    return Request(shape=load.model(model), cluster=load.cluster(cluster), seq=seq, batch=batch)


@pytest.mark.parametrize(
    ("model", "cluster", "seq", "batch", "tp"),
    [
        ("llama-3.1-405b", "h100x16384", 8192, 2048, 8),
        ("gpt-3-175b", "a100x1024", 2048, 1536, 8),
        ("llama-3.1-8b", "h100x64", 8192, 128, 8),
        ("llama-3.1-70b", "gb200-nvl72x576", 8192, 1152, 64),
    ],
)
def test_tp_fills_the_domain_and_a_shorter_pipeline_would_not_fit(
    model: str, cluster: str, seq: int, batch: int, tp: int
):
    request = request_of(model, cluster, seq, batch)
    found = procedure(request)
    layout = found.layout
    assert layout.tp == tp
    assert found.fits
    assert layout.ranks == request.cluster.count
    assert (layout.zero, layout.schedule, layout.cp) == (1, "1f1b", 1)
    if layout.pp > 1:
        fixed = {"tp": frozenset({tp}), "cp": frozenset({1}), "zero": frozenset({1})}
        shorter = {"pp": frozenset(range(1, layout.pp)), "schedule": frozenset({"1f1b"})}
        whole = {"shard": frozenset(range(layout.dp, request.cluster.count + 1))}
        assert not search(replace(request, limits={**fixed, **shorter, **whole})).ranked


def test_it_is_never_faster_than_what_the_search_finds():
    request = request_of("llama-3.1-70b", "h100x256", 8192, 256)
    best = search(request).ranked[0].estimate
    assert best.step_seconds <= procedure(request).step_seconds


def test_micro_batches_grow_only_while_the_bubble_stays_small():
    found = procedure(request_of("llama-3.1-8b", "h100x64", 8192, 128))
    assert found.layout.mb > 1
    deep = procedure(request_of("llama-3.1-405b", "h100x16384", 8192, 2048))
    assert deep.layout.mb == 1
    assert deep.bubble > 0.2


def test_a_model_that_no_pipeline_makes_fit_is_refused():
    with pytest.raises(RefusedError, match="no pipeline depth makes llama"):
        procedure(request_of("llama-3.1-405b", "h100x64", 8192, 64))


# "extend shard_memory with a search": Beacon, 16,384 GPUs, tp up to 8, ZeRO-1, checkpointing,
# 8 micro-batches, 80 GB, sorted by bubble


def test_the_exercise_lists_fourteen_layouts_least_bubble_first():
    found = by_bubble(BEACON, 16384, 16e6)
    shown = [(n.layout.tp, n.layout.pp, n.layout.dp) for n in found]
    assert shown == [
        (8, 4, 512),
        (4, 8, 512),
        (8, 8, 256),
        (2, 16, 512),
        (4, 16, 256),
        (8, 16, 128),
        (1, 32, 512),
        (2, 32, 256),
        (4, 32, 128),
        (8, 32, 64),
        (1, 64, 256),
        (2, 64, 128),
        (4, 64, 64),
        (8, 64, 32),
    ]
    assert [round(n.bubble, 3) for n in found[:4]] == [0.273, 0.467, 0.467, 0.652]
    assert all(n.bytes <= 80e9 for n in found)


def test_beacons_published_layout_is_in_it_with_6_3_and_6_3_and_0_3_and_1_6_gb():
    published = next(
        n for n in by_bubble(BEACON, 16384, 16e6) if (n.layout.tp, n.layout.pp) == (8, 16)
    )
    assert published.layout.dp == 128
    assert published.bytes == pytest.approx((6.3 + 6.3 + 0.3 + 1.6) * 1e9, rel=0.01)
    assert published.bubble == pytest.approx(15 / 23)


def test_the_exercise_prefers_a_pipeline_of_4_which_really_does_not_fit():
    """Why the published layout has 16 stages: the napkin leaves out what is in flight.

    One micro-batch of 3,906 tokens on the napkin is one of at least 8,192 on a rank, four of
    them are in flight, and gradients are added up in fp32.
    """
    first = by_bubble(BEACON, 16384, 16e6)[0]
    assert (first.layout.tp, first.layout.pp) == (8, 4)
    request = request_of("llama-3.1-405b", "h100x16384", 8192, 2048)
    words = {"tp": {8}, "pp": {4}, "cp": {1}, "zero": {1}, "schedule": {"1f1b"}}
    limits = {key: frozenset(values) for key, values in words.items()}
    assert not search(replace(request, limits=limits)).ranked


def test_without_tp_nothing_fits_under_32_stages():
    found = by_bubble(BEACON, 16384, 16e6)
    assert min(n.layout.pp for n in found if n.layout.tp == 1) == 32
    assert by_bubble(BEACON, 64, 16e6) == []
