"""The tensor axis: what tp and sequence parallelism send. Its twin is trainer/parallel/tensor.py.

Splits: heads, the MLP's width, the vocabulary; under sp also the sequence between them.
Sends, for S bytes of activations, s b h elements (s of one cp rank, padded where sp cuts it):

    around      forward (sp)        forward       backward (sp)                      backward
    columns     all-gather S        -             all-gather S, reduce-scatter S     all-reduce S
    gather      all-gather S        -             reduce-scatter S                   all-reduce S
    rows        reduce-scatter S    all-reduce S  all-gather S                       -

Which operator has which of them, and how wide, stands in `core/operators/`. A head whose logits
are never whole makes its gradients in forward, and gathers its input once; it reduces the two
numbers of the cross-entropy as often as it has chunks. Where t > g, t/g ranks hold the same key
and value head, and add up its gradient once it is complete.

Recomputation gathers inputs again under sp. It stops at the last tensor that backward needs: the
sum that ends a segment of blocks is repeated only if dropout follows it, or if it is in a graph
that runs whole, which experts are not. Sources: Shoeybi et al. 2019 (arXiv:1909.08053), section 3;
Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from phalanx.core.message import Collective
from phalanx.core.operator import UNITS, Boundary, CrossEntropy, Operators
from phalanx.cost.holdings import Place, Share
from phalanx.cost.messages.unit import Among, Behind, Pass, Setting, UnitMessage
from phalanx.cost.params import UnitSize
from phalanx.cost.precision import OperandBytes, operand_bytes
from phalanx.cost.table import Booleans, Integers, Table


def messages(setting: Setting) -> Iterator[UnitMessage]:
    """What every unit sends along tp."""
    if not (setting.table.tp > 1).any():
        return
    for unit in UNITS:
        operators = setting.model.of(unit)
        for operator in operators:
            if operator.boundary:
                last = operator.boundary is _last_sum(operators)
                yield from _around(setting, unit, operator.boundary, is_last=last)
            if isinstance(operator.computes, CrossEntropy):
                yield from _loss(setting)
    for size in setting.sizes:
        yield from _incomplete_gradients(setting, size)


def _last_sum(operators: Operators) -> Boundary | None:
    """The sum over ranks that ends a unit."""
    boundaries = [each.boundary for each in operators if each.boundary]
    return next((each for each in reversed(boundaries) if each.kind == "rows"), None)


class _Sent(NamedTuple):
    """One kind of message, before it is known in which rows it is sent."""

    collective: Collective
    purpose: str
    per_token: int
    when: Pass
    behind: Behind = "nothing"


def _message(
    setting: Setting, unit: Place, sent: _Sent, rows: Booleans, share: Share = "all"
) -> UnitMessage:
    return UnitMessage(
        axis="tensor",
        among="tp",
        collective=sent.collective,
        purpose=sent.purpose,
        bytes=setting.tokens * sent.per_token,
        times=np.where(rows & (setting.table.tp > 1), 1, 0),
        when=sent.when,
        unit=unit,
        share=share,
        behind=sent.behind,
    )


def _around(
    setting: Setting, unit: Place, boundary: Boundary, *, is_last: bool
) -> Iterator[UnitMessage]:
    """What travels around one operator; nothing recomputes the ends of the model."""
    if boundary.kind == "rows":
        yield from _rows(setting, unit, boundary)
        if "block" in unit:
            yield from _sums_again(setting, unit, boundary, is_last=is_last)
        return
    yield from _columns(setting, unit, boundary)
    if "block" in unit:
        yield from _gathered_again(setting, unit, boundary)


def _rows(setting: Setting, unit: Place, boundary: Boundary) -> Iterator[UnitMessage]:
    sp, size = setting.table.sp, boundary.width * setting.element
    beside: Behind = "product" if boundary.beside_product else "nothing"
    yield _message(setting, unit, _Sent("all_reduce", "tp output", size, "forward"), ~sp)
    forward = _Sent("reduce_scatter", "tp output", size, "forward", beside)
    yield _message(setting, unit, forward, sp)
    backward = _Sent("all_gather", "tp output gradient", size, "input gradient", beside)
    yield _message(setting, unit, backward, sp)


def _columns(setting: Setting, unit: Place, boundary: Boundary) -> Iterator[UnitMessage]:
    """Of columns, or of an input that is gathered once."""
    table, size = setting.table, boundary.width * setting.element
    beside: Behind = "product" if boundary.beside_product else "nothing"
    for collective, rows in _sums(table):
        sent = _Sent(collective, "tp input gradient", size, "input gradient", beside)
        yield _message(setting, unit, sent, rows)
    for sent in _operand(setting, boundary, "tp input", "forward"):
        yield _message(setting, unit, sent, table.sp)
    if boundary.kind == "columns":
        again = table.sp & ((table.logits == 0) | (unit != "head"))
        for sent in _operand(setting, boundary, "tp input again", "weight gradient"):
            yield _message(setting, unit, sent, again)


def _operand(setting: Setting, boundary: Boundary, purpose: str, when: Pass) -> Iterator[_Sent]:
    """The whole sequence of an input, with its scales if they are cut like it."""
    operand = OperandBytes(boundary.width * setting.element)
    if boundary.low_precision:
        operand = operand_bytes(setting.table.precision, boundary.width)
    beside: Behind = "product" if boundary.beside_product else "nothing"
    yield _Sent("all_gather", purpose, operand.data, when, beside)
    if operand.scales:
        yield _Sent("all_gather", f"{purpose} scales", operand.scales, when, beside)


def _sums_again(
    setting: Setting, unit: Place, boundary: Boundary, *, is_last: bool
) -> Iterator[UnitMessage]:
    """The sums that recomputation of whole blocks repeats."""
    table, size = setting.table, boundary.width * setting.element
    beside: Behind = "product" if boundary.beside_product else "nothing"
    segments = setting.by_segment
    runs_whole = (table.recipe.dropout > 0) | (table.compile & (unit != "routed block"))
    everywhere = segments & (runs_whole | (not is_last))
    for collective, sp in _sums(table):
        sent = _Sent(collective, "tp output", size, "recompute", beside)
        yield _message(setting, unit, sent, everywhere & sp)
        yield _message(setting, unit, sent, segments & ~everywhere & sp, "not last")


def _gathered_again(setting: Setting, unit: Place, boundary: Boundary) -> Iterator[UnitMessage]:
    """The inputs that recomputation of blocks, or of parts of them, gathers once more."""
    table = setting.table
    segments = table.sp & setting.by_segment
    parts = table.sp & table.recompute.test(lambda r: bool(r.parts & boundary.again))
    for sent in _operand(setting, boundary, "tp input", "recompute"):
        yield _message(setting, unit, sent, segments)
        if boundary.kind == "columns":
            yield _message(setting, unit, sent, parts)
    if boundary.kind == "gather":
        for sent in _operand(setting, boundary, "tp input again", "recompute"):
            yield _message(setting, unit, sent, parts)


def _sums(table: Table) -> tuple[tuple[Collective, Booleans], ...]:
    """How ranks add up, and in which rows."""
    return ("reduce_scatter", table.sp), ("all_reduce", ~table.sp)


def _loss(setting: Setting) -> Iterator[UnitMessage]:
    """The two reductions of the cross-entropy, for all tokens or chunk by chunk."""
    table, size = setting.table, max(setting.wide, 4)
    tokens = setting.tokens
    chunk = np.where(table.logits > 0, table.logits, tokens)
    for n, times in ((chunk, tokens // chunk), (tokens % chunk, (tokens % chunk > 0) * 1)):
        for purpose, numbers in (("loss maximum", 1), ("loss sums", 3)):
            yield UnitMessage(
                axis="tensor",
                among="tp",
                collective="all_reduce",
                purpose=purpose,
                bytes=numbers * n * size,
                times=np.where(table.tp > 1, times, 0),
                when="forward",
                unit="head",
            )


def _incomplete_gradients(setting: Setting, size: UnitSize) -> Iterator[UnitMessage]:
    """Sums of what tp ranks that hold the same parameters have of their gradient."""
    every = setting.reduces_every
    kinds: tuple[tuple[Among, str, Integers], ...] = (
        ("tp", "partial gradients", size.partial),
        ("kv replicas", "shared gradients", size.shared),
    )
    for among, purpose, elements in kinds:
        passes: tuple[tuple[Pass, Booleans], ...] = (("weight gradient", every), ("step", ~every))
        for when, rows in passes:
            yield UnitMessage(
                axis="tensor",
                among=among,
                collective="all_reduce",
                purpose=purpose,
                bytes=elements * setting.wide,
                times=np.where(rows & (setting.table.tp > 1) & (elements > 0), 1, 0),
                when=when,
                unit=size.unit,
                behind="nothing" if when == "step" else "next unit",
            )
