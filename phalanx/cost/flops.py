"""How much arithmetic one token of training costs, and what share of the hardware it used.

Symbols: L layers, h hidden, a heads, d head size, s sequence length, V vocabulary,
N parameters that one token is multiplied with.
"""

from dataclasses import dataclass

from phalanx.core.errors import UsageError
from phalanx.core.model import ModelShape
from phalanx.core.operator import AttentionCore
from phalanx.core.operators import blocks, describe, elements, parameters_of
from phalanx.core.recompute import NONE, Recompute


@dataclass(frozen=True)
class Utilization:
    """Shares of the peak, with the convention that makes them comparable.

    Attributes:
        mfu: FLOP that the model needs, over what the hardware could have done.
        hfu: FLOP that the hardware executed (recomputation included), over the same.
        convention: what was counted as needed, in one line.
    """

    mfu: float
    hfu: float
    convention: str


def matmul_params(shape: ModelShape) -> int:
    """N: parameters that one token meets, without the input embedding.

    Counted: attention, MLP (for a mixture of experts the router, the shared experts and the
    top K of the E routed ones), biases and norms, and the output head, also where it is tied to
    the embedding. Not counted: the token table and learned positions, which are looked up.
    """
    return elements(describe(shape).head) + _active_params_of_blocks(shape)


def _active_params_of_blocks(shape: ModelShape) -> int:
    return sum(count * elements(block, shape.top_k) for block, count in blocks(shape))


def attention_flops_per_token(shape: ModelShape, seq: int, causal: bool) -> float:
    """FLOP of Q K^T and of scores times V in forward and backward, for one token.

        full      12 L a d s
        causal     6 L a d s     only the half of the scores below the diagonal

    Latent attention has query-key and value heads of different sizes: 2 d becomes their sum.
    Source: Chowdhery et al. 2022 (arXiv:2204.02311), appendix B.

    Args:
        shape: the model.
        seq: s, tokens per sequence.
        causal: count only the scores below the diagonal.
    """
    return 3 * forward_attention_flops_per_token(shape, seq, causal)


def forward_attention_flops_per_token(shape: ModelShape, seq: int, causal: bool) -> float:
    """FLOP of the attention scores in forward alone, for one token: a third of the training cost.

        full       4 L a d s
        causal     2 L a d s

    Args:
        shape: the model.
        seq: s, tokens per sequence.
        causal: count only the scores below the diagonal.
    """
    cores = sum(
        count * op.computes.heads.channels * (op.computes.query + op.computes.value)
        for block, count in blocks(shape)
        for op in block
        if isinstance(op.computes, AttentionCore)
    )
    return 2 * cores * seq * (0.5 if causal else 1.0)


def flops_per_token(shape: ModelShape, seq: int, causal: bool) -> float:
    """FLOP that training on one token needs: 6 N plus the attention scores.

        6 N + 12 L a d s    (causal: 6 N + 6 L a d s)

    2 N forward (one multiply and one add per parameter), 4 N backward (the gradient of the input
    and that of the weight). Sources: Kaplan et al. 2020 (arXiv:2001.08361), section 2.1;
    Chowdhery et al. 2022 (arXiv:2204.02311), appendix B.

    Args:
        shape: the model; see `matmul_params` for what N counts.
        seq: s, tokens per sequence.
        causal: count only the scores below the diagonal, as fused kernels compute them.

    Example:
        >>> from phalanx.catalog.load import model
        >>> f"{flops_per_token(model('llama-3.1-8b'), 8192, causal=True):.3g}"
        '5.15e+10'
    """
    return 6.0 * matmul_params(shape) + attention_flops_per_token(shape, seq, causal)


def recompute_flops_per_token(
    shape: ModelShape, seq: int, recompute: Recompute, causal: bool = True
) -> float:
    """FLOP that backward spends on computing activations again, for one token.

        none        0
        selective   4 L a d s            attention scores (causal: half)
        full        2 N' + 4 L a d s     every block; N' is N without final norm and head
        parts       2 h f, twice for swiglu, of each MLP for mlp; 2 h (g d + f) for operators, the
                    keys and one input of the activation; 0 for what is no product

    Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 5 and appendix A.

    Args:
        shape: the model.
        seq: s, tokens per sequence.
        recompute: what is computed again; full:k costs as much as full.
        causal: count only the scores below the diagonal.
    """
    scores = forward_attention_flops_per_token(shape, seq, causal)
    if recompute.segment:
        return 2.0 * _active_params_of_blocks(shape) + scores
    return scores * recompute.core + 2.0 * _repeated_params(shape, recompute.parts)


def _repeated_params(shape: ModelShape, parts: frozenset[str]) -> int:
    """Parameters of the products that recomputing parts of all blocks repeats."""
    return sum(
        count * parameter.elements(shape.top_k)
        for block, count in blocks(shape)
        for parameter in parameters_of(block)
        if parameter.again & parts
    )


def utilization(
    shape: ModelShape,
    seq: int,
    tokens_per_second: float,
    peak: float,
    recompute: Recompute = NONE,
    causal: bool = True,
) -> Utilization:
    """MFU and HFU of a measured or predicted rate.

        MFU = tokens/s x (FLOP needed per token) / peak
        HFU = tokens/s x (FLOP executed per token) / peak

    Source: Chowdhery et al. 2022 (arXiv:2204.02311), appendix B.

    Args:
        shape: the model.
        seq: s, tokens per sequence.
        tokens_per_second: of all devices together.
        peak: dense FLOP/s of all devices together, in the precision that really ran.
        recompute: none, selective or full.
        causal: count only the scores below the diagonal.

    Raises:
        UsageError: a peak that is not positive.
    """
    if not peak > 0:
        raise UsageError(f"peak is {peak} FLOP/s; utilization needs a positive one")
    needed = flops_per_token(shape, seq, causal)
    executed = needed + recompute_flops_per_token(shape, seq, recompute, causal)
    return Utilization(
        mfu=tokens_per_second * needed / peak,
        hfu=tokens_per_second * executed / peak,
        convention=describe_convention(causal),
    )


def describe_convention(causal: bool) -> str:
    """What `flops_per_token` counts, in one line for a screen or a log."""
    scores = "6 L a d s (causal half)" if causal else "12 L a d s (full square)"
    return f"6 N + {scores}; N without the input embedding; dense peak"


def rate_from_share(share: float, flops_per_token: float, peak: float) -> float:
    """Tokens per second to expect at a utilization: share x peak / FLOP per token.

    Args:
        share: MFU, where the FLOP are those that the model needs; HFU, where they are executed.
        flops_per_token: FLOP of one token; see `flops_per_token`.
        peak: dense FLOP/s of all devices together.
    """
    return share * peak / flops_per_token
