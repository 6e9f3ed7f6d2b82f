"""What a block keeps between its forward and its backward, tensor by tensor.

Which tensors there are stands in `core/operators/`; here each becomes bytes per token of the
micro-batch, as a program stores it, so that any layout can be priced with a few sums. The formula
of Korthikanti et al. 2022 (arXiv:2205.05198), 34 + 5 a s / h, comes out under its assumptions
(`PAPER`).

Symbols: h hidden, a heads, s sequence length, t tp.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.operator import AttentionCore, Format, Operators, SavedTensor
from phalanx.core.operators import describe
from phalanx.core.recompute import Recompute

Cut = Literal["tp", "sequence", "whole"]
Part = Literal["input", "block", "core"]

FP32 = 4
_READ_BY: dict[Format, Literal["product", "both"]] = {"operand": "product", "both": "both"}


class Saved(NamedTuple):
    """One kind of tensor that backward will read, as a program stores it.

    Attributes:
        name: what it is.
        bytes: per token of the micro-batch, before any cut.
        cut: over tp; over tp only where sequence parallelism cuts the sequence; or not at all.
        part: "input" outlives full recomputation, "core" is the attention core, "block" the rest.
        most: into how many parts tp can cut it; of more ranks, several keep the same. 0 sets no
            limit.
        freed_by: the parts of a block under whose recomputation it is not saved.
        read_by: what reads it: operators, or a product, which in low precision keeps it as it
            multiplies, or both.
    """

    name: str
    bytes: float
    cut: Cut
    part: Part = "block"
    most: int = 0
    freed_by: frozenset[str] = frozenset()
    read_by: Literal["operators", "product", "both"] = "operators"


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
    block = describe(shape).block(routed=shape.routes(layer))
    return saved_by(block.all, seq, element, stack)


def head_saved(shape: ModelShape, element: int, stack: Stack) -> tuple[Saved, ...]:
    """What the final norm, the projection and the loss keep for one micro-batch.

    Args:
        shape: the model.
        element: bytes of one activation.
        stack: the program.
    """
    return saved_by(describe(shape).head, 0, element, stack)


def saved_by(operators: Operators, seq: int, element: int, stack: Stack) -> tuple[Saved, ...]:
    """Everything that operators keep for one micro-batch; see `block_saved`.

    Args:
        operators: of a block, or of an end of the model.
        seq: s, the length that attention sees; only stored scores depend on it.
        element: bytes of one activation.
        stack: the program.
    """
    found = list[Saved]()
    for operator in operators:
        for tensor in operator.saves:
            if size := _bytes_of_element(tensor, element, stack):
                found.append(_saved(tensor, size, stack))
        if isinstance(operator.computes, AttentionCore):
            found += _scores(operator.computes, seq, element, stack)
    return tuple(found)


def _bytes_of_element(tensor: SavedTensor, element: int, stack: Stack) -> float:
    """What one number of it takes; nothing if a program does not keep it."""
    sizes: dict[Format, float] = {
        "fp32": FP32,
        "statistics": FP32 * stack.statistics,
        "angles": element * stack.angles,
        "mask": stack.mask_bytes,
        "logits": stack.logit_kept,
    }
    return sizes.get(tensor.format, element)


def _saved(tensor: SavedTensor, size: float, stack: Stack) -> Saved:
    width, tokens = tensor.width, tensor.tokens
    channels = width.channels
    if tokens == "routed":
        tokens = "gathered" if stack.gathers_experts else "own"
        channels = channels if stack.gathers_experts else tensor.others or channels
    cut: Cut = "sequence" if tokens == "own" else "tp" if width.cut else "whole"
    return Saved(
        tensor.name,
        channels * size,
        cut,
        part="input" if tensor.is_input else "block",
        most=width.pieces if cut == "tp" else 0,
        freed_by=tensor.freed_by,
        read_by=_READ_BY.get(tensor.format, "operators"),
    )


def _scores(core: AttentionCore, seq: int, element: int, stack: Stack) -> Iterator[Saved]:
    """Softmax and what is dropped of it, or only its statistics."""
    a, core_alone = core.heads.channels, frozenset({"core"})

    def kind(name: str, size: float) -> Saved:
        return Saved(name, a * size, "tp", "core", freed_by=core_alone)

    if not stack.fused_attention:
        yield kind("softmax", seq * element)
        if stack.mask_bytes:
            yield kind("softmax mask", seq * stack.mask_bytes)
            yield kind("dropped softmax", seq * element)
    elif stack.statistics:
        yield kind("softmax statistics", FP32)


def kept(saved: Iterable[Saved], recompute: Recompute) -> tuple[Saved, ...]:
    """What is left of it where whole blocks, or parts of each, are computed again.

    Args:
        saved: everything that a block would keep.
        recompute: a segment keeps the input of a block alone; parts keep what they do not free.
    """
    if recompute.segment:
        return tuple(item for item in saved if item.part == "input")
    return tuple(item for item in saved if not item.freed_by & recompute.parts)


def mlp_saved(saved: tuple[Saved, ...]) -> tuple[Saved, ...]:
    """What is let go when the MLP of a block has been differentiated, and its attention has not."""
    start = next(i for i, item in enumerate(saved) if item.name.startswith("mlp norm"))
    return saved[start:]


def bytes_per_token(saved: Iterable[Saved], layout: Layout) -> float:
    """Bytes on one rank for each token of the micro-batch, as the layout cuts them.

    Args:
        saved: bytes per token before any cut.
        layout: of it tp and sp.

    Example:
        The 34 bytes per hidden channel of Korthikanti et al. 2022, but for scores:

        >>> from phalanx.catalog.load import model
        >>> gpt, layout = model("gpt-3-175b"), Layout(tp=8)
        >>> saved = kept(block_saved(gpt, 0, 2048, 2, PAPER), Recompute.parse("selective"))
        >>> bytes_per_token(saved, layout) * layout.tp / gpt.hidden
        34.0
    """
    t = layout.tp
    parts = {"tp": t, "sequence": t if layout.sequence_parallel else 1, "whole": 1}
    return sum(item.bytes / min(parts[item.cut], item.most or t) for item in saved)
