"""Softmax attention itself, between the projections: the same for every kind of heads."""

from typing import cast

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from phalanx.train.kernels import attention
from phalanx.train.model.batch import MicroBatch


def attend(q: Tensor, k: Tensor, v: Tensor, batch: MicroBatch, *, recompute: bool) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, causal and within documents, without keeping the scores.

    Args:
        q: [s, b, a, d].
        k: [s, b, g, d]; a is a multiple of g.
        v: [s, b, g, d_v]; d_v is at most d.
        batch: says which documents there are.
        recompute: keep only q, k and v, and do it again in backward.

    Returns:
        [s, b, a d_v].
    """
    mask = batch.attention_mask()
    if not recompute:
        return _attend(q, k, v, mask)
    again = checkpoint(_attend, q, k, v, mask, use_reentrant=False, preserve_rng_state=False)
    return cast(Tensor, again)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return attention(q, k, v, mask).permute(2, 0, 1, 3).flatten(2)
