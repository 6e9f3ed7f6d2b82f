"""The list of messages and the trainer's ledger agree on whatever can be trained together.

The real trainer takes a step as one rank of a fake process group; runs are drawn from everything
that it can be asked: schedules, ZeRO, tp and sp, every kind of context parallelism, experts, latent
attention, low precision, recomputation, chunked logits, offload.
"""

from random import Random

import pytest
from drawn_runs import drawn_runs
from fake_ranks import recorded

from phalanx.core.run import Run
from phalanx.cost.messages import rank_messages

RUNS = drawn_runs(300)


@pytest.mark.parametrize("part", range(10))
def test_a_rank_sends_what_the_list_says_to_the_byte(part: int) -> None:
    for run in RUNS[part::10]:
        rank = Random(str(run.layout)).randrange(run.layout.ranks)
        found, listed = recorded(run, rank), rank_messages(run, run.layout.coordinates(rank))
        assert found == listed, f"rank {rank} of {run.layout}"


def test_what_is_drawn_has_everything_that_changes_messages() -> None:
    def seen(of: object) -> set[object]:
        return {of(run) for run in RUNS}  # type: ignore[operator]  # a function of a run

    assert seen(lambda run: run.layout.precision.recipe) >= {"", "fp8", "fp8-current", "mxfp8"}
    assert seen(lambda run: run.layout.context) == {"ring", "gather", "ulysses"}
    assert seen(lambda run: min(run.layout.recompute.segment, 2)) == {0, 1, 2}
    assert seen(lambda run: run.layout.zero_stage) == {0, 1, 2, 3}
    assert {"pipedream", "dualpipe", "zb-v"} <= seen(lambda run: run.layout.schedule)
    for feature in (_experts, _latent, _shares_heads, _chunks, _parts, _offloads, _no_sp):
        assert seen(feature) == {False, True}, feature.__name__


def _experts(run: Run) -> bool:
    return run.model.is_moe and run.layout.ep > 1


def _latent(run: Run) -> bool:
    return run.model.is_mla and run.layout.tp > 1


def _shares_heads(run: Run) -> bool:
    return run.layout.tp > run.model.kv_heads


def _chunks(run: Run) -> bool:
    return run.layout.logits > 0 and run.layout.tp > 1


def _parts(run: Run) -> bool:
    return bool(run.layout.recompute.parts) and run.layout.sequence_parallel


def _offloads(run: Run) -> bool:
    return run.layout.offload.state


def _no_sp(run: Run) -> bool:
    return run.layout.tp > 1 and not run.layout.sequence_parallel
