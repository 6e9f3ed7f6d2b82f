"""The context axis: what attention sends. Its twin is phalanx/trainer/parallel/context.py.

Splits: the sequence, s/c tokens on each rank, in two chunks that a causal mask loads alike.
Sends, in each block and micro-batch, for S = s/c b g/t (d + w) elements of keys and values:

    context    forward                            backward
    ring       send S, c - 1 times                the same again; send its gradient, c - 1 times
    gather     all-gather c S                     the same again; reduce-scatter c S of gradients
    ulysses    all-to-all of q, k and v,          all-to-all of the result and its gradient,
               all-to-all of the result           all-to-all of the gradients of q, k and v

Gradients that are added up on the way are as wide as those of weights; what is only moved is as
wide as activations. Where attention is computed again in backward, so is its forward sent again.
Sources: Liu et al. 2023 (arXiv:2310.01889), section 3; Llama 3 (arXiv:2407.21783), section 3.3.2;
Jacobs et al. 2023 (arXiv:2309.14509), section 3.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from phalanx.core.message import Collective
from phalanx.core.operator import UNITS, AttentionCore, UnitName
from phalanx.cost.messages.unit import Behind, Pass, Setting, UnitMessage
from phalanx.cost.table import Booleans, Integers


def messages(setting: Setting) -> Iterator[UnitMessage]:
    """What the attention of each block sends along cp."""
    if not (setting.table.cp > 1).any():
        return
    for unit in UNITS:
        for operator in setting.model.of(unit):
            if isinstance(operator.computes, AttentionCore):
                attention = _attention(setting, unit, operator.computes)
                yield from _ring(attention)
                yield from _gather(attention)
                yield from _ulysses(attention)


class _Attention(NamedTuple):
    """The attention of one kind of block on one rank, for a micro-batch.

    Attributes:
        setting: of the messages.
        unit: the block.
        inputs: elements of queries, keys and values.
        keys: elements of keys and values.
        result: elements of what attention makes.
    """

    setting: Setting
    unit: UnitName
    inputs: Integers
    keys: Integers
    result: Integers

    def message(
        self,
        collective: Collective,
        purpose: str,
        size: Integers,
        when: tuple[Pass, Integers | Booleans],
    ) -> UnitMessage:
        """A message of `size` bytes in a pass, so many times."""
        behind: Behind = "attention" if collective in ("send", "all_gather") else "nothing"
        if purpose == "key and value gradients":
            behind = "attention"
        return UnitMessage(
            axis="context",
            among="cp",
            collective=collective,
            purpose=purpose,
            bytes=size,
            times=when[1] * np.int64(1) * (self.setting.table.cp > 1),
            when=when[0],
            unit=self.unit,
            behind=behind,
        )

    def passes(self, times: Integers | Booleans) -> Iterator[tuple[Pass, Integers | Booleans]]:
        """Forward, and where attention is computed again the forward that backward repeats."""
        yield "forward", times
        yield "recompute", times * computed_again(self.setting)


def _attention(setting: Setting, unit: UnitName, core: AttentionCore) -> _Attention:
    t, tokens = setting.table.tp, setting.tokens
    heads = tokens * core.heads.held(t)
    keys = tokens * core.kv_heads.held(t) * (core.query + core.value)
    return _Attention(setting, unit, heads * core.query + keys, keys, heads * core.value)


def computed_again(setting: Setting) -> Booleans:
    """Where backward computes attention again, alone or with its block."""
    return setting.table.recompute.test(lambda r: r.segment > 0 or "core" in r.parts)


def _ring(at: _Attention) -> Iterator[UnitMessage]:
    table, element, wide = at.setting.table, at.setting.element, at.setting.wide
    hops = (table.cp - 1) * table.context.test(lambda kind: kind == "ring")
    for when in (*at.passes(hops), ("input gradient", hops)):
        yield at.message("send", "keys and values", at.keys * element, when)
    when = ("input gradient", hops)
    yield at.message("send", "key and value gradients", at.keys * wide, when)


def _gather(at: _Attention) -> Iterator[UnitMessage]:
    table, element, wide = at.setting.table, at.setting.element, at.setting.wide
    once, size = table.context.test(lambda kind: kind == "gather"), table.cp * at.keys
    for when in (*at.passes(once), ("input gradient", once)):
        yield at.message("all_gather", "keys and values", size * element, when)
    when = ("input gradient", once)
    yield at.message("reduce_scatter", "key and value gradients", size * wide, when)


def _ulysses(at: _Attention) -> Iterator[UnitMessage]:
    element = at.setting.element
    once = at.setting.table.context.test(lambda kind: kind == "ulysses")
    inputs, result = at.inputs * element, at.result * element
    for when in at.passes(once):
        yield at.message("all_to_all", "queries, keys and values", inputs, when)
        yield at.message("all_to_all", "attention result", result, when)
    when = ("input gradient", once)
    yield at.message("all_to_all", "attention result and gradient", 2 * result, when)
    yield at.message("all_to_all", "query, key and value gradients", inputs, when)
