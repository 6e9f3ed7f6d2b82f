"""How many bytes a rank needs at its worst moment, by what they are for.

The moments of a backward pass compete: the loss, when the logits are alive beside every activation
in flight; the head, when its gradient is made; the first block, with its recomputed tensors and
gradients; the second, when the gradient of the first still travels; and the token table.

Symbols: h hidden, f ffn width, V vocabulary, t tp, p pp.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from phalanx.core.errors import UsageError
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe
from phalanx.cost.params import (
    Held,
    block_held,
    copies,
    rank_held,
    stage_layers,
    stages_of_rank,
    table_held,
)
from phalanx.cost.saved import (
    FP32,
    OURS,
    Saved,
    Stack,
    block_saved,
    bytes_per_token,
    head_saved,
    kept,
    mlp_saved,
)
from phalanx.cost.state import StateBytes
from phalanx.schedules.layouts import num_stages, placement

BF16 = 2
Moment = Literal["forward", "loss", "backward"]

# bytes of an element in products, of a master weight, of both moments
_WIDTHS = {
    "bf16": (2, 4, 8),
    "fp16": (2, 4, 8),
    "fp32": (4, 0, 8),
    "fp64": (8, 0, 16),
}


def held_in_backward(shape: ModelShape, layout: Layout, element: int) -> float:
    """Bytes per token of a rank that attention holds at most while it is differentiated.

    For q elements of queries and results, k of keys and values, e bytes each and w while they are
    added up: 2 q of gradients come in, 2 k of blocks are here or on their way, and q + k leave the
    kernel. Beside that

        ring       w (q + 4 k)          what a rank adds to its own, to this block, and what
                                        arrives and leaves; 2 k between two ranks
        gather     w (q + (c + 2) k)    of all blocks at once, and c k of keys and values
        ulysses    e 2 (q + k)          of all tokens and of this rank's, before and after the trade
    """
    t, c, wide = layout.tp, layout.cp, max(element, 4)
    q, k = shape.heads // t * shape.qk_width, shape.kv_heads_of_rank(t) * shape.kv_width
    common = element * (2 * shape.hidden + q + k)
    match layout.context:
        case "gather":
            return common + element * c * k + wide * (q + (c + 2) * k)
        case "ulysses":
            return common + element * 2 * (q + k)
        case _:
            return common + element * 2 * k + wide * (q + (4 if c > 2 else 2) * k)


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at its worst moment.

    Attributes:
        pp_rank: pipeline rank.
        moment: whether that is at the head, or in the backward of what lies before it.
        weights: as the products read them, kept all the time.
        gradients: accumulated.
        optimizer: master weights and moments.
        activations: kept for backward by every micro-batch in flight.
        logits: and everything else that the loss holds at the worst moment.
        buffers: tensors that come and go: gathered weights and sequences, gradients on the way.
        reserve: of the driver and the communication library, and what fragmentation wastes.
    """

    pp_rank: int
    moment: Moment
    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    reserve: float

    @property
    def allocated(self) -> float:
        """What the program itself asks for, as `torch.cuda.max_memory_allocated` counts it."""
        return self.total - self.reserve

    @property
    def total(self) -> float:
        """All of it: what must fit into the device."""
        return sum(self.by_class().values())

    def by_class(self) -> dict[str, float]:
        """The parts by name, in the order of a report."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
            "logits": self.logits,
            "buffers": self.buffers,
            "reserve": self.reserve,
        }


def state_bytes(layout: Layout, stack: Stack) -> StateBytes:
    """Bytes per parameter before ZeRO, for the layout's precision.

    In fp32 and fp64 the weights are their own master, except under ZeRO-3, where gathered
    weights come and go and only the master stays.

    Raises:
        UsageError: a precision that only a device can resolve, or one without a rule.
    """
    rest = layout.precision.rest
    if rest not in _WIDTHS:
        raise UsageError(f"name the precision to count bytes: {', '.join(sorted(_WIDTHS))}")
    element, master, of_precision = _WIDTHS[rest]
    master = master if stack.master_weights else 0
    moments = stack.moment_bytes or of_precision
    gradients = max(stack.gradient_bytes, element if master == 0 else 0)
    if layout.zero_stage == 3:
        return StateBytes(0.0, gradients, master or element, moments)
    return StateBytes(element, gradients, master, moments)


def ours(recipe: Recipe) -> Stack:
    """What our trainer keeps under a recipe: its moments and master weights may be narrower."""
    moments = 2.0 * BF16 if recipe.moments == "bf16" else 0.0
    return replace(OURS, moment_bytes=moments, master_weights=recipe.master_weights == "fp32")


def rank_memory(
    shape: ModelShape,
    layout: Layout,
    seq: int,
    pp_rank: int,
    in_flight: float,
    stack: Stack = OURS,
) -> RankMemory:
    """Bytes of a rank of pipeline rank `pp_rank`.

    Args:
        shape: the model.
        layout: degrees, ZeRO stage, recompute, sp, precision.
        seq: s, tokens per sequence.
        pp_rank: 0 embeds; the last one computes the loss, unless the schedule folds the pipeline.
        in_flight: passes through one of its stages whose activations are alive at the peak, read
            off the schedule.
        stack: what the program keeps, and what the device loses beside it.

    Raises:
        UsageError: no such pipeline rank, or a precision that only a device can resolve.
    """
    if not 0 <= pp_rank < layout.pp:
        raise UsageError(f"pipeline rank {pp_rank} of pp={layout.pp}")
    rank = _Rank(shape, layout, seq, pp_rank, stack)
    state = _state(rank)
    activations = 0.0 if rank.away else in_flight * rank.stage_activations
    worst = max(_moments(rank, in_flight), key=_Moment.total)
    fixed = sum(state) + activations + rank.messages
    return RankMemory(
        pp_rank=pp_rank,
        moment=worst.name,
        weights=state.weights,
        gradients=state.gradients,
        optimizer=state.optimizer,
        activations=activations + worst.activations,
        logits=worst.logits,
        buffers=rank.messages + worst.buffers,
        reserve=stack.context + stack.fragmentation * (fixed + worst.total()),
    )


class _Moment(NamedTuple):
    """What is alive at one moment beside the state and what every pass in flight keeps.

    Attributes:
        name: as a report calls it.
        activations: recomputed, less what this pass has let go by now.
        logits: and what the loss holds with them.
        buffers: whole weights and gradients, and gradients of activations.
    """

    name: Moment
    activations: float
    logits: float
    buffers: float

    def total(self) -> float:
        """All of it."""
        return self.activations + self.logits + self.buffers


def _moments(rank: "_Rank", in_flight: float) -> Iterator[_Moment]:
    """The moments that compete, in the order in which backward comes to them."""
    block, table, tied = rank.block, rank.table, rank.tied_table
    left = rank.left_behind
    if rank.away and not rank.layout.recompute.segment:
        whole = rank.weights(2 * block)
        yield _Moment("forward", rank.block_everything + 2 * rank.boundary, 0.0, whole)
    if rank.last:
        weights = rank.weights(table + block)
        yield _Moment("loss", 0.0, rank.logits(in_flight), weights + rank.travelling(left))
        put_by, made = rank.head_kept(in_flight), rank.boundary + rank.made(table)
        held = weights + rank.travelling(left) + made
        yield _Moment("loss", 0.0, put_by + rank.logit_gradient, held)
        yield _Moment("loss", 0.0, put_by, held + rank.gradients(table))
    alone = len(rank.stages) == 1
    still = 0 if rank.last and alone else left  # the backward of a head waits for it
    first = rank.weights(min(rank.blocks, 2) * block + tied) + rank.block_gradients
    first += rank.gradients(block + tied)
    yield _Moment("backward", rank.recomputed, 0.0, first + rank.travelling(still))
    if rank.blocks > 1:
        others = 0 if alone else max(left - block, 0)
        gone = rank.recomputed - rank.block_activations
        yield _Moment("backward", gone, 0.0, first + rank.travelling(block + others))
    if 0 in rank.stages:
        whole = rank.gradients(table) + rank.travelling(block + max(left - table, 0))
        end = rank.weights(tied) + whole + rank.made(table) + rank.boundary
        gone = 0.0 if rank.away else -rank.stage_activations
        yield _Moment("backward", gone, 0.0, end)


@dataclass(frozen=True)
class _Rank:
    """One rank and the sizes that follow."""

    shape: ModelShape
    layout: Layout
    seq: int
    pp_rank: int
    stack: Stack

    @property
    def element(self) -> int:
        return _WIDTHS[self.layout.precision.rest][0]

    @property
    def tokens(self) -> float:
        """Of one micro-batch, after cp has cut the sequence."""
        return self.layout.mb * self.seq / self.layout.cp

    def saved(self, layer: int) -> tuple[Saved, ...]:
        return block_saved(self.shape, layer, self.seq, self.element, self.stack)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        return stages_of_rank(self.layout, self.pp_rank)

    @property
    def last(self) -> bool:
        """Whether it computes the loss."""
        return num_stages(self.layout) - 1 in self.stages

    @cached_property
    def kinds(self) -> dict[int, int]:
        """How many blocks of each kind all its stages hold, by one layer of the kind."""
        layers = [i for s in self.stages for i in stage_layers(self.shape, self.layout, s)]
        dense = self.shape.dense_layers if self.shape.is_moe else self.shape.layers
        first = sum(layer < dense for layer in layers)
        counts = {0: first, self.shape.layers - 1: len(layers) - first}
        return {layer: count for layer, count in counts.items() if count}

    @cached_property
    def blocks(self) -> int:
        """How many blocks the longest of its stages has."""
        return max(self._blocks_of(stage) for stage in self.stages)

    def _blocks_of(self, stage: int) -> int:
        return len(stage_layers(self.shape, self.layout, stage))

    @property
    def away(self) -> bool:
        """Whether activations leave the device between forward and backward."""
        return self.layout.offload.activations

    @property
    def stage_activations(self) -> float:
        """Kept by one micro-batch in one of its stages, on average over them."""
        if self.layout.recompute.segment:
            inputs = (
                -(-self._blocks_of(stage) // self.layout.recompute.segment) for stage in self.stages
            )
            return self.block_activations * sum(inputs) / len(self.stages)
        total = 0.0
        for layer, count in self.kinds.items():
            left = kept(self.saved(layer), self.layout.recompute)
            total += count * bytes_per_token(left, self.layout)
        return self.tokens * total / len(self.stages)

    @property
    def block_activations(self) -> float:
        """Kept by one micro-batch in one block, the one that keeps least."""
        each = [kept(self.saved(layer), self.layout.recompute) for layer in self.kinds]
        least = min((bytes_per_token(left, self.layout) for left in each), default=0.0)
        return 0.0 if self.away else self.tokens * least

    @property
    def block_everything(self) -> float:
        """Kept by one micro-batch in one block, the one that keeps most, if nothing is let go."""
        each = (bytes_per_token(self.saved(layer), self.layout) for layer in self.kinds)
        return self.tokens * max(each, default=0.0)

    @property
    def recomputed(self) -> float:
        """What is made or brought again while the backward of a block runs."""
        if self.layout.recompute.segment:
            again = min(self.layout.recompute.segment, self.blocks) * self.block_everything
            return again - self.block_activations
        return max(self._again(layer) for layer in self.kinds) if self.kinds else 0.0

    def _again(self, layer: int) -> float:
        """Of parts, those of the MLP; the result of its activation goes before the rest comes."""
        everything = self.saved(layer)
        left = () if self.away else kept(everything, self.layout.recompute)
        gone = [item for item in mlp_saved(everything) if item not in left]
        gone = [item for item in gone if not item.name.endswith("after activation")]
        return self.tokens * bytes_per_token(gone, self.layout)

    def logits(self, in_flight: float) -> float:
        """What the last rank holds at its loss."""
        if self.chunk:
            return self.head_kept(in_flight) + self._chunk_of_logits()
        whole = self.layout.tp == 1
        worst = self.stack.logit_peak_whole if whole else self.stack.logit_peak
        return self.head_kept(in_flight) + self._per_logit(worst)

    def head_kept(self, in_flight: float) -> float:
        """What of that is left when the logits of this micro-batch are gone.

        GPipe has put by the logits of all others.
        """
        saved = head_saved(self.shape, self.element, self.stack)
        one = self.tokens * bytes_per_token(saved, self.layout)
        logits = self._per_logit(self.stack.logit_kept)
        if self.chunk:  # they keep the gradient of the table instead
            one, logits = one - logits + self.made(self.table), self.made(self.table)
        others = max(in_flight - 1, 0.0) * one if len(self.stages) == 1 and not self.away else 0.0
        return others + one - logits

    @property
    def chunk(self) -> int:
        """Tokens whose logits are alive at once, if not all of them are; only ours does so."""
        if not self.stack.parts_as_ledger or not self.layout.logits:
            return 0
        return int(min(self.layout.logits, self.tokens))

    def _chunk_of_logits(self) -> float:
        """Logits of a few tokens beside the table's gradient as it adds up; and the input's."""
        element, wide = self.element, max(self.element, FP32)
        narrow = element if element < wide else 0  # what is in both formats for a moment
        logits = self.chunk * self.shape.vocab / self.layout.tp
        total, more = (wide, narrow) if self.tokens > self.chunk else (0, element)
        beside = max(self.table * total + logits * (wide + narrow), self.table * (total + more))
        gathered = 2 if self.layout.tp > 1 and self.layout.sequence_parallel else 1
        return (
            max(beside, self.table * (total + more) + logits * element) + gathered * self.boundary
        )

    @property
    def logit_gradient(self) -> float:
        """The gradient of the logits, as products read it."""
        return 0.0 if self.chunk else self._per_logit(self.element)

    def _per_logit(self, size: float) -> float:
        return self.tokens * self.shape.vocab * size / self.layout.tp

    @property
    def block_gradients(self) -> float:
        """Gradients of one block's activations."""
        return max((self._on_the_way(layer) for layer in self.kinds), default=0.0)

    def _on_the_way(self, layer: int) -> float:
        """While a block is differentiated: its MLP, or under cp its attention."""
        mlp = self.tokens * self._mlp_on_the_way(layer)
        if self.layout.cp == 1 or not self.stack.key_gradients_travel:
            return mlp
        attention = held_in_backward(self.shape, self.layout, self.element)
        gone = bytes_per_token(mlp_saved(self.saved(layer)), self.layout)
        return max(mlp, self.tokens * (attention - gone))

    def _mlp_on_the_way(self, layer: int) -> float:
        shape, t = self.shape, self.layout.tp
        routed = shape.is_moe and layer >= shape.dense_layers
        # a gelu lets go of its output before its input has a gradient; a swiglu holds it
        inputs = 3 if shape.activation == "swiglu" else 1
        if routed:
            width, h = shape.top_k * (shape.moe_ffn or shape.ffn), shape.top_k * shape.hidden
            cut = t if self.layout.sequence_parallel else 1
            per_token = (inputs * width + 2 * h) / cut
        else:
            per_token = inputs * shape.ffn / t
        whole = 2 * shape.hidden  # gathered gradient of the output, gathered input
        return self.element * (per_token + whole)

    @property
    def boundary(self) -> float:
        """One activation between blocks, whole."""
        return self.tokens * self.shape.hidden * self.element

    @property
    def messages(self) -> float:
        """One activation on its way from a neighbouring stage, and one on its way to it."""
        if self.layout.pp == 1:
            return 0.0
        return 2 * self.boundary / (self.layout.tp if self.layout.sequence_parallel else 1)

    @cached_property
    def block(self) -> int:
        """Parameters of its largest block."""
        return max((block_held(self.shape, self.layout, i).total for i in self.kinds), default=0)

    @property
    def table(self) -> int:
        """Parameters of a token table, if it holds one."""
        return table_held(self.shape, self.layout) if 0 in self.stages or self.last else 0

    @property
    def tied_table(self) -> int:
        """The same if it is embedding and head at once: then it is in use all the way."""
        return self.table if self.shape.tied and placement(self.layout).ends_together else 0

    @property
    def left_behind(self) -> int:
        """Parameters whose gradients still travel from the micro-batch before.

        Each stage waits for its last one when its next backward begins.
        """
        if not self.stack.travels_on:
            return 0
        return sum(self.block if stage else self.table for stage in self.stages)

    def weights(self, params: int) -> float:
        """Bytes of weights that come and go: the unit in use and the next one are whole."""
        gathers = self.layout.zero_stage == 3 and self.layout.reshard
        return params * self.element if gathers or self.layout.offload.nvme else 0.0

    def gradients(self, params: int) -> float:
        """Bytes of gradients that are whole until they are reduced, under ZeRO-2 and 3."""
        return params * self.stack.gradient_bytes if self.layout.zero_stage >= 2 else 0.0

    def travelling(self, params: int) -> float:
        """The same on their way: with the part that this rank receives."""
        return self.gradients(params) * (1 + 1 / self.layout.shards)

    def made(self, params: int) -> float:
        """Bytes of a gradient as the product leaves it, before it is added up."""
        return params * self.element if self.stack.adds_apart else 0.0


