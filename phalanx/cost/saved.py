"""What a block keeps between its forward and its backward, tensor by tensor.

Every tensor is given by its bytes per token of the micro-batch and by how it is cut, so the total
of a block is three numbers that any layout can be priced with. The formula of Korthikanti et al.
2022 (arXiv:2205.05198), 34 + 5 a s / h, comes out under its assumptions (`PAPER`).

Symbols: h hidden, a heads, g kv heads, d head size, f ffn width, E experts, K experts per token,
s sequence length, t tp.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.recompute import Recompute

Cut = Literal["tp", "sequence", "whole"]
Part = Literal["input", "block", "core"]

FP32 = 4

# What is let go where a part of a block is recomputed, by the first words of its names; see
# `core.layout.RECOMPUTE_PARTS` and phalanx/trainer/engine/saved.py.
KEPT_BY = {
    "core": ("softmax", "dropped softmax"),
    "norms": ("attention input", "mlp input"),
    "mlp": ("mlp: ", "shared experts: ", "experts: after activation"),
    "activation": (
        "mlp: after activation",
        "experts: after activation",
        "shared experts: after activation",
    ),
    "latent": ("query", "key", "value"),
    "experts": ("dispatched tokens", "experts: ", "expert results"),
    "operators": (
        "attention input",
        "mlp input",
        "mlp: after activation",
        "experts: after activation",
        "shared experts: after activation",
        "keys",
        "mlp: first",
    ),
}


class Saved(NamedTuple):
    """One kind of tensor that backward will read.

    Attributes:
        name: what it is.
        bytes: per token of the micro-batch, before any cut.
        cut: over tp; over tp only where sequence parallelism cuts the sequence; or not at all.
        part: "input" outlives full recomputation, "core" is the attention core, "block" the rest.
        most: into how many parts tp can cut it; of more ranks, several keep the same. 0 sets no
            limit.
    """

    name: str
    bytes: float
    cut: Cut
    part: Part = "block"
    most: int = 0


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Where programs that compute the same keep different things.

    Attributes:
        name: of the program.
        fused_attention: scores are never stored, only the softmax statistics.
        statistics: count the statistics of norms and softmax, which papers leave out.
        angles: every block keeps its own rotary angles.
        mask_bytes: of one element of a dropout mask; 0 drops nothing.
        gradient_bytes: of an accumulated gradient.
        moment_bytes: of the two moments of Adam together; 0 means as the precision has them.
        gathers_experts: experts are cut over tp and see the rows of the whole sequence; else each
            is whole on its rank, and tp ranks send it the rows of their parts of the sequence.
        parts_as_ledger: parts of blocks are recomputed as `kept` says, which is how we do it.
        master_weights: 16-bit weights have wider copies, which the optimizer moves.
        key_gradients_travel: under cp, attention holds gradients of keys and values on their way.
        reduced_apart: under ZeRO-1 a rank's part of the reduced gradient has memory of its own.
        adds_apart: a product leaves the gradient of its matrix apart, and another pass adds it up.
        travels_on: under ZeRO-2 and 3 the last gradient of a micro-batch may travel until the
            backward of the next.
        keeps_gates: the gate of a swiglu is saved with its inputs.
        logit_kept: bytes that each logit keeps from forward to backward.
        logit_peak: bytes that each logit holds at the worst moment of the loss, where the
            vocabulary is cut over tp.
        logit_peak_whole: the same where it is not.
        context: bytes of the driver's context and of communicators: an assumption, of the size
            that `nvidia-smi` shows beside `torch.cuda.memory_reserved` in a job with NCCL.
        fragmentation: share of the allocated that the caching allocator cannot use: likewise.
    """

    name: str
    fused_attention: bool = True
    statistics: bool = True
    angles: bool = False
    mask_bytes: float = 0.0
    gradient_bytes: float = 4.0
    moment_bytes: float = 0.0
    gathers_experts: bool = False
    parts_as_ledger: bool = False
    master_weights: bool = True
    key_gradients_travel: bool = False
    reduced_apart: bool = False
    adds_apart: bool = False
    travels_on: bool = False
    keeps_gates: bool = False
    logit_kept: float = 4.0
    logit_peak: float = 10.0
    logit_peak_whole: float = 12.0
    context: float = 1.5e9
    fragmentation: float = 0.03


