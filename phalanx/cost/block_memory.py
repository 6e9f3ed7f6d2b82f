"""What one block saves for its backward, and what it makes while it is differentiated.

All sizes are columns over a table of layouts, and come in pairs: of a block without, and of one
with experts.

Symbols: h hidden, f ffn width, K experts per token, t tp, T tokens of a micro-batch on one rank.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from phalanx.core.errors import UsageError
from phalanx.core.precision import Precision
from phalanx.core.recompute import MODES, NONE, SELECTIVE, Recompute
from phalanx.cost.precision import as_operands
from phalanx.cost.saved import Saved, Stack, block_saved, kept, mlp_saved
from phalanx.cost.table import Column, Table, Which, some_rows

BF16 = 2
Pair = tuple[Column, Column]  # of a block without experts, and of one with them
# What every search needs of a block; the rest is for what few layouts have.
PAIRS = ("saved", "everything", "made_again", "gradients")
Choose = Callable[[tuple[Saved, ...], Recompute], Iterable[Saved]]

# bytes of an element in products, of a master weight, of both moments
_WIDTHS = {
    "bf16": (2, 4, 8),
    "fp16": (2, 4, 8),
    "fp32": (4, 0, 8),
    "fp64": (8, 0, 16),
}


@dataclass(frozen=True)
class BlockMemory:
    """Blocks of one micro-batch on one rank, as layouts cut them.

    Attributes:
        table: the layouts.
        stack: what the program keeps.
    """

    table: Table
    stack: Stack

    @classmethod
    def known(cls, table: Table, stack: Stack, pairs: dict[str, Pair]) -> "BlockMemory":
        """Blocks of which some pairs have been found elsewhere and need not be folded again.

        Args:
            table: the layouts.
            stack: what the program keeps.
            pairs: bytes of a block without and with experts, each a column of the table, under the
                names of the properties that they stand for (`PAIRS`).
        """
        found = cls(table, stack)
        found.__dict__.update(pairs)
        return found

    def take(self, which: Which) -> "BlockMemory":
        """Some of the rows, with what has been found of them."""
        known = {name: self.__dict__[name] for name in PAIRS if name in self.__dict__}
        pairs = {
            name: (some_rows(dense, which), some_rows(routed, which))
            for name, (dense, routed) in known.items()
        }
        return BlockMemory.known(self.table.take(which), self.stack, pairs)

    @cached_property
    def element(self) -> int:
        """Bytes of an activation, and of a weight as products read it."""
        return widths(self.table.precision)[0]

    @cached_property
    def tokens(self) -> Column:
        """T, of a micro-batch on one cp rank."""
        return self.table.mb * self.table.recipe.seq / self.table.cp

    @cached_property
    def boundary(self) -> Column:
        """S: one activation between blocks, of all tokens."""
        return self.tokens * self.table.model.hidden * self.element

    @cached_property
    def saved(self) -> Pair:
        """Bytes that a block saves until its backward."""
        return self._fold(self._kept)

    @cached_property
    def everything(self) -> Pair:
        """The same if nothing were freed."""
        return self._fold(lambda saved, _: saved)

    @cached_property
    def made_again(self) -> Pair:
        """What recomputing parts brings back in the backward of a block."""
        return self._fold(self._gone)

    @cached_property
    def fetched(self) -> Pair:
        """The same where everything that a block saves has left the device."""
        return self._fold(lambda saved, _: _of_mlp(saved))

    @cached_property
    def freed_by_others(self) -> Pair:
        """What recomputing parts frees in programs that we know only from outside."""
        return self._fold(self._freed_by_others)

    @cached_property
    def gradients(self) -> Pair:
        """Gradients of one block's activations, of its MLP or under cp of its attention."""
        mlp = tuple(self._mlp_gradients(routed=routed) for routed in (False, True))
        if not self.stack.key_gradients_travel or not np.any(self.table.cp > 1):
            return mlp[0], mlp[1]
        attention = self.tokens * held_in_backward(self.table, self.element)
        freed = self._fold(lambda saved, _: mlp_saved(saved))
        dense, routed = (
            np.where(self.table.cp > 1, np.maximum(one, attention - gone), one)
            for one, gone in zip(mlp, freed, strict=True)
        )
        return dense, routed

    def _mlp_gradients(self, *, routed: bool) -> Column:
        """A gelu frees its output before its input has a gradient; a swiglu holds it."""
        shape, t = self.table.model, self.table.tp
        inputs = 3 if shape.is_gated else 1
        gathered = 2 * shape.hidden  # gradient of the output, input
        if not routed:
            return self.tokens * self.element * (inputs * shape.ffn / t + gathered)
        rows = shape.top_k * (inputs * shape.expert_width + 2 * shape.hidden)
        return self.tokens * self.element * (rows / np.where(self.table.sp, t, 1) + gathered)

    @cached_property
    def _all_saved(self) -> tuple[tuple[Saved, ...], tuple[Saved, ...]]:
        """Every tensor of a block without, and of one with experts."""
        shape, seq = self.table.model, self.table.recipe.seq
        dense = block_saved(replace(shape, experts=0), 0, seq, self.element, self.stack)
        if not shape.is_moe:
            return dense, ()
        return dense, block_saved(shape, shape.layers - 1, seq, self.element, self.stack)

    def _fold(self, choose: Choose) -> Pair:
        """Bytes of chosen tensors."""
        dense, routed = self._all_saved
        return (
            self.tokens * saved_bytes(self.table, lambda mode: choose(dense, mode)),
            self.tokens * saved_bytes(self.table, lambda mode: choose(routed, mode))
            if routed
            else 0.0,
        )

    def _kept(self, saved: tuple[Saved, ...], mode: Recompute) -> tuple[Saved, ...]:
        """What is saved under one mode of recomputation."""
        if mode.segment:
            return kept(saved, mode)
        left = kept(saved, mode)
        if self.by_others(mode) and "operators" in mode.parts:
            left = _kept_by_operator(saved)
        if self.table.precision.recipe and mode in (NONE, SELECTIVE):
            left = tuple(as_operands(left, self.table.precision))
        if self.stack.keeps_gates and self.table.model.is_gated:
            left = (*left, Saved("gate", self.table.model.ffn * self.element, "tp"))
        return left

    def _gone(self, saved: tuple[Saved, ...], mode: Recompute) -> tuple[Saved, ...]:
        """What recomputing parts of a block makes again for its MLP."""
        if mode.segment or self.by_others(mode):
            return ()
        left = kept(saved, mode)
        return tuple(item for item in _of_mlp(saved) if item not in left)

    def by_others(self, mode: Recompute) -> bool:
        """Whether another program recomputes parts of blocks: how we do it is known."""
        known = mode in MODES or mode.segment > 0
        return not (known or self.stack.parts_as_ledger)

    def _freed_by_others(self, saved: tuple[Saved, ...], mode: Recompute) -> tuple[Saved, ...]:
        if not self.by_others(mode):
            return ()
        if "operators" not in mode.parts:
            left = kept(saved, mode)
            return tuple(item for item in saved if item not in left)
        less = [item._replace(bytes=-item.bytes) for item in _kept_by_operator(saved)]
        return (*saved, *less)


