"""What one micro-batch costs on every stage of the pipeline, by what the time goes to.

Symbols: T tokens of a micro-batch on one rank, h hidden, g kv heads, d head size, K experts per
token, t tp, c cp.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from phalanx.cost.blocks import HALF, Slice, block_work, embedding_work, head_work
from phalanx.cost.compute import Cost, Passes, Work, again, total
from phalanx.cost.params import block_held, copies, embedding_held, head_held, stage_layers
from phalanx.cost.wires import Group, Links, links, seconds
from phalanx.plan.question import Question

NOTHING = Passes()


class Sent(NamedTuple):
    """One kind of message of one unit and micro-batch, in the pass that sends it.

    Attributes:
        axis: which one.
        collective: the operation.
        purpose: what it is for.
        bytes: of the full vector.
        times: how often in forward and in backward.
        seconds: of one.
        exposed: seconds of one in forward and in backward that no arithmetic hides.
    """

    axis: str
    collective: str
    purpose: str
    bytes: float
    times: tuple[float, float]
    seconds: float
    exposed: tuple[float, float]


@dataclass(frozen=True)
class UnitCost:
    """One micro-batch through a block, an embedding or a head.

    Attributes:
        terms: seconds of the three passes by what they go to; `at peak` is a part of `products`
            and `attention`, and not added to them.
        sent: its messages.
    """

    terms: dict[str, Passes]
    sent: tuple[Sent, ...]

    @property
    def seconds(self) -> Passes:
        """All of it."""
        return _sum(passes for name, passes in self.terms.items() if name != "at peak")


def _sum(passes: Iterable[Passes]) -> Passes:
    result = NOTHING
    for each in passes:
        result = result.plus(each)
    return result


def stage_units(question: Question, stage: int) -> list[tuple[UnitCost, int]]:
    """The units of one stage, and how many of each."""
    shape, layout = question.shape, question.layout
    layers = stage_layers(shape, layout, stage)
    dense = shape.dense_layers if shape.is_moe else shape.layers
    plain = sum(layer < dense for layer in layers)
    units = []
    if stage == 0:
        units.append((embedding_cost(question), 1))
    if plain:
        units.append((block_cost(question, routed=False), plain))
    if len(layers) > plain:
        units.append((block_cost(question, routed=True), len(layers) - plain))
    if stage == layout.num_stages - 1:
        units.append((head_cost(question), 1))
    return units


@lru_cache(maxsize=4096)
def block_cost(question: Question, *, routed: bool) -> UnitCost:
    """One micro-batch through one block."""
    layout = question.layout
    cut = _slice(question)
    works = block_work(cut, routed=routed)
    layer = question.shape.layers - 1 if routed else 0
    params = block_held(question.shape, layout, layer).total
    sent = [*_tensor_messages(question, 2)]
    if layout.cp > 1:
        sent.append(_context_message(question))
    if routed and layout.ep > 1:
        sent.append(_expert_message(question))
    return _unit(question, works, sent, params)


@lru_cache(maxsize=4096)
def head_cost(question: Question) -> UnitCost:
    """One micro-batch through the final norm, the projection and the loss."""
    params = head_held(question.shape, question.layout).total
    sent = [*_tensor_messages(question, 1, rows=False)]
    return _unit(question, head_work(_slice(question)), sent, params, repeats=False)


@lru_cache(maxsize=4096)
def embedding_cost(question: Question) -> UnitCost:
    """One micro-batch through the embedding."""
    params = embedding_held(question.shape, question.layout).total
    sent = [*_tensor_messages(question, 1, columns=False)]
    return _unit(question, embedding_work(_slice(question)), sent, params, repeats=False)


def _slice(question: Question) -> Slice:
    return Slice(question.shape, question.layout, question.seq, question.practice)


def _unit(
    question: Question,
    works: tuple[Work, ...],
    sent: list[Sent],
    params: float,
    *,
    repeats: bool = True,
) -> UnitCost:
    machine, layout = question.machine, question.layout
    cost = total(works, machine)
    repeated = again(works, machine, layout.recompute if repeats else "none")
    terms = {
        "at peak": cost.peak,
        "products": cost.products,
        "attention": cost.attention,
        "sweeps": cost.sweeps,
        "accumulation": Passes(W=machine.sweep_seconds(question.practice.accumulate * params)),
        "recompute": Passes(I=repeated.I),
    }
    for message in sent:
        forward, backward = (n * s for n, s in zip(message.times, message.exposed, strict=True))
        before = terms.get(message.axis, NOTHING)
        terms[message.axis] = before.plus(Passes(forward, backward))
    busy = _sum(passes for name, passes in terms.items() if name != "at peak")
    terms["launch"] = _starved(question, cost, repeated, busy)
    weights = _weight_messages(question, params, busy.plus(terms["launch"]))
    for message in weights:
        terms["weights"] = terms.get("weights", NOTHING).plus(
            Passes(*(n * s for n, s in zip(message.times, message.exposed, strict=True)))
        )
    return UnitCost(terms, (*sent, *weights))


def _starved(question: Question, cost: Cost, repeated: Passes, busy: Passes) -> Passes:
    """Seconds that the device waits for kernels to be launched."""
    launch = question.rates.launch
    forward = max(launch * cost.kernels.F - busy.F, 0.0)
    backward = launch * (cost.kernels.I + cost.kernels.W + repeated.W)
    return Passes(forward, max(backward - busy.I - busy.W, 0.0))


def group_links(question: Question, group: Group) -> Links:
    """The links of a group of this question's cluster."""
    return links(question.cluster, question.rates, group)


