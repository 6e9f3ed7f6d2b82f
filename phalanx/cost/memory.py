"""How many bytes a rank needs at its worst moment, by what they are for.

Two moments compete: the loss, when the logits are alive beside every activation in flight, and
the first backward of a block, when its recomputed tensors and its gradients are.

Symbols: h hidden, f ffn width, V vocabulary, t tp, p pp.
"""

from dataclasses import dataclass, replace
from typing import Literal

from phalanx.core.errors import UsageError
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.precision import formats
from phalanx.core.run import Recipe
from phalanx.cost.params import (
    Held,
    block_held,
    copies,
    embedding_held,
    rank_held,
    stage_layers,
    stages_of_rank,
)
from phalanx.cost.saved import OURS, Saved, Stack, block_saved, bytes_per_token, head_saved, kept
from phalanx.cost.state import StateBytes

BF16 = 2
Moment = Literal["loss", "backward"]

# bytes of an element in products, of a master weight, of both moments
_WIDTHS = {
    "bf16": (2, 4, 8),
    "fp16": (2, 4, 8),
    "fp32": (4, 0, 8),
    "fp64": (8, 0, 16),
}


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at its worst moment.

    Attributes:
        pp_rank: pipeline rank.
        moment: which of the two it is.
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
    rest = formats(layout.precision).rest
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
    activations = in_flight * rank.stage_activations
    loss = rank.logits(in_flight)
    backward = rank.recomputed + rank.gradients_on_the_way
    at_loss = loss > backward
    coming = rank.gathered + rank.messages
    fixed = sum(state) + activations + coming
    worst = fixed + max(loss, backward)
    return RankMemory(
        pp_rank=pp_rank,
        moment="loss" if at_loss else "backward",
        weights=state.weights,
        gradients=state.gradients,
        optimizer=state.optimizer,
        activations=activations + (0.0 if at_loss else rank.recomputed),
        logits=loss if at_loss else 0.0,
        buffers=coming + (0.0 if at_loss else rank.gradients_on_the_way),
        reserve=stack.context + stack.fragmentation * worst,
    )


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
        return _WIDTHS[formats(self.layout.precision).rest][0]

    @property
    def tokens(self) -> float:
        """Of one micro-batch, after cp has cut the sequence."""
        return self.layout.mb * self.seq / self.layout.cp

    def saved(self, layer: int) -> tuple[Saved, ...]:
        return block_saved(self.shape, layer, self.seq, self.element, self.stack)

    @property
    def stages(self) -> tuple[int, ...]:
        return stages_of_rank(self.layout, self.pp_rank)

    @property
    def last(self) -> bool:
        """Whether it computes the loss."""
        return self.layout.num_stages - 1 in self.stages

    @property
    def kinds(self) -> dict[int, int]:
        """How many blocks of each kind all its stages hold, by one layer of the kind."""
        layers = [i for s in self.stages for i in stage_layers(self.shape, self.layout, s)]
        dense = self.shape.dense_layers if self.shape.is_moe else self.shape.layers
        first = sum(layer < dense for layer in layers)
        counts = {0: first, self.shape.layers - 1: len(layers) - first}
        return {layer: count for layer, count in counts.items() if count}

    @property
    def stage_activations(self) -> float:
        """Kept by one micro-batch in one of its stages, on average over them."""
        total = 0.0
        for layer, count in self.kinds.items():
            left = kept(self.saved(layer), self.layout.recompute)
            total += count * bytes_per_token(left, self.layout)
        return self.tokens * total / len(self.stages)

    @property
    def recomputed(self) -> float:
        """What one block holds again while its backward runs."""
        return max(self._dropped(layer) for layer in self.kinds) if self.kinds else 0.0

    def _dropped(self, layer: int) -> float:
        everything = self.saved(layer)
        left = kept(everything, self.layout.recompute)
        gone = [item for item in everything if item not in left]
        return self.tokens * bytes_per_token(gone, self.layout)

    def logits(self, in_flight: float) -> float:
        """What the last rank holds at its loss; GPipe has put by the logits of all others."""
        if not self.last:
            return 0.0
        saved = head_saved(self.shape, self.element, self.stack)
        one = self.tokens * bytes_per_token(saved, self.layout)
        whole = self.layout.tp == 1
        worst = self.stack.logit_peak_whole if whole else self.stack.logit_peak
        extra = worst - self.stack.logit_kept
        peak = one + self.tokens * self.shape.vocab * extra / self.layout.tp
        others = max(in_flight - 1, 0.0) if len(self.stages) == 1 else 0.0
        return others * one + peak

    @property
    def gradients_on_the_way(self) -> float:
        """Gradients of one block's activations, and of whole units until they are reduced."""
        activations = max((self._on_the_way(layer) for layer in self.kinds), default=0.0)
        units = 2 if self.layout.zero_stage >= 2 else 0
        return activations + units * self._largest_unit * self.stack.gradient_bytes

    def _on_the_way(self, layer: int) -> float:
        """While the MLP of a block is differentiated."""
        shape, t = self.shape, self.layout.tp
        routed = shape.is_moe and layer >= shape.dense_layers
        inputs = 3 if shape.activation == "swiglu" else 2
        if routed:
            width, h = shape.top_k * (shape.moe_ffn or shape.ffn), shape.top_k * shape.hidden
            cut = t if self.layout.sp else 1
            per_token = (inputs * width + 2 * h) / cut
        else:
            per_token = inputs * shape.ffn / t
        whole = 2 * shape.hidden  # gathered gradient of the output, gathered input
        return self.tokens * self.element * (per_token + whole)

    @property
    def gathered(self) -> float:
        """Whole weights of the unit in use and of the next one, under ZeRO-3."""
        if self.layout.zero_stage < 3:
            return 0.0
        return 2 * self._largest_unit * self.element

    @property
    def messages(self) -> float:
        """One activation on its way from a neighbouring stage, and one on its way to it."""
        if self.layout.pp == 1:
            return 0.0
        parts = self.layout.tp if self.layout.sp else 1
        return 2 * self.tokens * self.shape.hidden * self.element / parts

    @property
    def _largest_unit(self) -> int:
        return max(self._unit_sizes())

    def _unit_sizes(self) -> list[int]:
        ends = 0 in self.stages or self.last
        table = [embedding_held(self.shape, self.layout).total] if ends else []
        return table + [block_held(self.shape, self.layout, i).total for i in self.kinds]


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
    return StateBytes(
        weights=spread[3] * per_param.weights,
        gradients=(spread[2] + apart) * per_param.gradients,
        master=spread[1] * per_param.master,
        moments=spread[1] * per_param.moments,
    )


def _spread(held: Held, group: Held) -> float:
    return held.shared / group.shared + held.experts / group.experts
