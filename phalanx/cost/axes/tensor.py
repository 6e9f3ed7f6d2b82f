"""The tensor axis: what tp and sequence parallelism send. Its twin is trainer/parallel/tensor.py.

Splits: heads, the MLP's width, the vocabulary; under sp also the sequence between them.
Sends, for S bytes of activations, s b h elements (s of one cp rank, padded where sp cuts it):

    around      forward (sp)        forward       backward (sp)                      backward
    columns     all-gather S        -             all-gather S, reduce-scatter S     all-reduce S
    rows        reduce-scatter S    all-reduce S  all-gather S                       -

A block has two of each, the embedding one of rows, the head one of columns and the two
reductions of the cross-entropy. A head whose logits are never whole makes its gradients in
forward, and gathers its input once; it reduces as often as it has chunks. Latent attention has
columns of narrower inputs instead: of the compressed query and of the compressed key-value; its
rotary key is gathered, and not again. Experts in the place of an MLP keep the sequence that they
gathered, and do not gather it again. Where t > g, t/g ranks hold the same key and value head, and
add up its gradient once it is complete. Sources: Shoeybi et al. 2019
(arXiv:1909.08053), section 3; Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2.
"""

from collections import Counter
from collections.abc import Iterator

from phalanx.core.errors import RefusedError, divisors, shorten
from phalanx.core.layout import Coordinates
from phalanx.core.model import ModelShape
from phalanx.core.run import Run
from phalanx.core.traffic import Collective, Transfer
from phalanx.cost.precision import OperandBytes, operand_bytes
from phalanx.cost.units import (
    bytes_per_element,
    passes,
    segment_ends,
    stages_at,
    tokens_at,
    units_at,
)
from phalanx.schedules.layouts import reduces_every

Messages = Counter[tuple[Collective, str, int]]  # by collective, purpose and bytes per token


def refuse(run: Run) -> None:
    """Raise RefusedError where heads or vocabulary do not divide over tp."""
    shape, tp = run.model, run.layout.tp
    fits = [t for t in divisors(shape.heads) if not shape.kv_heads % t or not t % shape.kv_heads]
    if tp not in fits:
        what = f"{shape.kv_heads} kv heads cannot be split over, or shared by,"
        if shape.heads % tp:
            what = f"{shape.heads} heads cannot be split over"
        raise RefusedError(f"{what} tp={tp}; tp can be {shorten(fits)}")
    widths = [(shape.vocab, "a vocabulary"), (shape.ffn, "an MLP width")]
    widths += [(shape.expert_width, "an expert's width")] if shape.is_moe else []
    for size, what in widths:
        if size < tp:
            raise RefusedError(f"{what} of {size} is smaller than tp={tp}; use a smaller tp")


def transfers(run: Run, at: Coordinates) -> Iterator[Transfer]:
    """What the rank at `at` sends along tp in one step."""
    layout, shape, m = run.layout, run.model, passes(run)
    if layout.tp == 1:
        return
    wide = bytes_per_element(layout)[1]
    tokens = tokens_at(run)
    sent: Messages = Counter()
    for _, layers in stages_at(run, at):
        for layer in layers:
            sent.update(_block(run, routed=shape.routes(layer)))
            sent.update(_again(run, layers, layer))
        if layers.start == 0:
            sent.update(_rows(run, 1))
        if layers.stop == shape.layers:
            sent.update(_head(run))
            yield from _loss(run, tokens, max(wide, 4))
    for (collective, purpose, size), times in sent.items():
        yield Transfer("tensor", collective, purpose, tokens * size, times * m)
    reductions = m if reduces_every(layout) else 1
    for unit in units_at(run, at):
        if unit.partial:
            size = unit.partial * wide
            yield Transfer("tensor", "all_reduce", "partial gradients", size, reductions)
        if unit.shared:
            size = unit.shared * wide
            yield Transfer("tensor", "all_reduce", "shared gradients", size, reductions)


def _block(run: Run, *, routed: bool) -> Messages:
    """Messages of one block and micro-batch, recompute left out."""
    shape = run.model
    sent = _rows(run, 2)
    for width in attention_inputs(shape):
        sent.update(_columns(run, width, operand_bytes(run.layout, width)))
    of_mlp = operand_bytes(run.layout, shape.hidden)
    sent.update(_gather(run, shape.hidden) if routed else _columns(run, shape.hidden, of_mlp))
    if shape.is_mla:
        sent.update(_gather(run, shape.qk_rope))
    return sent


