"""How many bytes a block keeps for backward, by the formulas of the papers.

These assume the papers' model: GPT block, f = 4h, 16-bit activations, one-byte dropout masks,
scores in memory. `cost/memory.py` counts what our blocks really keep; with these assumptions it
must agree.

Symbols: s sequence length, b sequences per micro-batch, h hidden, a heads, t tp, p pp, L layers,
f ffn width.
"""

from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.schedules.layouts import chunks


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
    """
    s, b, h, a, t = seq, layout.mb, shape.hidden, shape.heads, layout.tp
    whole = t if layout.sequence_parallel else 1
    if layout.recompute.segment:
        return 2.0 * s * b * h / whole
    scores = 0.0 if layout.recompute.core else 5 * a * s / (h * t)
    return s * b * h * (10 / whole + 24 / t + scores)


def paper_first_stage_bytes(shape: ModelShape, layout: Layout, seq: int) -> float:
    """Bytes that the blocks of the first pipeline rank keep at the peak of 1F1B.

    p micro-batches of L/p blocks: as much as one micro-batch through all L blocks. Interleaving
    in v chunks keeps (1 + (p - 1) / (p v)) times as much. Source: Korthikanti et al. 2022
    (arXiv:2205.05198), section 4.2.3, equation 5.
    """
    p, v = layout.pp, chunks(layout)
    more = 1 + (p - 1) / (p * v) if v > 1 else 1.0
    return shape.layers * paper_layer_bytes(shape, layout, seq) * more


def linear_term_bytes(shape: ModelShape, tokens: float, layers: float, t: int) -> float:
    """The term of a block without scores, 34 h bytes per token: tokens x layers x 34 h / t."""
    return tokens * layers * 34.0 * shape.hidden / t


def checkpointed_bytes(shape: ModelShape, tokens: float, layers: float, t: int) -> float:
    """With only block inputs kept: 2 h bytes per token and block, and one block in full.

    The block whose forward is being repeated holds everything again, 34 h bytes per token.
    """
    inputs = tokens * layers * 2.0 * shape.hidden / t
    return inputs + linear_term_bytes(shape, tokens, 1, t)


def matmul_output_bytes(shape: ModelShape, tokens: float) -> float:
    """Bytes of the outputs of the three MLP matrices of every block: 2 L T (h + 2 f).

    The scaling book's "three checkpoints per layer" (chapter 5, question 2), in 16 bits.
    """
    return 2.0 * shape.layers * tokens * (shape.hidden + 2 * shape.ffn)