def _tensor_messages(
    question: Question, count: int, *, rows: bool = True, columns: bool = True
) -> Iterable[Sent]:
    """All-reduces of b s h around `count` pairs of products, or their two halves under sp.

    Forward sums after a product by rows, backward before one by columns. Full recomputation
    repeats forward's, but for the last of a block.
    """
    layout, shape = question.layout, question.shape
    if layout.tp == 1:
        return
    size = HALF * layout.mb * question.seq / layout.cp * shape.hidden
    on = group_links(question, Group(layout.tp, question.stride["tp"]))
    again_too = layout.recompute == "full" and rows and columns
    repeated = count if again_too else 0
    summed = "reduce_scatter" if layout.sp else "all_reduce"
    forward, backward = (count if rows else 0), (count if columns else 0)
    each = seconds(summed, size, on)
    yield Sent("tensor", summed, "sums", size, (forward, backward + repeated), each, (each, each))
    if layout.sp:
        each = seconds("all_gather", size, on)
        gathers = (float(backward), float(forward + repeated))
        yield Sent("tensor", "all_gather", "sequences", size, gathers, each, (each, each))


def _context_message(question: Question) -> Sent:
    """Keys and values around the ring of cp ranks, hidden behind the attention to the last ones."""
    layout, shape = question.layout, question.shape
    heads = max(shape.kv_heads / layout.tp, 1)
    size = HALF * 2 * heads * shape.head_dim * layout.mb * question.seq / layout.cp
    each = seconds("send", size, group_links(question, Group(layout.cp, question.stride["cp"])))
    cut = _slice(question)
    attention = total(block_work(cut, routed=False), question.machine).attention
    steps = layout.cp - 1
    hidden = (attention.F / layout.cp, attention.I / layout.cp / 2)
    exposed = (max(each - hidden[0], 0.0), max(each - hidden[1], 0.0))
    return Sent("context", "send", "keys and values", size, (steps, 2 * steps), each, exposed)


def _expert_message(question: Question) -> Sent:
    """Tokens to their experts and back: two all-to-alls forward, two backward."""
    layout, shape = question.layout, question.shape
    cut = _slice(question)
    size = HALF * shape.top_k * cut.own_tokens * shape.hidden
    each = seconds("all_to_all", size, group_links(question, question.expert_group))
    again_too = 2 if layout.recompute == "full" else 0
    return Sent("expert", "all_to_all", "tokens", size, (2, 2 + again_too), each, (each, each))


def _weight_messages(question: Question, params: float, busy: Passes) -> Iterable[Sent]:
    """ZeRO-3: weights gathered before each use and gradients reduced, one unit ahead of the work.

    What the arithmetic of one unit cannot hide of the next one's messages is exposed.
    """
    layout, practice = question.layout, question.practice
    if layout.zero_stage < 2:
        return
    on = data_links(question)
    reduce = seconds("reduce_scatter", params * practice.gradient, on)
    gather = seconds("all_gather", params * HALF, on) if layout.zero_stage == 3 else 0.0
    before, after = gather, gather + reduce
    forward = max(before - busy.F, 0.0) / before if before else 0.0
    backward = max(after - busy.I - busy.W, 0.0) / after
    if layout.zero_stage == 3:
        size, exposed = params * HALF, (gather * forward, gather * backward)
        yield Sent("data", "all_gather", "weights", size, (1, 1), gather, exposed)
    size, exposed = params * practice.gradient, (0.0, reduce * backward)
    yield Sent("data", "reduce_scatter", "gradients", size, (0, 1), reduce, exposed)


def data_links(question: Question) -> Links:
    """The links of the ranks that share one sharded copy, or of all that hold the same weights."""
    layout = question.layout
    size = copies(layout).shared if layout.zero_stage else layout.dp * layout.cp
    stride = layout.tp if layout.cp > 1 else question.stride["dp"]
    return group_links(question, Group(size, stride))