def widths(precision: Precision) -> tuple[int, int, int]:
    """Bytes of an element in products, of a master weight, of both moments.

    Raises:
        UsageError: a precision that only a device can resolve, or one without a rule.
    """
    if precision.rest not in _WIDTHS:
        raise UsageError(f"name the precision to count bytes: {', '.join(sorted(_WIDTHS))}")
    return _WIDTHS[precision.rest]


def saved_bytes(table: Table, of_mode: Callable[[Recompute], Iterable[Saved]]) -> Column:
    """Bytes on one rank for each token of a micro-batch, as every layout cuts them.

    Args:
        table: the layouts.
        of_mode: the tensors that are saved under a mode of recomputation.
    """
    modes = table.recompute
    sums: dict[tuple[str, int], list[float]] = {}
    for place, mode in enumerate(modes.values):
        for item in of_mode(mode):
            each = sums.setdefault((item.cut, item.most), [0.0] * len(modes.values))
            each[place] += item.bytes
    total: Column = 0.0
    own = np.where(table.sp, table.tp, 1)
    for (cut, most), sizes in sums.items():
        cuts: dict[str, Column] = {"tp": table.tp, "sequence": own, "whole": 1}
        parts = np.minimum(cuts[cut], most) if most else cuts[cut]
        total = total + np.array(sizes)[modes.codes] / parts
    return total


def _of_mlp(saved: tuple[Saved, ...]) -> tuple[Saved, ...]:
    """What of the MLP comes again; the result of its activation goes before the rest comes."""
    return tuple(i for i in mlp_saved(saved) if not i.name.endswith("after activation"))


def _kept_by_operator(saved: tuple[Saved, ...]) -> tuple[Saved, ...]:
    """The block's input, the attention result, and the results of every second product.

    Beside them stands the input of the MLP, as wide as the two sums, halved.
    """
    outputs = (
        *("query", "keys", "values", "mlp: first", "mlp: second"),
        *("experts: first", "experts: second"),
    )
    return (
        *(item for item in saved if item.part == "input" or item.name == "attention result"),
        *(item._replace(bytes=item.bytes / 2) for item in saved if item.name.startswith(outputs)),
        *(item for item in saved if item.name == "mlp input"),
    )


def held_in_backward(table: Table, element: int) -> Column:
    """Bytes per token of a rank that attention holds at most while it is differentiated.

    For q elements of queries and results, k of keys and values, e bytes each and w while they are
    added up: 2 q of gradients come in, 2 k of blocks are here or on their way, and q + k leave the
    kernel. Beside that

        ring       w (q + 4 k)          what a rank adds to its own, to this block, and what
                                        arrives and leaves; 2 k between two ranks
        gather     w (q + (c + 2) k)    of all blocks at once, and c k of keys and values
        ulysses    e 2 (q + k)          of all tokens and of this rank's, before and after the trade

    Args:
        table: the layouts; tp, cp and context are used.
        element: e, bytes of an activation; w is e, and at least 4.
    """
    shape, t, c, wide = table.model, table.tp, table.cp, max(element, 4)
    q = shape.heads // t * shape.qk_width
    k = np.maximum(shape.kv_heads // t, 1) * shape.kv_width
    extra = {
        "ring": element * 2 * k + wide * (q + np.where(c > 2, 4, 2) * k),
        "gather": element * c * k + wide * (q + (c + 2) * k),
        "ulysses": element * 2 * (q + k),
    }
    beside: Column = 0
    for name, more in extra.items():
        beside = beside + more * table.context.test(name.__eq__)
    return element * (2 * shape.hidden + q + k) + beside
