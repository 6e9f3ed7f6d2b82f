"""The other ranks of a rehearsal: they take whatever they are sent, and nothing arrives.

Tensors of a rehearsal have no values, so what would arrive has none either; what counts is that it
is sent, that it has memory, and for how long.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from phalanx.core.run import Run
from phalanx.cost.messages.expert import real_tokens
from phalanx.cost.table import Table
from phalanx.trainer.parallel.comm import Group, Part, Pending, UnevenSplits
from phalanx.trainer.parallel.expert import ExpertParallel, RowCounts
from phalanx.trainer.parallel.mesh import Mesh, build_mesh


class SilentGroup(Group):
    """A group in which only this rank is real."""

    def _receive(self, x: Tensor, source: int, tag: int) -> Pending:
        return _under_way(x)

    def _send(self, x: Tensor, to: int, purpose: str, tag: int) -> Pending:
        return _under_way(x)

    def _all_reduce(self, x: Tensor, purpose: str, largest: bool) -> Pending:
        return _under_way(x)

    def _all_gather(self, out: Tensor, x: Tensor, purpose: str) -> Pending:
        return _under_way(out, x)

    def _reduce_scatter(self, out: Tensor, x: Tensor, purpose: str) -> Pending:
        return _under_way(out, x)

    def _all_to_all(
        self, out: Tensor, x: Tensor, purpose: str, rows: UnevenSplits | None
    ) -> Pending:
        return _under_way(out, x)

    def _all_gather_parts(self, out: Tensor, x: Tensor, purpose: str) -> list[Part]:
        chunks = out.chunk(self.size)
        around = ((self.index - distance) % self.size for distance in range(self.size))
        return [Part(source, chunks[source], _under_way(out, x)) for source in around]

    def _reduce_scatter_parts(
        self, out: Tensor, make: Callable[[int], Tensor], purpose: str
    ) -> Pending:
        others = (index for index in range(self.size) if index != self.index)
        sent = [make(index) for index in (*others, self.index)]
        return _under_way(out, *sent)

    def _shift(self, out: Tensor, x: Tensor, purpose: str) -> Pending:
        return _under_way(out, x)


def _under_way(*buffers: Tensor) -> Pending:
    """A message whose buffers are in use until somebody waits for it."""
    return Pending([None], buffers=buffers)


class EvenExperts(ExpertParallel):
    """Experts that all get the same number of rows: which tokens they get, no rehearsal knows.

    Attributes:
        real: of so many places of a sequence on this rank hold a token, the others are padding;
            both numbers.
    """

    def __init__(self, group: Group, real: tuple[int, int]) -> None:
        super().__init__(group)
        self.real = real

    def count(self, expert: Tensor, experts: int) -> RowCounts:
        """Rows spread evenly; the first experts get one more where they do not divide.

        Args:
            expert: int64 [rows], without values.
            experts: E.
        """
        tokens, places = self.real
        each, more = divmod(len(expert) * tokens // places, experts)
        of_expert = [each + (i < more) for i in range(experts)]
        held = experts // self.group.size
        sent = [of_expert[at : at + held] for at in range(0, experts, held)]
        theirs = expert.new_empty(self.group.size, held)
        self.group.all_to_all(theirs, torch.empty_like(theirs), "rows per expert").wait()
        return RowCounts(theirs, sent, [sent[self.group.index]] * self.group.size)


@contextmanager
def silent_mesh(run: Run, rank: int) -> Iterator[Mesh]:
    """The mesh of one rank, all others made up.

    Args:
        run: of any number of ranks.
        rank: which.
    """
    layout, kv_heads = run.layout, run.model.kv_heads
    world = layout.ranks
    if world > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        mesh = build_mesh(layout, torch.device("cpu"), SilentGroup, kv_heads=kv_heads)
        table = Table.of_run(run)
        real = int(real_tokens(table, mesh.at.cp)[0]), int(table.padded_seq[0]) // layout.cp
        yield replace(mesh, expert_type=partial(EvenExperts, real=real))
    finally:
        if world > 1:
            dist.destroy_process_group()