OURS = Stack(
    name="phalanx",
    angles=True,
    gathers_experts=True,
    parts_as_ledger=True,
    key_gradients_travel=True,
    reduced_apart=True,
    adds_apart=True,
    travels_on=True,
    logit_peak=6.0,
    logit_peak_whole=6.0,
)
EAGER = Stack(name="plain PyTorch", angles=True, reduced_apart=True, adds_apart=True)
MEGATRON = Stack(name="Megatron-LM", logit_peak_whole=10.0)
PAPER = Stack(
    name="Korthikanti et al. 2022",
    fused_attention=False,
    statistics=False,
    mask_bytes=1.0,
)


def block_saved(
    shape: ModelShape, layer: int, seq: int, element: int, stack: Stack
) -> tuple[Saved, ...]:
    """Everything that block `layer` keeps for one micro-batch.

    Args:
        shape: the model.
        layer: from 0; the first `dense_layers` of a mixture of experts have none.
        seq: s, the length that attention sees; only stored scores depend on it.
        element: bytes of one activation.
        stack: the program.
    """
    attention = _latent_attention if shape.is_mla else _attention
    return (
        *_norm("attention norm", shape, element, stack, part="input"),
        *attention(shape, seq, element, stack),
        *_mask("attention output mask", shape.hidden, stack),
        *_norm("mlp norm", shape, element, stack),
        *(_experts(shape, element, stack) if shape.routes(layer) else _mlp(shape, element)),
        *_mask("mlp output mask", shape.hidden, stack),
    )


def head_saved(shape: ModelShape, element: int, stack: Stack) -> tuple[Saved, ...]:
    """What the final norm, the projection and the loss keep."""
    return (
        *_norm("final norm", shape, element, stack, part="input"),
        Saved("head input", shape.hidden * element, "sequence"),
        Saved("logits", shape.vocab * stack.logit_kept, "tp"),
        Saved("softmax sums", FP32 if stack.statistics else 0, "whole"),
    )


def kept(saved: Iterable[Saved], recompute: Recompute) -> tuple[Saved, ...]:
    """What is left of it where whole blocks, or parts of each, are computed again."""
    if recompute.segment:
        return tuple(item for item in saved if item.part == "input")
    names = tuple(name for part in recompute.parts for name in KEPT_BY[part])
    return tuple(item for item in saved if not item.name.startswith(names))


def mlp_saved(saved: tuple[Saved, ...]) -> tuple[Saved, ...]:
    """What is let go when the MLP of a block has been differentiated, and its attention has not."""
    start = next(i for i, item in enumerate(saved) if item.name.startswith("mlp norm"))
    return saved[start:]


def bytes_per_token(saved: Iterable[Saved], layout: Layout) -> float:
    """Bytes on one rank for each token of the micro-batch, as the layout cuts them."""
    t = layout.tp
    parts = {"tp": t, "sequence": t if layout.sequence_parallel else 1, "whole": 1}
    return sum(item.bytes / min(parts[item.cut], item.most or t) for item in saved)


def _norm(
    name: str,
    shape: ModelShape,
    element: int,
    stack: Stack,
    *,
    width: int = 0,
    part: Part = "block",
) -> Iterator[Saved]:
    """Its input, and one statistic per token: two of a layernorm, which also centres."""
    h = width or shape.hidden
    yield Saved(f"{name} input", h * element, "sequence", part)
    if stack.statistics:
        count = 2 if shape.norm == "layernorm" else 1
        yield Saved(f"{name} statistics", count * FP32, "sequence")


def _mask(name: str, h: int, stack: Stack) -> Iterator[Saved]:
    if stack.mask_bytes:
        yield Saved(name, h * stack.mask_bytes, "sequence")


