"""Softmax attention itself, between the projections: the same for every kind of heads."""

from typing import NamedTuple, cast

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from phalanx.core.model import ModelShape
from phalanx.trainer.model.batch import MicroBatch
from phalanx.trainer.ops.flash import ScoreRule


class Attending(NamedTuple):
    """How a layer attends.

    Attributes:
        rule: how scores are made, and which of them count.
        sinks: [a], a score of each head of this rank that selects nothing; or None.
        recompute: keep only q, k and v, and do it again in backward.
    """

    rule: ScoreRule
    sinks: Tensor | None
    recompute: bool


def rule_of(shape: ModelShape, layer: int) -> ScoreRule:
    """How scores are made in a layer.

    Args:
        shape: the model.
        layer: from 0.
    """
    return ScoreRule(shape.window_of(layer), shape.attention_cap, shape.attention_scale)


def attend(q: Tensor, k: Tensor, v: Tensor, batch: MicroBatch, how: Attending) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, causal and within documents, without keeping the scores.

    Args:
        q: [s/c, b, a, d].
        k: [s/c, b, g, d]; a is a multiple of g.
        v: [s/c, b, g, d_v]; d_v is at most d.
        batch: says which documents there are, and which ranks hold the rest of the sequence.
        how: the layer attends.

    Returns:
        [s/c, b, a d_v].
    """
    core, given = batch.context.attend, (q, k, v, batch.documents, how.rule, how.sinks)
    if not how.recompute:
        return core(*given)
    again = checkpoint(core, *given, use_reentrant=False, preserve_rng_state=False)
    return cast(Tensor, again)
