"""Bytes of every pipeline rank: the ledger of `cost/memory.py`, and what a program adds or drops.

Symbols: T tokens of a micro-batch on one rank, s sequence length, a heads, f ffn width, t tp.
"""

from collections.abc import Iterator
from dataclasses import replace

from phalanx.core.estimate import RankBytes
from phalanx.core.layout import Layout
from phalanx.core.precision import Precision
from phalanx.core.recompute import MODES, NONE, SELECTIVE
from phalanx.cost.blocks import HALF
from phalanx.cost.memory import rank_memory
from phalanx.cost.params import stage_layers, stages_of_rank
from phalanx.cost.precision import as_operands
from phalanx.cost.saved import Saved, block_saved, bytes_per_token, head_saved
from phalanx.planner.question import Question
from phalanx.schedules.layouts import placement, spec_of

SCORE_GRADIENTS = 2  # of the softmax and of what dropout left of it, while they are differentiated


def rank_bytes(question: Question) -> Iterator[RankBytes]:
    """Bytes of every pipeline rank at its worst moment."""
    layout = question.layout
    held = spec_of(layout).peak_in_flight(layout.pp, question.micro_batches, question.v)
    for rank in range(layout.pp):
        yield _rank(question, rank, held[rank])


def _rank(question: Question, rank: int, held: float) -> RankBytes:
    layout = question.layout
    known = replace(
        layout,
        precision=Precision(rest=layout.precision.rest),
        recompute=NONE if _apart(question) else layout.recompute,
    )
    stack = question.practice.stack
    memory = rank_memory(question.shape, known, question.seq, rank, held, stack)
    classes = memory.by_class()
    dropped, one = _dropped(question, rank)
    more = _gates(question, rank) - _in_eight_bits(question, rank) - dropped
    classes["activations"] += held * more / len(stages_of_rank(layout, rank))
    classes["buffers"] += _score_gradients(question) + one
    if memory.logits:
        classes["logits"] -= _logits_let_go(question, held)
    reserve = classes.pop("reserve")
    added = sum(classes.values()) - memory.allocated
    classes["reserve"] = reserve + stack.fragmentation * added
    return RankBytes(rank, memory.moment, tuple(classes.items()), held)


def _tokens(question: Question) -> float:
    return question.layout.mb * question.seq / question.layout.cp


def _kinds(question: Question, rank: int) -> dict[int, int]:
    """How many blocks of each kind a rank holds, by one layer of the kind."""
    shape, layout = question.shape, question.layout
    dense = shape.dense_layers if shape.is_moe else shape.layers
    counts = {0: 0, shape.layers - 1: 0}
    for stage in stages_of_rank(layout, rank):
        for layer in stage_layers(shape, layout, stage):
            counts[0 if layer < dense else shape.layers - 1] += 1
    return {layer: count for layer, count in counts.items() if count}


def _dropped(question: Question, rank: int) -> tuple[float, float]:
    """Bytes that a micro-batch does not keep because parts are recomputed, and those of one block.

    The modes of the ledger are left to it.
    """
    layout, total, most = question.layout, 0.0, 0.0
    if not _apart(question):
        return 0.0, 0.0
    for layer, count in _kinds(question, rank).items():
        saved = block_saved(question.shape, layer, question.seq, HALF, question.practice.stack)
        gone = _gone(saved, layout) * _tokens(question)
        total += count * gone
        most = max(most, gone)
    return total, most


def _apart(question: Question) -> bool:
    """Whether another program recomputes parts of blocks: the ledger knows only ours."""
    layout = question.layout
    ledger = layout.recompute in MODES or layout.recompute.segment > 0
    return not (ledger or question.practice.stack.parts_as_ledger)


def _gone(saved: tuple[Saved, ...], layout: Layout) -> float:
    """Bytes per token that one block does not keep."""
    parts = layout.recompute.parts
    if "operators" in parts:
        return _gone_by_operator(saved, layout)
    return bytes_per_token([item for item in saved if item.freed_by & parts], layout)


def _gone_by_operator(saved: tuple[Saved, ...], layout: Layout) -> float:
    """All but the block's input, the attention result, and the results of every second product."""
    products = ("query", "keys", "values")
    inputs = [item for item in saved if item.part == "input" or item.name == "attention result"]
    wide = ("mlp: first", "mlp: second", "experts: first", "experts: second")
    outputs = [item for item in saved if item.name.startswith((*products, *wide))]
    kept = bytes_per_token(inputs, layout) + bytes_per_token(outputs, layout) / 2
    sums = [item for item in saved if item.name == "mlp input"]  # as wide as the two sums, halved
    return bytes_per_token(saved, layout) - kept - bytes_per_token(sums, layout)


def _gates(question: Question, rank: int) -> float:
    """Bytes of the gates that a program keeps beside the inputs of its swiglu."""
    shape, layout = question.shape, question.layout
    if not question.practice.keeps_gates or shape.activation != "swiglu":
        return 0.0
    if layout.recompute.segment:
        return 0.0
    blocks = sum(_kinds(question, rank).values())
    return blocks * HALF * _tokens(question) * shape.ffn / layout.tp


def _in_eight_bits(question: Question, rank: int) -> float:
    """Bytes that inputs of products do not take in few bits."""
    layout, total = question.layout, 0.0
    if not layout.precision.recipe or layout.recompute not in (NONE, SELECTIVE):
        return 0.0
    for layer, count in _kinds(question, rank).items():
        saved = block_saved(question.shape, layer, question.seq, HALF, question.practice.stack)
        less = bytes_per_token(saved, layout) - bytes_per_token(as_operands(saved, layout), layout)
        total += count * _tokens(question) * less
    return total


def head_waits(layout: Layout) -> bool:
    """Whether the weight gradient of the head comes later, on a rank with no other stage."""
    alone = len(placement(layout).stages_of(layout.pp - 1)) == 1
    return alone and spec_of(layout).splits_backward


def _logits_let_go(question: Question, held: float) -> float:
    """Bytes of logits that only an input gradient needs, where weight gradients come later.

    For those the last rank keeps the gradient of the logits, in 16 bits.
    """
    layout = question.layout
    if not head_waits(layout) or layout.logits:
        return 0.0
    saved = head_saved(question.shape, HALF, question.practice.stack)
    each = bytes_per_token(saved, layout) - HALF * question.shape.vocab / layout.tp
    return max(held - 1, 0.0) * max(each, 0.0) * _tokens(question)


def _score_gradients(question: Question) -> float:
    """Gradients of scores that are in memory: 2 x 2 a s T / t."""
    if question.practice.fused_attention:
        return 0.0
    heads = question.shape.heads / question.layout.tp
    return SCORE_GRADIENTS * HALF * heads * question.seq * _tokens(question)