def _attention(shape: ModelShape, seq: int, element: int, stack: Stack) -> Iterator[Saved]:
    a, g, d = shape.heads, shape.kv_heads, shape.head_dim
    yield Saved("attention input", shape.hidden * element, "sequence")
    if stack.angles and shape.positions == "rope":
        yield Saved("rotary angles", d * element, "whole")
    if shape.qk_norm:
        for name, heads in (("query", a), ("key", g)):
            yield Saved(f"{name} norm input", heads * d * element, "tp", most=heads)
            statistics = heads * FP32 * stack.statistics
            yield Saved(f"{name} norm statistics", statistics, "tp", most=heads)
    yield Saved("query", a * d * element, "tp")
    yield Saved("keys", g * d * element, "tp", most=g)
    yield Saved("values", g * d * element, "tp", most=g)
    yield from _core(shape, seq, element, stack)
    yield Saved("attention result", a * d * element, "tp")


def _core(shape: ModelShape, seq: int, element: int, stack: Stack) -> Iterator[Saved]:
    """Softmax and what is dropped of it, or only its statistics."""
    if not stack.fused_attention:
        yield Saved("softmax", shape.heads * seq * element, "tp", "core")
        if stack.mask_bytes:
            scores = shape.heads * seq
            yield Saved("softmax mask", scores * stack.mask_bytes, "tp", "core")
            yield Saved("dropped softmax", scores * element, "tp", "core")
    elif stack.statistics:
        yield Saved("softmax statistics", shape.heads * FP32, "tp", "core")


def _latent_attention(shape: ModelShape, seq: int, element: int, stack: Stack) -> Iterator[Saved]:
    """DeepSeek-V2 (arXiv:2405.04434), section 2.1: compressed q and kv, with a norm on each."""
    a, qk = shape.heads, shape.qk_nope + shape.qk_rope
    yield Saved("attention input", shape.hidden * element, "sequence")
    if stack.angles and shape.positions == "rope":
        yield Saved("rotary angles", shape.qk_rope * element, "whole")
    for name, rank in (("query", shape.q_lora_rank), ("key-value", shape.kv_lora_rank)):
        if rank:
            yield Saved(f"{name} norm input", rank * element, "sequence")
            yield Saved(f"{name} norm statistics", FP32 * stack.statistics, "sequence")
            yield Saved(f"compressed {name}", rank * element, "sequence")
    yield Saved("query", a * qk * element, "tp")
    yield Saved("key", a * qk * element, "tp")
    yield Saved("value", a * shape.v_head * element, "tp")
    yield from _core(shape, seq, element, stack)
    yield Saved("attention result", a * shape.v_head * element, "tp")


def _mlp(shape: ModelShape, element: int) -> Iterator[Saved]:
    yield Saved("mlp input", shape.hidden * element, "sequence")
    yield from _width("mlp", shape.ffn, shape, element, "tp")


def _experts(shape: ModelShape, element: int, stack: Stack) -> Iterator[Saved]:
    """Router, rows, experts of equal load, and the results that are weighed.

    A rank sends out its own tokens K times and receives as many.
    """
    h, K, f = shape.hidden, shape.top_k, shape.expert_width
    tokens: Cut = "whole" if stack.gathers_experts else "sequence"
    width: Cut = "tp" if stack.gathers_experts else "sequence"
    yield Saved("mlp input", h * element, tokens)
    yield Saved("router", _router(shape, stack) * FP32, tokens)
    yield Saved("dispatched tokens", K * h * element, tokens)
    yield from _width("experts", K * f, shape, element, width)
    yield Saved("expert results", K * h * element, tokens)
    if shape.shared_experts:
        yield from _width("shared experts", shape.shared_experts * f, shape, element, "tp")


def _router(shape: ModelShape, stack: Stack) -> int:
    """Numbers of each token: affinities, weights, and those that these are made of.

    Others keep logits and affinities.
    """
    if not stack.gathers_experts:
        return 2 * shape.experts
    chosen = shape.top_k + 1 if shape.normalised else 0  # with their sum
    return shape.experts + shape.top_k + chosen


def _width(name: str, f: int, shape: ModelShape, element: int, cut: Cut) -> Iterator[Saved]:
    """Inputs of the activation function, and its result, which the next product reads."""
    if shape.activation == "swiglu":
        yield Saved(f"{name}: second before activation", f * element, cut)
    yield Saved(f"{name}: first before activation", f * element, cut)
    yield Saved(f"{name}: after activation", f * element, cut)
