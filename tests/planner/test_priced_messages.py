"""What an estimate prices is what the trainer sends: message by message, for any layout."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from phalanx.catalog import load
from phalanx.core.errors import RefusedError
from phalanx.core.layout import Coordinates, Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe, Run
from phalanx.cost.messages import rank_messages
from phalanx.planner.estimate import Priced
from phalanx.planner.workload import workload_of

SMALL = ModelShape(name="small", layers=8, hidden=1024, heads=16, kv_heads=4, vocab=32000)
LATENT = replace(
    SMALL, kv_heads=16, q_lora_rank=96, kv_lora_rank=64, qk_nope=48, qk_rope=16, v_head=64
)
EXPERTS = replace(SMALL, experts=8, top_k=2, moe_ffn=1024, shared_experts=1, dense_layers=1)
TIED = replace(SMALL, tied=True, qk_norm=True)
SHAPES = [SMALL, LATENT, EXPERTS, TIED, replace(LATENT, experts=8, top_k=2, moe_ffn=512)]
PRECISIONS = ["bf16", "bf16", "fp8", "fp8-current", "fp8-block", "mxfp8"]
MODES = ["none", "selective", "full", "full:2", "full:3", "mlp", "norms", "operators", "activation"]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """A run that the trainer takes, with every axis and every key that changes messages."""
    shape = draw(st.sampled_from(SHAPES))
    schedule = draw(st.sampled_from(["1f1b", "1f1b", "interleaved", "zb-v", "dualpipe"]))
    pp = draw(st.sampled_from([1, 1, 2, 4]))
    dp = draw(st.sampled_from([1, 2, 4]))
    layout = Layout(
        dp=dp,
        pp=pp,
        tp=draw(st.sampled_from([1, 2, 4, 8])),
        cp=draw(st.sampled_from([1, 1, 2, 4])),
        ep=draw(st.sampled_from([1, 2, 4])) if shape.is_moe else 1,
        zero=draw(st.integers(0, 3)),
        shard=draw(st.sampled_from([0, 0, 1, dp])),
        v=2 if schedule == "interleaved" and pp > 1 else 0,
        schedule=schedule if pp > 1 else "1f1b",
        mb=draw(st.sampled_from([1, 2])),
        recompute=draw(st.sampled_from(MODES)),
        precision=draw(st.sampled_from(PRECISIONS)),
        sp=draw(st.sampled_from([None, None, False])),
        logits=draw(st.sampled_from([0, 0, 768])),
        reshard=draw(st.sampled_from([True, True, False])),
        context=draw(st.sampled_from(["ring", "gather", "ulysses"])),
        offload=draw(st.sampled_from(["none", "none", "activations", "optimizer"])),
    )
    m = 2 * pp * draw(st.integers(1, 2))
    recipe = Recipe(seq=2048, batch=layout.dp * layout.mb * m)
    return Run(model=shape, layout=layout, recipe=recipe)


def summed(messages) -> Counter[tuple[str, str, str]]:
    """Bytes of a step by axis, collective and purpose."""
    total = Counter()
    for message in messages:
        key = message.axis, message.collective, message.purpose
        total[key] += message.bytes * message.times
    return total


@settings(max_examples=300, deadline=None)
@given(runs())
def test_priced_messages_are_sent_messages(run: Run):
    cluster = replace(load.cluster("h100x8"), count=run.layout.ranks)
    try:
        workload, layout = workload_of(
            run.model, cluster, run.layout, run.recipe.seq, run.recipe.batch
        )
    except RefusedError:
        assume(False)
        raise
    priced = Priced(workload, layout)
    at = Coordinates(0, priced.pipeline.busiest, 0, 0)
    declared = summed(rank_messages(replace(run, layout=layout), at))
    assert summed(priced.estimate().messages) == pytest.approx(declared)
