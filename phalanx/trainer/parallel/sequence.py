"""The sequence between the products of tensor parallelism: cut over ranks, put together, summed.

Messages go whole, for a compiler or without sequence parallelism, or part by part, so that some
parts are multiplied while others travel.

Shapes: s sequence, b micro-batch, h hidden; s/t where a rank holds only its part.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from phalanx.trainer.parallel import comm
from phalanx.trainer.parallel.comm import Group, Pending
from phalanx.trainer.parallel.traced import all_gather, all_reduce, enlist, reduce_scatter
from phalanx.trainer.precision.product import Operand


class SequencePart(NamedTuple):
    """Some of the sequence; wait before touching it.

    Attributes:
        number: which part.
        operand: its numbers.
        arriving: messages that bring them.
    """

    number: int
    operand: Operand
    arriving: Sequence[Pending]

    def here(self) -> Operand:
        """Its numbers, once they have arrived."""
        for pending in self.arriving:
            pending.wait()
        return self.operand


class CutSequence:
    """How one rank takes part in what its group puts together and adds up.

    Attributes:
        group: the ranks along tp.
        sequence: whether activations outside the matrix pairs are cut along the sequence.
    """

    def __init__(self, group: Group, *, sequence: bool) -> None:
        self.group, self.sequence = group, sequence and group.size > 1
        enlist(group)

    @property
    def sequence_parts(self) -> int:
        """Into how many parts the sequence is cut outside the matrix pairs."""
        return self.group.size if self.sequence else 1

    @property
    def in_parts(self) -> bool:
        """Whether parts of the sequence are multiplied while others travel.

        A compiler sees a message as one operator, which is complete when it returns.
        """
        return self.sequence and not torch.compiler.is_compiling()

    def my_sequence(self, x: Tensor) -> Tensor:
        """This rank's part of `x` along its first dim, the sequence."""
        return x.chunk(self.sequence_parts)[self.group.index] if self.sequence else x

    def gather_sequence(self, x: Tensor, purpose: str) -> tuple[Tensor, Pending]:
        """Start to put the parts of the sequence together: [s/t, b, h] to [s, b, h].

        Args:
            x: this rank's part; without sequence parallelism the whole, which comes back as it is.
            purpose: of the message, for the ledger.

        Returns:
            The whole, and what to wait for before touching it.
        """
        if not self.sequence:
            return x, Pending()
        if torch.compiler.is_compiling():
            return all_gather(x, self.group.name, self.group.size, purpose), Pending()
        whole = x.new_empty((x.shape[0] * self.group.size, *x.shape[1:]))
        return whole, self.group.all_gather(whole, x.contiguous(), purpose)

    def gather_operand(self, x: Operand, purpose: str) -> tuple[Operand, Sequence[Pending]]:
        """Start to put the parts of an input together, and those of its scales if they are cut.

        Args:
            x: this rank's part, [s/t, b, n]; the whole without sequence parallelism.
            purpose: of the message, for the ledger; that of scales has " scales" behind it.

        Returns:
            The whole, [s, b, n], and what to wait for before touching it.
        """
        data, arriving = self._gather_bits(x.data, purpose)
        if x.scale is None or x.scale.dim() == 0:
            return Operand(data, x.scale), [arriving]
        scale, scales_arriving = self._gather_bits(x.scale, f"{purpose} scales")
        return Operand(data, scale), [arriving, scales_arriving]

    def gather_parts(self, x: Operand, purpose: str) -> tuple[Operand, Sequence[SequencePart]]:
        """Start to put the parts of a tensor together, each to be used as soon as it is here.

        Args:
            x: this rank's part, [s/t, b, n]; the whole without sequence parallelism.
            purpose: of the messages, for the ledger; that of scales has " scales" behind it.

        Returns:
            Room for the whole, and its parts in the order in which to use them; one part if the
            sequence is not cut, or only as a whole to be had.
        """
        if not self.in_parts:
            whole, pending = self.gather_operand(x, purpose)
            return whole, [SequencePart(0, whole, pending)]
        data, arriving = self._gather_parts(x.data, purpose)
        if x.scale is None or x.scale.dim() == 0:
            parts = [
                SequencePart(y.source, Operand(y.data, x.scale), [y.pending]) for y in arriving
            ]
            return Operand(data, x.scale), parts
        scale, scales = self._gather_parts(x.scale, f"{purpose} scales")
        parts = [
            SequencePart(y.source, Operand(y.data, z.data), [y.pending, z.pending])
            for y, z in zip(arriving, scales, strict=True)
        ]
        return Operand(data, scale), parts

    def _gather_parts(self, x: Tensor, purpose: str) -> tuple[Tensor, list[comm.Part]]:
        bits = _as_carried(x)
        whole = bits.new_empty((x.shape[0] * self.group.size, *x.shape[1:]))
        parts = self.group.all_gather_parts(whole, bits.contiguous(), purpose)
        return whole.view(x.dtype), [part._replace(data=part.data.view(x.dtype)) for part in parts]

    def _gather_bits(self, x: Tensor, purpose: str) -> tuple[Tensor, Pending]:
        whole, arriving = self.gather_sequence(_as_carried(x), purpose)
        return whole.view(x.dtype), arriving

    def reduce_sequence(self, x: Tensor, purpose: str) -> tuple[Tensor, Pending]:
        """Start to add up [s, b, h] over ranks, keeping [s/t, b, h]; or all of it without sp.

        Args:
            x: this rank's share of the sum; without sp it may be overwritten with the sum.
            purpose: of the message, for the ledger.

        Returns:
            The sum, and what to wait for before touching it.
        """
        if torch.compiler.is_compiling():
            return self._traced_reduction(x, purpose), Pending()
        x = x.contiguous()
        if not self.sequence:
            return x, self.group.all_reduce(x, purpose)
        part = x.new_empty((x.shape[0] // self.group.size, *x.shape[1:]))
        return part, self.group.reduce_scatter(part, x, purpose)

    def _traced_reduction(self, x: Tensor, purpose: str) -> Tensor:
        group = self.group
        if group.size == 1:
            return x
        if not self.sequence:
            return cast(Tensor, all_reduce(x, group.name, purpose))
        return cast(Tensor, reduce_scatter(x, group.name, group.size, purpose))


def _as_carried(x: Tensor) -> Tensor:
    """To those who carry messages, 8-bit numbers are bytes."""
    return x if x.element_size() > 1 else x.view(torch.uint8)


def part_of(x: Operand, index: int, parts: int) -> Operand:
    """One of as many equal parts of an operand along its first dim, the sequence.

    Args:
        x: [s, ...]; scales are cut with it if there is more than one.
        index: which part, from 0.
        parts: how many there are; they divide s.
    """
    if x.scale is None or x.scale.dim() == 0:
        return Operand(x.data.chunk(parts)[index], x.scale)
    return Operand(x.data.chunk(parts)[index], x.scale.chunk(parts)[index])


def fill(
    outputs: Sequence[Tensor],
    parts: Sequence[SequencePart],
    compute: Callable[[Operand], Sequence[Tensor]],
) -> None:
    """Fill outputs, cut like the parts along their first dim, with what each part gives.

    Args:
        outputs: tensors of s rows each.
        parts: of the input, [s/t, ...] each, in the order in which they arrive.
        compute: gives of one part a piece for each output, as large as its room there.
    """
    for part in parts:
        for output, found in zip(outputs, compute(part.here()), strict=True):
            room = output.chunk(len(parts))[part.number]
            room.copy_(found.view_as(room))
