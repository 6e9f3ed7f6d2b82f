"""What one micro-batch costs on every stage of the pipeline, by what the time goes to.

Symbols: T tokens of a micro-batch on one rank, h hidden, g kv heads, d head size, K experts per
token, t tp, c cp.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from phalanx.core.message import Collective
from phalanx.core.model import ModelShape
from phalanx.core.operators import describe
from phalanx.core.recompute import NONE
from phalanx.cost.blocks import HALF, Slice, block_work, embedding_work, head_work
from phalanx.cost.compute import Cost, Passes, Product, Work, again, total
from phalanx.cost.params import block_held, copies, embedding_held, head_held, stage_layers
from phalanx.cost.roofline import expected_ranks
from phalanx.cost.wires import Group, Links, links, seconds
from phalanx.planner.question import Question
from phalanx.schedules.layouts import num_stages

NOTHING = Passes()
PEAKS = ("products at peak", "attention at peak")


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
        ranks: of the group.
    """

    axis: str
    collective: str
    purpose: str
    bytes: float
    times: tuple[float, float]
    seconds: float
    exposed: tuple[float, float]
    ranks: int

    @property
    def shown(self) -> Passes:
        """Exposed seconds of all of them, in forward and in backward."""
        forward, backward = (n * s for n, s in zip(self.times, self.exposed, strict=True))
        return Passes(forward, backward)


@dataclass(frozen=True)
class UnitCost:
    """One micro-batch through a block, an embedding or a head.

    Attributes:
        terms: seconds of the three passes by what they go to. Those of `PEAKS` are parts of
            others, and not added to them.
        sent: its messages.
    """

    terms: dict[str, Passes]
    sent: tuple[Sent, ...]

    @property
    def seconds(self) -> Passes:
        """All of it."""
        return _sum(passes for name, passes in self.terms.items() if name not in PEAKS)


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
    if stage == num_stages(layout) - 1:
        units.append((head_cost(question), 1))
    return units


def block_seconds(question: Question) -> float:
    """Forward and backward of one block alone, for all micro-batches of a step."""
    cost = block_cost(question, routed=question.shape.is_moe)
    return cost.seconds.total * question.micro_batches


@lru_cache(maxsize=4096)
def block_cost(question: Question, *, routed: bool) -> UnitCost:
    """One micro-batch through one block."""
    layout = question.layout
    cut = _slice(question)
    works = block_work(cut, routed=routed)
    cost = total(works, question.machine)
    layer = question.shape.layers - 1 if routed else 0
    params = block_held(question.shape, layout, layer).total
    sent = [*_tensor_messages(question, around_block(question.shape), cost)]
    if layout.cp > 1:
        sent.append(_context_message(question))
    if routed and layout.ep > 1:
        sent.append(_expert_message(question))
    return _unit(question, works, sent, params)


@lru_cache(maxsize=4096)
def head_cost(question: Question) -> UnitCost:
    """One micro-batch through the final norm, the projection and the loss."""
    params = head_held(question.shape, question.layout).total
    works = head_work(_slice(question))
    cost = total(works, question.machine)
    sent = [*_tensor_messages(question, Around((question.shape.hidden,), rows=0), cost)]
    return _unit(question, works, sent, params, repeats=False)


@lru_cache(maxsize=4096)
def embedding_cost(question: Question) -> UnitCost:
    """One micro-batch through the embedding."""
    params = embedding_held(question.shape, question.layout).total
    works = embedding_work(_slice(question))
    sent = [*_tensor_messages(question, Around((), rows=1), Cost())]
    return _unit(question, works, sent, params, repeats=False)


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
    machine, layout, practice = question.machine, question.layout, question.practice
    alone = 0.0 if practice.fused_accumulation else practice.accumulate
    cost = total(works, machine)
    mode = layout.recompute if repeats else NONE
    repeated = again(works, machine, mode, stops_early=practice.stops_early)
    terms = {
        "products at peak": cost.peak,
        "attention at peak": cost.scores_peak,
        "products": cost.products,
        "attention": cost.attention,
        "sweeps": cost.sweeps,
        "accumulation": Passes(W=machine.sweep_seconds(alone * params)),
        "recompute": Passes(I=repeated.seconds),
    }
    for message in sent:
        terms[message.axis] = terms.get(message.axis, NOTHING).plus(message.shown)
    busy = _sum(passes for name, passes in terms.items() if name not in PEAKS)
    kernels = cost.kernels.plus(Passes(I=repeated.kernels))
    for message in sent:
        kernels = kernels.plus(Passes(*message.times))
    terms["launch"] = _starved(question, kernels, busy)
    lasts = busy.plus(terms["launch"])
    multiplied = any(isinstance(work, Product) for work in works)
    weights = tuple(_weight_messages(question, params, lasts, again=multiplied))
    for message in weights:
        terms["weights"] = terms.get("weights", NOTHING).plus(message.shown)
    return UnitCost(terms, (*sent, *weights))