def attention_inputs(shape: ModelShape) -> tuple[int, ...]:
    """Widths of what enters the products by columns of attention."""
    if shape.is_mla:
        return shape.q_lora_rank or shape.hidden, shape.kv_lora_rank
    return (shape.hidden,)


def _columns(run: Run, width: int, operand: OperandBytes) -> Messages:
    """Around products by columns, of one input of `width` that travels as an operand."""
    size = width * bytes_per_element(run.layout)[0]
    if not run.layout.sequence_parallel:
        return Counter({("all_reduce", "tp input gradient", size): 1})
    sent = Messages({("reduce_scatter", "tp input gradient", size): 1})
    sent.update(_operand("tp input", operand))
    sent.update(_operand("tp input again", operand))
    return sent


def _operand(purpose: str, operand: OperandBytes) -> Messages:
    """To have the whole sequence of an input, with its scales if they are cut like it."""
    sent = Messages({("all_gather", purpose, operand.data): 1})
    if operand.scales:
        sent["all_gather", f"{purpose} scales", operand.scales] = 1
    return sent


def _gather(run: Run, width: int) -> Messages:
    """To have the whole sequence of something, and to add up its gradient."""
    size = width * bytes_per_element(run.layout)[0]
    if not run.layout.sequence_parallel:
        return Counter({("all_reduce", "tp input gradient", size): 1})
    return Counter(
        {
            ("all_gather", "tp input", size): 1,
            ("reduce_scatter", "tp input gradient", size): 1,
        }
    )


def _rows(run: Run, count: int) -> Messages:
    """Around `count` products by rows."""
    h = run.model.hidden * bytes_per_element(run.layout)[0]
    if not run.layout.sequence_parallel:
        return Counter({("all_reduce", "tp output", h): count})
    return Counter(
        {
            ("reduce_scatter", "tp output", h): count,
            ("all_gather", "tp output gradient", h): count,
        }
    )


def _head(run: Run) -> Messages:
    """Around the projection to the vocabulary, whose input is no operand of few bits."""
    h = run.model.hidden
    size = OperandBytes(h * bytes_per_element(run.layout)[0])
    return _gather(run, h) if run.layout.logits else _columns(run, h, size)


def _loss(run: Run, tokens: int, size: int) -> Iterator[Transfer]:
    """The two reductions of the cross-entropy, for all tokens or chunk by chunk."""
    m, chunk = passes(run), run.layout.logits or tokens
    for n, times in ((chunk, tokens // chunk * m), (tokens % chunk, m)):
        if n:
            yield Transfer("tensor", "all_reduce", "loss maximum", n * size, times)
            yield Transfer("tensor", "all_reduce", "loss sums", 3 * n * size, times)


def _again(run: Run, layers: range, layer: int) -> Messages:
    """What recomputing one block of a stage repeats.

    Recomputation stops at the last tensor that backward needs: the sum that ends a segment of
    blocks is repeated only if dropout follows it, or if it is in a graph that runs whole, which
    experts are not. Of parts, those that hold a product by columns gather its input once more: mlp
    that of the MLP, operators that of the keys as well. What experts have gathered is an input of
    theirs, and comes again with the norm before it.
    """
    layout, shape, h = run.layout, run.model, run.model.hidden
    element = bytes_per_element(layout)[0]
    plain, operands = list[int](), list[int]()
    again = Messages()
    if layout.recompute.segment:
        whole = run.recipe.dropout or (layout.compile and not shape.routes(layer))
        stops = not whole and layer in segment_ends(layout, layers)
        collective: Collective = "reduce_scatter" if layout.sequence_parallel else "all_reduce"
        again[collective, "tp output", h * element] = 1 if stops else 2
        operands = [*attention_inputs(shape)]
        (plain if shape.routes(layer) else operands).append(h)
        plain += [shape.qk_rope] * shape.is_mla
    else:
        by_operator, mlp = (part in layout.recompute.parts for part in ("operators", "mlp"))
        operands = [h] * (by_operator and not shape.is_mla)
        operands += [h] * ((by_operator or mlp) and not shape.routes(layer))
        if (
            shape.routes(layer)
            and layout.sequence_parallel
            and layout.recompute.parts & {"norms", "operators"}
        ):
            again["all_gather", "tp input again", h * element] = 1
    if layout.sequence_parallel:
        for width in plain:
            again["all_gather", "tp input", width * element] += 1
        for width in operands:
            again.update(_operand("tp input", operand_bytes(layout, width)))
    return again
