"""Memory of a rank: published peaks, the classes, and what must hold for every layout."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.catalog import load
from phalanx.core.errors import UsageError
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.cost.memory import RankMemory, rank_memory
from phalanx.cost.parameter_memory import state_bytes
from phalanx.cost.saved import MEGATRON, OURS, PAPER, Stack
from phalanx.cost.state import sharded

LLAMA_12 = replace(load.model("llama-3-70b"), layers=12)


def memory(line: str, in_flight: float = 1, pp_rank: int = 0, stack: Stack = OURS) -> RankMemory:
    layout = Layout.parse(f"precision=bf16 {line}")
    return rank_memory(LLAMA_12, layout, 4096, pp_rank, in_flight, stack)


@pytest.mark.parametrize(
    ("line", "in_flight", "gib"),
    [
        ("pp=2 dp=4", 2, 66.55),
        ("tp=2 dp=4", 1, 60.68),
        ("tp=4 dp=2", 1, 39.07),
        ("tp=8", 1, 28.29),
    ],
)
def test_megatron_lm_peaks_of_llama_3_70b_in_12_layers_come_out(
    line: str, in_flight: float, gib: float
):
    # Allocated on B200, MooreThreads/SimuMax docs/b200/b200_release_v1.2_summary.md.
    planned = memory(line, in_flight, stack=MEGATRON).allocated / 2**30
    assert planned == pytest.approx(gib, rel=0.025)


def test_the_parts_add_up_to_the_total():
    found = memory("tp=2 pp=2 dp=2", 2)
    assert sum(found.by_class().values()) == found.total
    assert found.total == found.allocated + found.reserve


@given(
    zero=st.integers(0, 3),
    dp=st.sampled_from([2, 8, 64]),
    tp=st.sampled_from([1, 8]),
)
def test_the_state_of_a_dense_rank_is_the_papers_table(zero: int, dp: int, tp: int):
    layout = Layout(zero=zero, dp=dp, tp=tp, precision="bf16")
    found = rank_memory(LLAMA_12, layout, 4096, 0, 1, MEGATRON)
    per_param = sharded(state_bytes(layout.precision, layout.zero_stage, MEGATRON), zero, dp)
    held = found.weights / per_param.weights if per_param.weights else None
    parts = (found.weights, found.gradients, found.optimizer)
    expected = (per_param.weights, per_param.gradients, per_param.optimizer)
    held = held or found.optimizer / per_param.optimizer
    assert parts == pytest.approx([held * each for each in expected])


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from(["none", "selective", "full"]))
def test_cutting_more_never_needs_more(tp: int, recompute: str):
    here = memory(f"tp={tp} recompute={recompute}").total
    assert memory(f"tp={2 * tp} recompute={recompute}").total < here
    assert memory(f"tp={tp} recompute={recompute} dp=8").total <= here


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_higher_zero_stage_keeps_less_state(zero: int):
    lower, higher = memory(f"dp=64 zero={zero}"), memory(f"dp=64 zero={zero + 1}")

    def state(m: RankMemory) -> float:
        return m.weights + m.gradients + m.optimizer

    assert state(higher) < state(lower)


def test_every_micro_batch_in_flight_costs_one_more_pass():
    one, two, three = (memory("pp=4", n).activations for n in (1, 2, 3))
    assert three - two == pytest.approx(two - one)
    assert one > 0


@pytest.mark.parametrize(("precision", "undone"), [("bf16", 12), ("fp32", 12), ("fp64", 24)])
def test_an_update_that_may_be_taken_back_copies_weights_and_moments(precision: str, undone: int):
    layout = Layout.parse(f"dp=4 pp=2 precision={precision} recompute=full optimistic=on zero=0")
    found = rank_memory(LLAMA_12, layout, 64, 0, 1)
    assert found.moment == "update"
    assert found.activations == 0
    params = found.weights / {"bf16": 2, "fp32": 4, "fp64": 8}[precision]
    assert found.buffers == pytest.approx(undone * params, rel=1e-2)


def test_the_last_rank_peaks_at_its_loss_and_the_first_in_backward():
    assert memory("pp=4", 4, 0).moment == "backward"
    last = memory("pp=4", 1, 3)
    assert last.moment == "loss"
    # their gradient in 16 bits, beside that of the table, is worse than the logits in 32
    assert last.logits > 2 * 4096 * 128256
    assert last.buffers > 2 * 128256 * LLAMA_12.hidden
    assert memory("pp=4 mb=4", 1, 3).logits > 4 * 4 * 4096 * 128256


def test_gpipe_has_put_by_the_logits_of_every_micro_batch():
    one, all_of_them = memory("pp=4", 1, 3), memory("pp=4 schedule=gpipe", 8, 3)
    assert all_of_them.logits > 3 * one.logits


def test_full_recomputation_trades_activations_for_one_block():
    kept = memory("recompute=none")
    again = memory("recompute=full")
    assert again.activations < kept.activations / 5


def test_fp32_weights_are_their_own_master_except_where_they_come_and_go():
    plain, gathered = Layout(precision="fp32"), Layout(precision="fp32", dp=8, zero=3)
    assert state_bytes(plain.precision, 0, OURS) == (4, 4, 0, 8)
    assert state_bytes(gathered.precision, 3, OURS) == (0, 4, 4, 8)
    assert state_bytes(Layout(precision="bf16").precision, 0, OURS) == (2, 4, 4, 8)


def test_stored_scores_grow_with_the_square_of_the_sequence():
    shape = ModelShape(hidden=1024, heads=16, layers=2, activation="gelu")

    def activations(seq: int, stack: Stack) -> float:
        layout = Layout(precision="bf16")
        return rank_memory(shape, layout, seq, 0, 1, stack).activations

    assert activations(8192, PAPER) > 3 * activations(4096, PAPER)
    assert activations(8192, OURS) == pytest.approx(2 * activations(4096, OURS))


def test_context_parallelism_divides_activations():
    assert memory("cp=4").activations == pytest.approx(memory("").activations / 4)


def test_a_precision_that_only_a_device_knows_and_a_rank_that_is_not_are_refused():
    with pytest.raises(UsageError, match="name the precision"):
        rank_memory(LLAMA_12, Layout(), 4096, 0, 1)
    with pytest.raises(UsageError, match="pipeline rank 1 of pp=1"):
        memory("", pp_rank=1)