def _starved(question: Question, kernels: Passes, busy: Passes) -> Passes:
    """Seconds that the device waits for its next kernel, in forward and in all of backward."""
    launch = 0.0 if question.practice.graphs else question.rates.launch
    forward = max(launch * kernels.F - busy.F, 0.0)
    backward = launch * (kernels.I + kernels.W)
    return Passes(forward, max(backward - busy.I - busy.W, 0.0))


def group_links(question: Question, group: Group) -> Links:
    """The links of a group of this question's cluster."""
    return links(question.cluster, question.rates, group)


class Around(NamedTuple):
    """What tensor-parallel ranks send around the products of a unit.

    Attributes:
        columns: width of the input of each product by columns, or of several that share one.
        rows: how many products are cut by rows.
        once: widths of what is gathered beside, and not again in backward.
    """

    columns: tuple[int, ...]
    rows: int
    once: tuple[int, ...] = ()

    @property
    def gathered(self) -> Counter[int]:
        """How many inputs of each width are gathered in forward."""
        return Counter(self.columns + self.once)


def around_block(shape: ModelShape) -> Around:
    """Attention and an MLP; latent attention sends what it has compressed."""
    boundaries = [op.boundary for op in describe(shape).dense.all if op.boundary]
    columns, once = (
        tuple(each.width for each in boundaries if each.kind == kind)
        for kind in ("columns", "gather")
    )
    return Around(columns, 2, once)


def _tensor_messages(question: Question, around: Around, cost: Cost) -> Iterable[Sent]:
    """Messages around products, as in `cost/messages/tensor.py`.

    In backward, Megatron-LM sums the gradient of a product by columns beside its weight gradient,
    and gathers its input again beside its input gradient. Sources: Shoeybi et al. 2019
    (arXiv:1909.08053), section 3; Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2.
    """
    layout, h = question.layout, question.shape.hidden
    if layout.tp == 1:
        return
    t, tokens = layout.tp, HALF * layout.mb * question.seq / layout.cp
    on = group_links(question, Group(t, question.stride["tp"]))
    rows, gathered = around.rows, around.gathered
    repeats = int(layout.recompute.segment > 0 and rows > 0 and len(gathered) > 0)
    products = cost.products.times(1 / (2 * max(len(around.columns) + rows, 1)))
    add_up: Collective = "reduce_scatter" if layout.sequence_parallel else "all_reduce"
    each = seconds(add_up, tokens * h, on)
    times = (rows, repeats * (rows - 1))
    yield Sent("tensor", add_up, "sums", tokens * h, times, each, (each, each), t)
    for width, count in gathered.items():
        each = seconds(add_up, tokens * width, on)
        shown = (0, _beside(question, each, products.W))
        yield Sent("tensor", add_up, "gradients", tokens * width, (0, count), each, shown, t)
    if not layout.sequence_parallel:
        return
    for width in dict.fromkeys((h, *gathered)):
        each = seconds("all_gather", tokens * width, on)
        times = (gathered[width], repeats * gathered[width] + rows * (width == h))
        yield Sent(
            "tensor", "all_gather", "sequences", tokens * width, times, each, (each, each), t
        )
    for width, count in Counter(around.columns).items():
        each = seconds("all_gather", tokens * width, on)
        shown = (0, _beside(question, each, products.I))
        yield Sent(
            "tensor", "all_gather", "inputs again", tokens * width, (0, count), each, shown, t
        )


