"""Softmax attention itself, between the projections: the same for every kind of heads."""

from typing import cast

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from phalanx.trainer.model.batch import MicroBatch


def attend(q: Tensor, k: Tensor, v: Tensor, batch: MicroBatch, *, recompute: bool) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, causal and within documents, without keeping the scores.

    Args:
        q: [s/c, b, a, d].
        k: [s/c, b, g, d]; a is a multiple of g.
        v: [s/c, b, g, d_v]; d_v is at most d.
        batch: says which documents there are, and which ranks hold the rest of the sequence.
        recompute: keep only q, k and v, and do it again in backward.

    Returns:
        [s/c, b, a d_v].
    """
    core, documents = batch.context.attend, batch.documents
    if not recompute:
        return core(q, k, v, documents)
    again = checkpoint(core, q, k, v, documents, use_reentrant=False, preserve_rng_state=False)
    return cast(Tensor, again)