def _state(rank: _Rank) -> StateBytes:
    """Bytes of weights, gradients, master and moments on one rank."""
    layout = rank.layout
    held = rank_held(rank.shape, layout, rank.pp_rank)
    group = copies(layout)
    per_param = state_bytes(layout, rank.stack)
    spread = [
        _spread(held, group if layout.zero_stage >= stage else Held(1, 1)) for stage in range(4)
    ]
    apart = spread[1] if layout.zero_stage == 1 and rank.stack.reduced_apart else 0.0
    whole = _spread(held, Held(1, 1))
    stays = whole * rank.element if layout.zero_stage == 3 and not layout.reshard else 0.0
    if layout.offload.state:
        weights = 0.0 if layout.offload.nvme else spread[3] * rank.element
        accumulated = whole * per_param.gradients if layout.zero_stage < 2 else 0.0
        resident = weights if layout.zero_stage < 3 else 0.0
        return StateBytes(resident + stays, accumulated, master=0.0, moments=0.0)
    return StateBytes(
        weights=spread[3] * per_param.weights + stays,
        gradients=(spread[2] + apart) * per_param.gradients,
        master=spread[1] * per_param.master,
        moments=spread[1] * per_param.moments,
    )


def _spread(held: Held, group: Held) -> float:
    return held.shared / group.shared + held.experts / group.experts