def _beside(question: Question, message: float, product: float) -> float:
    """Exposed seconds of a message of backward that a product may hide."""
    if not question.practice.hides_sums:
        return message
    return message * exposed_share(question, message, product)


def _context_message(question: Question) -> Sent:
    """Keys and values around the ring of cp ranks, hidden behind the attention to the last ones."""
    layout, shape = question.layout, question.shape
    heads = max(shape.kv_heads / layout.tp, 1)
    size = HALF * heads * shape.kv_width * layout.mb * question.seq / layout.cp
    each = seconds("send", size, group_links(question, Group(layout.cp, question.stride["cp"])))
    cut = _slice(question)
    attention = total(block_work(cut, routed=False), question.machine).attention
    steps = layout.cp - 1
    hidden = (attention.F / layout.cp, attention.I / layout.cp / 2)
    exposed = (max(each - hidden[0], 0.0), max(each - hidden[1], 0.0))
    times = (steps, 2 * steps)
    return Sent("context", "send", "keys and values", size, times, each, exposed, layout.cp)


def _expert_message(question: Question) -> Sent:
    """Tokens to their experts and back: two all-to-alls forward, two backward.

    A token travels once to every rank and once to every other domain that has one of its experts.
    Source: DeepSeek-V3 (arXiv:2412.19437), section 3.2.2.
    """
    layout, shape, group = question.layout, question.shape, question.expert_group
    tokens = HALF * _slice(question).tokens_of("own") * shape.hidden
    size = tokens * shape.top_k
    on = group_links(question, group)
    e, r = group.size, on.inside
    near = tokens * expected_ranks(e, shape.top_k) * (r - 1) / e
    far = tokens * expected_ranks(e // r, shape.top_k) * (1 - r / e)
    times = near / on.near.bandwidth, far / on.far.bandwidth
    each = max(times) + (on.far if on.spans else on.near).latency
    again_too = 2 if layout.recompute.segment else 0
    times = (2, 2 + again_too)
    return Sent("expert", "all_to_all", "tokens", size, times, each, (each, each), e)


def _weight_messages(
    question: Question, params: float, busy: Passes, *, again: bool
) -> Iterable[Sent]:
    """ZeRO-3: weights gathered before each use and gradients reduced, one unit ahead of the work.

    What the arithmetic of one unit cannot hide of the next one's messages is exposed. The
    backward of the embedding needs no weights.

    Args:
        question: what is priced.
        params: of the unit.
        busy: seconds of its passes.
        again: backward gathers the weights once more.
    """
    layout, practice = question.layout, question.practice
    if layout.zero_stage < 2:
        return
    on = data_links(question)
    reduce, late = seconds("reduce_scatter", params * practice.gradient, on), 0.0
    ranks = on.group.size
    if layout.zero_stage == 3:
        gather = seconds("all_gather", params * HALF, on)
        late = gather if again else 0.0
        early = gather * exposed_share(question, gather, busy.F)
        shown = (early, gather * exposed_share(question, late + reduce, busy.I + busy.W))
        size, times = params * HALF, (1, int(again and layout.reshard))
        yield Sent("data", "all_gather", "weights", size, times, gather, shown, ranks)
    shown = (0.0, reduce * exposed_share(question, late + reduce, busy.I + busy.W))
    size = params * practice.gradient
    yield Sent("data", "reduce_scatter", "gradients", size, (0, 1), reduce, shown, ranks)


def exposed_share(question: Question, message: float, behind: float) -> float:
    """Which share of a message of so many seconds shows, behind so much arithmetic.

    What is longer than the arithmetic, and of the rest what the arithmetic loses to it.
    """
    if message <= 0:
        return 0.0
    hidden = min(message, behind)
    return (message - hidden * (1 - question.rates.interference)) / message


def data_links(question: Question) -> Links:
    """The links of the ranks that share one sharded copy, or of all that hold the same weights."""
    layout = question.layout
    size = copies(layout).shared if layout.zero_stage else layout.dp * layout.cp
    stride = layout.tp if layout.cp > 1 else question.stride["dp"]
    return group_links(question, Group(size, stride))
