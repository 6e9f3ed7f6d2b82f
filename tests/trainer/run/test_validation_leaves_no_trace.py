"""Validation is another mode: nothing is dropped, full or smoothed, and it leaves no trace."""

from dataclasses import replace

import pytest
from skipping_jobs import same, train_job, validation_loss

from phalanx.oracle.cases import CaseSpec
from phalanx.oracle.pool import RankPool

pytestmark = pytest.mark.ranks

LEARNS = {
    "model": {"hidden": 32, "ffn": 48},
    "recipe": {"seq": 16, "dropout": 0.5, "label_smoothing": 0.2, "capacity": 0.5},
}
LAYOUTS = [
    ("mb=4", ("experts",)),
    ("mb=4 recompute=full", ("gpt",)),
    ("dp=2 tp=2 zero=3 mb=2 logits=24", ("deepseek",)),
    ("tp=2 sp=off mb=4 recompute=norms+mlp", ("experts",)),
    ("pp=2 mb=4 schedule=interleaved v=2 recompute=full", ("experts", "tied")),
    ("cp=2 ep=2 mb=8 logits=7", ("experts",)),
    ("dp=2 ep=2 mb=2 offload=activations", ("deepseek",)),
]


@pytest.mark.parametrize(("line", "features"), LAYOUTS, ids=str)
def test_what_helps_to_learn_is_off_where_nothing_is_learned(
    ranks: RankPool, line: str, features: tuple[str, ...]
) -> None:
    run = CaseSpec(line, features, tables=LEARNS).case().run
    plain = replace(run.recipe, dropout=0.0, label_smoothing=0.0, capacity=0.0, balance_loss=0.0)
    count = run.layout.ranks
    held_out = ranks.run(count, validation_loss, run)
    assert held_out == ranks.run(count, validation_loss, replace(run, recipe=plain))


@pytest.mark.parametrize(
    ("line", "features"),
    [*LAYOUTS, ("tp=2 mb=4 precision=fp8+fp64", ()), ("dp=2 zero=1 mb=2 precision=fp16", ())],
    ids=str,
)
def test_training_around_validations_is_training_without_bit_for_bit(
    ranks: RankPool, line: str, features: tuple[str, ...]
) -> None:
    run = CaseSpec(line, features, tables=LEARNS).case().run
    count = run.layout.ranks
    pairs = zip(
        ranks.run(count, train_job, run, 3, True),
        ranks.run(count, train_job, run, 3, False),
        strict=True,
    )
    for (losses, state), (losses_without, state_without) in pairs:
        assert losses == losses_without
        assert same(state, state_without) == []
