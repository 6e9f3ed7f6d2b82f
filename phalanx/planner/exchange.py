"""What the data axis adds to a step: the gathers and reductions that nothing hides."""

from typing import NamedTuple

from phalanx.core.estimate import PricedMessage, Term
from phalanx.cost.blocks import HALF
from phalanx.cost.compute import Passes
from phalanx.cost.params import copies, rank_held
from phalanx.cost.wires import Group, seconds
from phalanx.planner.question import Question
from phalanx.planner.stages import data_links, exposed_share, group_links


class Exchange(NamedTuple):
    """The data axis of one step: its terms and its messages."""

    terms: tuple[Term, ...] = ()
    messages: tuple[PricedMessage, ...] = ()


class Cover(NamedTuple):
    """Arithmetic that messages may hide behind: one micro-batch on a rank, and its units."""

    passes: Passes
    units: int


def exchange(question: Question, cover: Cover) -> Exchange:
    """The data axis of the rank that finishes last, which is the first one.

    Gradients hide behind the backward of the last micro-batch and weights behind the forward of
    the first, if the program lets them; the part of one unit always shows.

    Args:
        question: what is priced.
        cover: one micro-batch on the first rank.
    """
    layout = question.layout
    if layout.dp * layout.cp == 1:
        return Exchange()
    found = _unit_by_unit(question, cover) if layout.zero_stage >= 2 else _once(question, cover)
    copied = _between_copies(question, cover)
    return Exchange(found.terms + copied.terms, found.messages + copied.messages)


def _unit_by_unit(question: Question, cover: Cover) -> Exchange:
    """ZeRO-2 and 3: the stages carry most messages; the ends of the step show here.

    Under ZeRO-2 weights are gathered once a step, as under ZeRO-1.
    """
    on = data_links(question)
    params = rank_held(question.shape, question.layout, 0).total
    unit = params / cover.units
    reduce = seconds("reduce_scatter", unit * question.practice.gradient, on)
    last = Term("last reduction", reduce, worth=reduce)
    if question.layout.zero_stage == 3:
        gather = seconds("all_gather", unit * HALF, on)
        return Exchange((Term("first gather", gather, worth=gather), last))
    gathered = _gather_once(question, cover, params)
    return Exchange((*gathered.terms, last), gathered.messages)


def _once(question: Question, cover: Cover) -> Exchange:
    """ZeRO-0 and 1: gradients are reduced once a step, and weights gathered once."""
    layout, practice, on = question.layout, question.practice, data_links(question)
    params, passes = rank_held(question.shape, layout, 0).total, cover.passes
    name = "reduce_scatter" if layout.zero_stage else "all_reduce"
    size, behind = params * practice.gradient, passes.I + passes.W
    shown = _shown(question, (name, size), behind, cover.units, hides=practice.hides_gradients)
    terms = [Term("reduction of gradients", shown, worth=shown)]
    ranks, lasts = on.group.size, seconds(name, size, on)
    messages = [PricedMessage("data", name, "gradients", size, 1, lasts, shown, ranks)]
    gathered = _gather_once(question, cover, params) if layout.zero_stage else Exchange()
    return Exchange((*terms, *gathered.terms), (*messages, *gathered.messages))


def _gather_once(question: Question, cover: Cover, params: float) -> Exchange:
    """The new weights, gathered once a step, before the first forward."""
    name, size, on = "all_gather", params * HALF, data_links(question)
    hides, units = question.practice.hides_weights, cover.units
    shown = _shown(question, (name, size), cover.passes.F, units, hides=hides)
    lasts, ranks = seconds(name, size, on), on.group.size
    message = PricedMessage("data", name, "weights", size, 1, lasts, shown, ranks)
    return Exchange((Term("gather of weights", shown, worth=shown),), (message,))


def _between_copies(question: Question, cover: Cover) -> Exchange:
    """HSDP: once a step, every rank sums its part of the gradients with the other sharded copies.

    It hides behind what the reduction inside a copy leaves of the backward. Its twin is
    `cost/messages/data.py`.
    """
    layout, practice = question.layout, question.practice
    if not layout.zero_stage or layout.replicas == 1:
        return Exchange()
    held, group = rank_held(question.shape, layout, 0), copies(layout)
    inside = seconds("reduce_scatter", held.total * practice.gradient, data_links(question))
    part = (held.shared / group.shared + held.experts / group.experts) * practice.gradient
    across = Group(layout.replicas, question.stride["dp"] * layout.shards)
    lasts = seconds("all_reduce", part, group_links(question, across))
    behind = max(cover.passes.I + cover.passes.W - inside, 0.0) * (1 - 1 / cover.units)
    shown = lasts
    if practice.hides_gradients:
        shown = max(lasts * exposed_share(question, lasts, behind), lasts / cover.units)
    message = PricedMessage(
        "data", "all_reduce", "gradients of copies", part, 1, lasts, shown, across.size
    )
    return Exchange((Term("reduction over copies", shown, worth=shown),), (message,))


def _shown(
    question: Question, message: tuple[str, float], behind: float, units: int, *, hides: bool
) -> float:
    """Seconds of a collective, by name and size, that so much arithmetic cannot hide."""
    lasts = seconds(*message, data_links(question))
    if not hides:
        return lasts
    rest = lasts * exposed_share(question, lasts, behind * (1 - 1 / units))
    return max(rest, lasts / units)
