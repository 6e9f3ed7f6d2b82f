"""How many bytes a block keeps for backward, by the formulas of the papers.

These assume the papers' model: GPT block, f = 4h, 16-bit activations, one-byte dropout masks,
scores in memory. `cost/memory.py` counts what our blocks really keep; with these assumptions it
must agree.

Symbols: s sequence length, b sequences per micro-batch, h hidden, a heads, t tp, p pp, L layers,
f ffn width.
"""

from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape


def paper_layer_bytes(shape: ModelShape, layout: Layout, seq: int) -> float:
    """Bytes that one block keeps for one micro-batch on one rank.

        none                s b h (34 + 5 a s / h)
        tp                  s b h (10 + 24/t + 5 a s / (h t))
        tp and sp           s b h / t (34 + 5 a s / h)
        selective           the same without the term in a s / h
        full                2 s b h, over t where sp splits it

    The 10 are the norm and dropout inputs that tp leaves whole and sp splits. Source: Korthikanti
    et al. 2022 (arXiv:2205.05198), equations 1, 2, 4 and table 2.

    Args:
        shape: the model; only h and a are used.
        layout: tp, sp, mb and recompute are used.
        seq: s, tokens per sequence.

    Example:
        The paper's 80 a h for the scores of GPT-3, beside 34:

        >>> from phalanx.catalog.load import model
        >>> gpt = model("gpt-3-175b")
        >>> paper_layer_bytes(gpt, Layout(), seq=2048) / (2048 * gpt.hidden)
        114.0
    """
    s, b, h, a, t = seq, layout.mb, shape.hidden, shape.heads, layout.tp
    whole = t if layout.sequence_parallel else 1
    if layout.recompute.segment:
        return 2.0 * s * b * h / whole
    scores = 0.0 if layout.recompute.core else 5 * a * s / (h * t)
    return s * b * h * (10 / whole + 24 / t + scores)


def linear_term_bytes(shape: ModelShape, tokens: float, layers: float, t: int) -> float:
    """The term without scores, of all blocks of a rank: tokens x layers x 34 h / t.

    Source: Korthikanti et al. 2022 (arXiv:2205.05198), equation 4, without 5 a s / h; tp and sp
    both cut everything.

    Args:
        shape: the model; only its hidden is used.
        tokens: s b of all micro-batches in flight, before tp cuts them.
        layers: blocks of the rank; a mean need not be whole.
        t: tp.
    """
    return tokens * layers * 34.0 * shape.hidden / t


def checkpointed_bytes(shape: ModelShape, tokens: float, layers: float, t: int) -> float:
    """With only block inputs kept: 2 h bytes per token and block, and one block in full.

    The block whose forward is being repeated holds everything again, 34 h bytes per token.
    Source: Korthikanti et al. 2022 (arXiv:2205.05198), table 2 and equation 4; sp cuts both.

    Args:
        shape: the model; only its hidden is used.
        tokens: s b of all micro-batches in flight, before tp cuts them.
        layers: blocks of the rank; a mean need not be whole.
        t: tp.
    """
    inputs = tokens * layers * 2.0 * shape.hidden / t
    return inputs + linear_term_bytes(shape, tokens, 1, t)
