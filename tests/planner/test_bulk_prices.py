"""Prices by column, held against the price of one layout at a time."""

from collections.abc import Iterator

import numpy as np
import pytest

from phalanx.catalog import load
from phalanx.core.errors import UsageError
from phalanx.core.layout import Layout
from phalanx.cost.practice import MEGATRON_2021, MEGATRON_CORE, PHALANX, Practice
from phalanx.planner.bytes import rank_bytes
from phalanx.planner.estimate import step_seconds
from phalanx.planner.question import ask
from phalanx.planner.sweep import Request, Sweep

SAMPLE = 60
CASES = [
    ("llama-3.1-8b", "h100x64", 8192, 128, PHALANX),
    ("gpt-3-175b", "a100x128", 2048, 96, MEGATRON_CORE),
    ("deepseek-v2-lite", "h100x32", 4096, 64, PHALANX),
    ("gemma-7b", "tpu-v5p:4x4x2", 4096, 64, PHALANX),
]


def request_of(model: str, cluster: str, seq: int, batch: int, practice: Practice) -> Request:
    shape, devices = load.model(model), load.cluster(cluster)
    return Request(shape=shape, cluster=devices, seq=seq, batch=batch, practice=practice)


def sample(request: Request) -> Iterator[tuple[Layout, float]]:
    """Some layouts that fit, drawn at random, and their seconds by column."""
    sweep = Sweep(request)
    blocks = list(sweep.priced())
    sizes = [int(block.fits.sum()) for block in blocks]
    ends = np.cumsum(sizes)
    for number in np.random.default_rng(0).choice(ends[-1], SAMPLE, replace=False).tolist():
        place = int(np.searchsorted(ends, number, side="right"))
        block = blocks[place]
        rows, shards = np.nonzero(block.fits)
        row, shard = (int(a[number - ends[place] + sizes[place]]) for a in (rows, shards))
        size = int(block.sharding.shards[0, shard])
        layout = sweep.where.layout(block.rows, row, block.sharding.zero, size)
        yield layout, float(block.seconds[row, shard])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_seconds_are_nearly_those_of_an_estimate(case):
    request = request_of(*case)
    errors = {}
    for layout, seconds in sample(request):
        question = ask(request.shape, request.cluster, layout, *case[2:])
        errors[layout] = abs(seconds / step_seconds(question) - 1)
    plain = [error for layout, error in errors.items() if layout.schedule in ("1f1b", "gpipe")]
    assert max(plain) < 0.02
    every = list(errors.values())
    assert np.median(every) < 0.02
    assert np.quantile(every, 0.9) < 0.07
    assert max(every) < 0.25  # of interleaved pipelines whose stages are uneven


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_every_layout_that_is_said_to_fit_does(case):
    request = request_of(*case)
    for layout, _ in sample(request):
        question = ask(request.shape, request.cluster, layout, *case[2:])
        assert max(rank.total for rank in rank_bytes(question)) <= request.capacity


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_the_bytes_of_the_smallest_layout_are_those_of_its_worst_rank(case):
    request = request_of(*case)
    smallest = Sweep(request).smallest()
    assert smallest is not None
    question = ask(request.shape, request.cluster, smallest.layout, *case[2:])
    worst = max(rank.total for rank in rank_bytes(question))
    assert smallest.bytes == pytest.approx(worst, rel=1e-9)


def test_scores_in_memory_are_left_to_an_estimate():
    request = request_of("gpt2", "a100x8", 1024, 8, MEGATRON_2021)
    with pytest.raises(UsageError, match="phalanx estimate prices one layout"):
        Sweep(request)
