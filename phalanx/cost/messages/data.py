"""The data axis: what ZeRO 0 to 3 and HSDP send. Its twin is phalanx/trainer/parallel/data.py.

Splits: the batch, and the optimizer state, gradients and weights as the ZeRO stage says.
Sends, for a unit of n elements, m micro-batches, c bytes in products and w bytes in gradients:

    stage  gradients                        weights
    0      all-reduce n w, once             -
    1      reduce-scatter n w, once         all-gather n c, once
    2      reduce-scatter n w, m times      all-gather n c, once
    3      reduce-scatter n w, m times      all-gather n c, m times in forward and in backward

PipeDream does each of these m times, since every micro-batch is an update of its own.
With reshard=off stage 3 gathers once a step, and lets go after the last backward: Llama 3 keeps
weights from forward to backward (arXiv:2407.21783, section 3.3.2). Under HSDP each rank's part is
all-reduced once more, over the copies. Ranks along cp hold the same weights and see other tokens:
they belong to this axis too. Experts are alike only on ranks with the same place along ep, and so
n is shared by 1/e of the ranks. Source: Rajbhandari et al. 2019 (arXiv:1910.02054), section 7.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from phalanx.core.message import Collective
from phalanx.core.operators import parameters_of
from phalanx.cost.holdings import Share
from phalanx.cost.messages.unit import Among, Behind, Pass, Setting, UnitMessage, padded
from phalanx.cost.params import UnitSize, is_apart
from phalanx.cost.table import Booleans, Floats, Integers


def messages(setting: Setting) -> Iterator[UnitMessage]:
    """What every unit sends along dp, and the number of tokens that count."""
    table = setting.table
    updates = updates_of(setting)
    yield UnitMessage(
        axis="data",
        among="dp",
        collective="all_reduce",
        purpose="valid tokens",
        bytes=8 * updates,
        times=np.where(table.dp * table.cp > 1, 1, 0),
        when="step",
        unit="rank",
    )
    for size in setting.sizes:
        unit = _Unit.of(setting, size)
        yield from _gradients(unit)
        yield from _weights(unit)


def updates_of(setting: Setting) -> Integers:
    """How often a step moves the weights: once, or with every micro-batch."""
    return np.where(setting.table.asynchronous, setting.table.m, 1)


class _Unit(NamedTuple):
    """One unit, and who has the same of it.

    Attributes:
        setting: of the messages.
        size: of the unit.
        exists: in which rows it is a unit of its own; a tied head is the embedding if one rank has
            both.
        everyone: ranks that hold the same parameters.
        sharers: those of them that share one sharded copy.
    """

    setting: Setting
    size: UnitSize
    exists: Booleans
    everyone: Integers
    sharers: Integers

    @classmethod
    def of(cls, setting: Setting, size: UnitSize) -> "_Unit":
        table = setting.table
        ep = table.ep if size.experts else np.ones_like(table.ep)
        exists = is_apart(setting.held, size)
        return cls(setting, size, exists, table.dp * table.cp // ep, table.sharers // ep)

    def padded(self, parts: Integers) -> Integers:
        """Elements on the way, which our trainer pads until they divide over `parts` ranks."""
        return padded(self.size.params, parts) if self.setting.pads else self.size.params

    def message(
        self,
        sent: tuple[Collective, str, Among],
        elements: Integers | Floats,
        times: Integers,
        when: Pass,
        share: Share = "all",
    ) -> UnitMessage:
        """A message of so many bytes, where the unit exists."""
        collective, purpose, among = sent
        behind: dict[Pass, Behind] = {"step": "pass"}
        return UnitMessage(
            axis="data",
            among=among,
            collective=collective,
            purpose=purpose,
            bytes=elements,
            times=np.where(self.exists, times, 0),
            when=when,
            unit=self.size.unit,
            share=share,
            behind=behind.get(when, "next unit"),
        )


def _gradients(unit: _Unit) -> Iterator[UnitMessage]:
    """Every gradient is reduced over all that hold the same parameters."""
    table, wide, updates = unit.setting.table, unit.setting.wide, updates_of(unit.setting)
    dp, shards, replicas = _groups(unit.size)
    whole = unit.padded(unit.everyone) * wide
    once = np.where((table.zero_stage == 0) & (unit.everyone > 1), updates, 0)
    yield unit.message(("all_reduce", "gradients", dp), whole, once, "step")
    n = unit.padded(unit.sharers)
    cut = (table.zero_stage > 0) & (unit.sharers > 1)
    scatter: tuple[Collective, str, Among] = ("reduce_scatter", "gradients", shards)
    passes: tuple[tuple[Pass, Booleans], ...] = (
        ("weight gradient", unit.setting.reduces_every),
        ("step", ~unit.setting.reduces_every),
    )
    for when, rows in passes:
        yield unit.message(scatter, n * wide, np.where(cut & rows, 1, 0), when)
    times = np.where((table.zero_stage > 0) & (table.dp > table.shards), updates, 0)
    part = n / np.maximum(unit.sharers, 1) * wide
    yield unit.message(("all_reduce", "gradients of copies", replicas), part, times, "step")


def _weights(unit: _Unit) -> Iterator[UnitMessage]:
    """What is cut is gathered once a step, or around every use."""
    table, size = unit.setting.table, unit.size
    cut = (table.zero_stage > 0) & (unit.sharers > 1)
    around = cut & (table.zero_stage == 3) & table.reshard
    n = unit.padded(unit.sharers) * unit.setting.element
    gather: tuple[Collective, str, Among] = ("all_gather", "weights", _groups(size)[1])
    once = np.where(cut & ~around, updates_of(unit.setting), 0)
    yield unit.message(gather, n, once, "step")
    forward, backward = _uses(unit)
    yield unit.message(gather, n, np.where(around, forward, 0), "forward")
    yield unit.message(gather, n, np.where(around, backward, 0), "input gradient")
    if size.unit.endswith("block"):
        twice = np.where(around & unit.setting.by_segment, 1, 0)
        yield unit.message(gather, n, twice, "recompute", "not last two")


def _uses(unit: _Unit) -> tuple[Integers, Integers]:
    """How often a micro-batch needs the weights in forward and in backward.

    Looking up has a gradient that needs none, and the gradient of a head whose logits come in
    chunks is made in forward. A tied table is used at both ends, if one rank has both.
    """
    table, size = unit.setting.table, unit.size
    once, logits = np.ones_like(table.tp), np.where(table.logits == 0, 1, 0)
    if size.unit == "head" and size.name != "norm":
        return once, logits
    if size.unit != "embedding":
        return once, once
    head = unit.setting.held.ends_together & _is_tied(unit.setting) & (size.name == "embedding")
    return once + head, logits * head


def _is_tied(setting: Setting) -> bool:
    """Whether the head multiplies by the table of tokens."""
    return any(p.name == "embedding.weight" for p in parameters_of(setting.model.head))


def _groups(size: UnitSize) -> tuple[Among, Among, Among]:
    """All ranks that hold the same of a unit, those of one sharded copy, and those of one shard."""
    if size.experts:
        return "expert dp", "expert shards", "expert replicas"
    return "dp", "shards", "replicas"
